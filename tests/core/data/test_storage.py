"""A folder that is not what it says is refused, by the file that is wrong."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from core.data import storage
from core.data.storage import is_prepared, open_tokens
from core.data.tokens import prepare
from core.errors import DataError


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    lines = [json.dumps({"text": f"document number {i} of some length"}) for i in range(40)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    out = folder / "out"
    prepare(source=str(folder / "a.jsonl"), out=out, vocab=300, tokenizer=None, validation_fraction=0.3)
    return out


@pytest.fixture(name="folder")
def _folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def index(**changes) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def array(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        stream = io.BytesIO()
        np.save(stream, change(np.load(io.BytesIO(data))))
        return stream.getvalue()

    return changed


def tokens(place: int, value: int) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        values = np.frombuffer(data, dtype="<u2").copy()
        values[place] = value
        return values.tobytes()

    return changed


def swapped(offsets: np.ndarray) -> np.ndarray:
    offsets[[2, 3]] = offsets[[3, 2]]
    return offsets


DAMAGE = {
    "index cut": ("index.json", lambda data: data[:-9], r"index\.json: not JSON"),
    "index of something else": ("index.json", lambda data: b'{"weight_map": {}}', "not an index of token files"),
    "index a list": ("index.json", lambda data: b"[]", "not an index of token files"),
    "a later version": ("index.json", index(version=2), "format version 2, but this program reads 1"),
    "no vocabulary": ("index.json", index(vocab=None), "fields are missing or of the wrong kind"),
    "an unknown dtype": ("index.json", index(dtype="int7"), "fields are missing or of the wrong kind"),
    "no splits": ("index.json", index(splits={}), "fields are missing or of the wrong kind"),
    "an end outside": ("index.json", index(end_of_text=300), "fields are missing or of the wrong kind"),
    "a smaller vocabulary": (
        "index.json",
        index(vocab=260),
        r"token id \d+ at position \d+ is not below the vocabulary of 260",
    ),
    "another width": (
        "index.json",
        index(dtype="uint32"),
        r"train/tokens\.bin: \d+ bytes, but the index says \d+ tokens of 4 bytes",
    ),
    "tokens cut": ("train/tokens.bin", lambda data: data[:-1], r"train/tokens\.bin: \d+ bytes, but the index says"),
    "tokens empty": ("validation/tokens.bin", lambda data: b"", r"validation/tokens\.bin: 0 bytes, but the index says"),
    "tokens longer": ("validation/tokens.bin", lambda data: data + b"\0\0", r"validation/tokens\.bin: \d+ bytes"),
    "an id too large": (
        "train/tokens.bin",
        tokens(5, 60_000),
        "token id 60000 at position 5 is not below the vocabulary of 300",
    ),
    "an end overwritten": ("train/tokens.bin", tokens(-1, 7), r"document \d+ does not end with the end-of-text id 0"),
    "offsets cut": ("train/offsets.npy", lambda data: data[:-4], r"train/offsets\.npy: cannot be read as offsets"),
    "offsets empty": ("train/offsets.npy", lambda data: b"", r"train/offsets\.npy: cannot be read as offsets"),
    "offsets as floats": (
        "train/offsets.npy",
        array(lambda a: a.astype(float)),
        r"offsets\.npy: not \d+ int64 offsets",
    ),
    "an offset missing": ("train/offsets.npy", array(lambda a: a[1:]), r"offsets\.npy: not \d+ int64 offsets"),
    "offsets shifted": ("train/offsets.npy", array(lambda a: a + 1), r"offsets run from 1 to \d+, not from 0 to"),
    "offsets that fall": ("train/offsets.npy", array(swapped), "offsets do not increase at document 2"),
    "another tokenizer": (
        "tokenizer.json",
        lambda data: data + b" ",
        "not the tokenizer that these tokens were made with",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_by_file(folder: Path, case: str) -> None:
    name, change, message = DAMAGE[case]
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        open_tokens(folder)
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["index.json", "tokenizer.json", "train/tokens.bin", "validation/offsets.npy"])
def test_a_missing_file_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: .*No such file"):
        open_tokens(folder)


def test_a_folder_of_something_else_is_not_token_files(tmp_path: Path) -> None:
    assert not is_prepared(tmp_path) and not is_prepared(tmp_path / "gone")
    (tmp_path / "index.json").write_text("{}")
    assert not is_prepared(tmp_path)
    with pytest.raises(DataError, match=r"index\.json: cannot be read: Not a directory"):
        open_tokens(tmp_path / "index.json")


def test_a_folder_whose_index_is_lost_is_still_known_as_prepared(folder: Path) -> None:
    assert is_prepared(folder)
    (folder / "index.json").unlink()
    assert is_prepared(folder)


def test_the_files_are_mapped_and_cannot_be_written_by_accident(whole: Path) -> None:
    files = open_tokens(whole)
    for split in (files.train, files.validation):
        with pytest.raises(ValueError, match="read-only"):
            split.tokens[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            split.offsets[0] = 1


def test_checks_in_blocks_find_what_checks_at_once_find(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BLOCK_TOKENS", 7)
    monkeypatch.setattr(storage, "CHECKED_BLOCKS", 10**6)
    open_tokens(folder)
    path = folder / "train" / "tokens.bin"
    path.write_bytes(tokens(100, 500)(path.read_bytes()))
    with pytest.raises(DataError, match="token id 500 at position 100"):
        open_tokens(folder)


def test_of_very_many_blocks_a_spread_that_reaches_both_ends_is_checked() -> None:
    block = storage.BLOCK_TOKENS
    starts = list(storage._checked_starts(1000 * block + 1))
    assert len(starts) == 64 and starts[0] == 0 and starts[-1] == 1000 * block
    assert list(storage._checked_starts(2 * block + 1)) == [0, block, 2 * block]
    assert list(storage._checked_starts(0)) == []
