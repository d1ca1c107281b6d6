"""Paths in, documents out: the standard library, files and folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from core.data.corpus import documents, find_corpus, identity, sample
from core.errors import DataError


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def read(path: Path) -> dict[str, str]:
    return {document.name: document.text for document in documents(str(path))}


def test_the_built_in_corpus_is_sources_of_the_standard_library_of_a_size_to_learn_from() -> None:
    found = list(documents(None))
    names = [document.name for document in found]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"argparse.py", "json/decoder.py", "tarfile.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]
    assert 6_000_000 < sum(len(document.text.encode()) for document in found) < 12_000_000
    assert found[names.index("argparse.py")].text == Path(sys.modules["argparse"].__file__ or "").read_text()


def test_a_folder_is_read_in_the_order_of_its_relative_paths(tmp_path: Path) -> None:
    files = {"b.txt": "B", "a/z.md": "Z", "a/b/c.py": "C", "a.txt": "A", ".hidden": "no", ".git/config": "no"}
    write(tmp_path, files)
    write(tmp_path, {"lines.jsonl": json.dumps({"text": "L"})})
    assert list(read(tmp_path).items()) == [
        ("a.txt", "A"),
        ("a/b/c.py", "C"),
        ("a/z.md", "Z"),
        ("b.txt", "B"),
        ("lines.jsonl:1", "L"),
    ]


def test_a_single_text_file_is_cut_so_that_some_of_it_can_be_kept_for_validation(tmp_path: Path) -> None:
    text = "".join(f"This is line {i}.\n" for i in range(20_000))
    parts = read(write(tmp_path, {"book.txt": text}) / "book.txt")
    assert "".join(parts.values()) == text
    assert 40 < len(parts) < 130
    assert list(read(tmp_path).values()) == [text]  # in a folder a file is a document


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, {"data/a.txt": "A", "elsewhere/b.txt": "B"})
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    assert read(tmp_path / "data") == {"a.txt": "A", "more/b.txt": "B"}


def test_documents_are_streamed(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(50_000))
    write(tmp_path, {"a.jsonl": lines + "this line is broken"})
    assert [d.text for d in islice(documents(str(tmp_path / "a.jsonl")), 3)] == ["text 0", "text 1", "text 2"]


def test_a_sample_takes_turns_between_files_spread_over_the_corpus_and_has_all_of_it_in_the_end(tmp_path: Path) -> None:
    write(
        tmp_path,
        {f"{i:03}.jsonl": "".join(json.dumps({"text": f"{i} {j}"}) + "\n" for j in range(3)) for i in range(130)},
    )
    drawn = [document.text for document in sample(find_corpus(str(tmp_path)))]
    assert drawn[:3] == ["0 0", "3 0", "6 0"]
    first_turn = [int(text.split()[0]) for text in drawn[:44]]
    assert first_turn == list(range(0, 130, 3))
    assert sorted(drawn) == sorted(read(tmp_path).values())


def test_identity_changes_with_names_sizes_and_times(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "A", "b.txt": "B"})
    seen = [identity(find_corpus(str(tmp_path)))]
    assert identity(find_corpus(str(tmp_path))) == seen[0]
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    seen.append(identity(find_corpus(str(tmp_path))))
    write(tmp_path, {"a.txt": "AA"})
    seen.append(identity(find_corpus(str(tmp_path))))
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    seen.append(identity(find_corpus(str(tmp_path))))
    assert len({str(value) for value in seen}) == 4


def test_a_path_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: there is no such file or folder"):
        documents(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="empty path"):
        documents("")


def test_empty_folders_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder is empty"):
        documents(str(tmp_path))
    write(tmp_path, {".hidden": "x"})
    with pytest.raises(DataError, match="the folder is empty"):
        documents(str(tmp_path))
    write(tmp_path, {"a.txt": "", "b.txt": " \n "})
    with pytest.raises(DataError, match=r"a\.txt: holds no text: 1 file"):
        read(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"holds no text: 2 file"):
        read(tmp_path)


def test_pipes_devices_and_broken_links_are_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: not a regular file"):
        documents(str(tmp_path))
    with pytest.raises(DataError, match="pipe: neither a regular file nor a folder"):
        documents(str(tmp_path / "pipe"))
    (tmp_path / "pipe").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="link: not a regular file"):
        documents(str(tmp_path))


def test_a_wrong_file_in_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "fine"})
    (tmp_path / "b.txt").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match=r"b\.txt: not UTF-8"):
        read(tmp_path)


UNPRIVILEGED = """
import os, sys
from core.data.corpus import documents
from core.errors import DataError
if os.geteuid() == 0:
    os.seteuid(65534)
for path in sys.argv[1:]:
    try:
        list(documents(path))
        print("read", path)
    except DataError as error:
        print(error)
"""


def test_files_and_folders_without_permission_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "A", "folder/b.txt": "B", "other/c/d.txt": "D"})
    # pytest's folders are private, and a test that runs as root becomes nobody: what is tested is what lies inside
    private = {path: path.stat().st_mode for path in (tmp_path, *tmp_path.parents) if not path.stat().st_mode & 0o001}
    closed = {path: path.stat().st_mode for path in (tmp_path / "a.txt", tmp_path / "folder", tmp_path / "other" / "c")}
    asked = [str(tmp_path / name) for name in ("a.txt", "folder", "other", "folder/b.txt")]
    try:
        for path in private:
            path.chmod(0o755)
        for path in closed:
            path.chmod(0)
        command = [sys.executable, "-c", UNPRIVILEGED, *asked]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    finally:
        for path, mode in (closed | private).items():
            path.chmod(mode)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and all("Permission denied" in line for line in lines), lines
