"""Files in, documents out; and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from core.data import formats
from core.data.formats import read_file
from core.errors import DataError

TEXTS = ["first\nsecond line\n", "naïve café — 日本語 🦜", "x", 'tab\tand \\ and " and \r\n']


def texts(path: Path, **options) -> list[str]:
    return [document.text for document in read_file(path, path.name, **options)]


def json_lines(records: list[object]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


PACKERS = {
    "a.jsonl": lambda data: data,
    "a.jsonl.gz": gzip.compress,
    "a.jsonl.zst": zstandard.ZstdCompressor().compress,
    "A.JSONL.GZ": gzip.compress,
}


@pytest.mark.parametrize("name", PACKERS)
def test_json_lines_give_one_document_a_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(PACKERS[name](json_lines([{"id": i, "text": text} for i, text in enumerate(TEXTS)])))
    documents = list(read_file(path, "given"))
    assert [document.text for document in documents] == TEXTS
    assert [document.name for document in documents] == [f"given:{i}" for i in range(1, 5)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_files_of_several_members_are_read_to_the_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"".join(PACKERS[name](json_lines([{"text": text}])) for text in TEXTS))
    assert texts(path) == TEXTS


def test_zeros_behind_a_gzip_member_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines([{"text": "a"}])) + b"\0" * 512)
    assert texts(path) == ["a"]


@given(records=st.lists(st.text(min_size=1), max_size=8), block=st.integers(1, 50))
def test_lines_do_not_depend_on_how_the_file_is_cut_into_blocks(tmp_path_factory, records, block) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(json.dumps({"text": r}, ensure_ascii=False).encode() for r in records))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK_BYTES", block)
        assert texts(path) == [record for record in records if record.strip()]


@given(text=st.text(max_size=60), part=st.integers(4, 20))
def test_parts_of_a_text_make_up_the_text(tmp_path_factory, text, part) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    parts = [document.text for document in formats._read_text(path, "a.txt", part)]
    assert "".join(parts) == text.removeprefix("\ufeff")
    assert all(len(piece.encode()) <= part for piece in parts)


def test_a_long_text_is_cut_after_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    documents = list(read_file(path, "a.txt", part_bytes=64))
    assert all(document.text.endswith("\n") for document in documents)
    assert [document.name for document in documents] == [f"a.txt#{i}" for i in range(len(documents))]


def test_a_byte_order_mark_blank_lines_and_blank_documents_are_left_out(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.md", tmp_path / "a.jsonl"
    text.write_bytes(b"\xef\xbb\xbfhello")
    lines.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n\n  \n{"text": " "}\r\n{"text": "b"}')
    assert texts(text) == ["hello"]
    assert texts(lines) == ["a", "b"]


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
)
def test_parquet_gives_one_document_a_row_over_row_groups(tmp_path: Path, kind) -> None:
    path = tmp_path / "a.parquet"
    many = [f"{text} {i}" for i in range(300) for text in TEXTS]
    table = pyarrow.table({"id": list(range(len(many))), "text": pyarrow.array(many).cast(kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    documents = list(read_file(path, "p"))
    assert [document.text for document in documents] == many
    assert documents[-1].name == "p:1199"


def parquet(**columns) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


GOOD_LINE = b'{"text": "good"}\n'
NOT_UNICODE = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff"))
BAD = {
    "a byte that is not UTF-8": ("a.txt", b"caf\xe9 au lait", r"not UTF-8: byte 0xe9 at offset 3 .*Convert"),
    "a character that is cut off": ("a.txt", b"ab\xe2\x82", r"not UTF-8: byte 0xe2 at offset 2"),
    "UTF-16": ("a.txt", "hello".encode("utf-16"), r"not UTF-8: byte 0xff at offset 0"),
    "a picture": ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", r"unknown binary file \(byte 0x00 at offset 8\)"),
    "gzip of plain text": ("a.txt.gz", gzip.compress(b"text"), "a gzip file that is not named as one we read"),
    "zstd of plain text": ("a.zst", zstandard.compress(b"text"), "a zstd file that is not named as one we read"),
    "parquet by another name": ("a.pq", parquet(text=["a"]), "a parquet file that is not named as one we read"),
    "a broken line": ("a.jsonl", GOOD_LINE * 2 + b'{"text": "cut', r"line 3 is not JSON: Unterminated string"),
    "a number as a line": ("a.jsonl", GOOD_LINE + b"7\n", r"line 2 is a JSON int"),
    "a nest too deep": ("a.jsonl", b"[" * 200_000, r"line 1 is not JSON"),
    "no text": (
        "a.jsonl",
        GOOD_LINE + b'{"id": 1, "content": "x"}',
        r"line 2 has no field `text`\. Its fields: content, id\.",
    ),
    "no field at all": ("a.jsonl", b"{}", r"line 1 has no field `text`\. Its fields: none\."),
    "text that is null": ("a.jsonl", b'{"text": null}', r"line 1: `text` is NoneType, not a string"),
    "half a surrogate pair": (
        "a.jsonl",
        b'{"text": "ab\\ud800"}',
        r"line 1: `text` is not Unicode text: .* character 2",
    ),
    "not UTF-8 in a line": (
        "a.jsonl",
        GOOD_LINE + b'{"text": "\xff"}',
        rf"not UTF-8: byte 0xff at offset {len(GOOD_LINE) + 10}",
    ),
    "gzip that is not": ("a.jsonl.gz", b"no gzip at all", r"line 1: the compressed data is broken"),
    "gzip that is cut": (
        "a.jsonl.gz",
        gzip.compress(GOOD_LINE * 9)[:-9],
        r"line \d+: the compressed data is broken: it ends in the middle",
    ),
    "gzip with a wrong checksum": (
        "a.jsonl.gz",
        gzip.compress(GOOD_LINE)[:-8] + b"\1" * 8,
        r"broken: .*incorrect data check",
    ),
    "zstd that is not": ("a.jsonl.zst", b"no zstd at all", r"line 1: the compressed data is broken"),
    "zstd that is cut": (
        "a.jsonl.zst",
        zstandard.compress(GOOD_LINE * 9)[:-3],
        r"the compressed data is broken: it ends in the middle",
    ),
    "text named parquet": ("a.parquet", b"just text, long enough to look", "not a parquet file, although named so"),
    "an empty file named parquet": ("a.parquet", b"", "not a parquet file, although named so"),
    "parquet that is cut": (
        "a.parquet",
        parquet(text=["a"])[:-40],
        "not a parquet file, although named so, or damaged",
    ),
    "parquet without text": (
        "a.parquet",
        parquet(id=[1], body=["a"]),
        r"has no column `text`\. Its columns: id, body\.",
    ),
    "parquet with numbers": ("a.parquet", parquet(text=[1, 2]), r"column `text` is of type int64, not string"),
    "parquet with a null": ("a.parquet", parquet(text=["a", None]), r"row 1: `text` is NoneType, not a string"),
    "parquet not UTF-8": (
        "a.parquet",
        parquet(text=NOT_UNICODE),
        r"not UTF-8: a text in or after row 0 holds byte 0xff",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_file_is_refused_by_name_and_place(tmp_path: Path, case: str) -> None:
    name, content, message = BAD[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        texts(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_the_offset_of_a_wrong_byte_counts_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * 100 + b"\xff")
    with pytest.raises(DataError, match="byte 0xff at offset 500"):
        texts(path, part_bytes=64)


def test_a_parquet_file_with_damaged_pages_is_refused(tmp_path: Path) -> None:
    content = bytearray(parquet(text=[f"some text {i}" for i in range(1000)]))
    content[4:400] = b"\x5a" * 396
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: "):
        texts(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_vanished_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"cannot be read: .*No such file"):
        texts(tmp_path / name)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that exists and cannot be read")
def test_a_file_that_fails_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match="cannot be read: Input/output error"):
        texts(tmp_path / "a.txt")
