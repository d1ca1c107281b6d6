"""Token files on disk: memory-mapped ids and document offsets of a training and a validation split, with one index.

Layout: index.json, tokenizer.json, and for each split `<split>/tokens.bin` (little-endian uint16 or uint32) and
`<split>/offsets.npy` (int64, [documents + 1]). A document ends with the end-of-text id and includes it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import DataError

FORMAT = "moe-zoo-tokens"
VERSION = 1
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
TOKENS = "tokens.bin"
OFFSETS = "offsets.npy"
SPLITS = ("train", "validation")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BLOCK_TOKENS = 1 << 22
# More than this is not read through when it is opened, but in evenly spread blocks; the loader checks every batch anyway.
CHECKED_BLOCKS = 64
ADVICE = "Delete the folder and prepare it again"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSplit:
    """One split, memory-mapped and read-only.

    tokens: [tokens] uint16 or uint32, the documents one after the other, each closed by the end-of-text id.
    offsets: [documents + 1] int64; document d is tokens[offsets[d]:offsets[d + 1]]. vocab: every id is below it.
    """

    name: str
    folder: Path
    vocab: int
    tokens: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFiles:
    """A prepared folder. vocab: ids of its tokenizer. identity: changes with any token,
    for a resumed run to compare, and does not with the place of the files."""

    folder: Path
    source: str
    vocab: int
    end_of_text: int
    tokenizer: Path
    identity: str
    train: TokenSplit
    validation: TokenSplit


def token_dtype(vocab: int) -> str:
    """The name of the smallest dtype of the format that holds every id below `vocab`."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def is_prepared(folder: Path) -> bool:
    """Whether `folder` is, or was once, written by `prepare`; whether it is whole is for `open_tokens` to say."""
    try:
        if (folder / SPLITS[0] / TOKENS).is_file():
            return True
        return f'"{FORMAT}"' in (folder / INDEX).read_text(encoding="utf-8", errors="replace")[:4096]
    except OSError:
        return False


def open_tokens(folder: Path, *, vocab: int | None = None) -> TokenFiles:
    """The token files in `folder`, memory-mapped, after checking that they are what the index says.

    vocab: the model's vocabulary, which the tokenizer's must not exceed. Raises DataError: a file is missing or cut short,
    offsets do not increase, an id is outside the vocabulary, the tokenizer is another one.
    """
    index = _index(folder, _read(folder / INDEX))
    if vocab is not None and index["vocab"] > vocab:
        raise vocabulary_too_large(str(folder), index["vocab"], vocab)
    tokenizer = _read(folder / TOKENIZER)
    if hashlib.sha256(tokenizer).hexdigest() != index["tokenizer_sha256"]:
        raise DataError(f"{folder / TOKENIZER}: not the tokenizer that these tokens were made with. {ADVICE}.")
    train, validation = (_open_split(folder, index, name) for name in SPLITS)
    content = {field: index[field] for field in ("vocab", "end_of_text", "tokenizer_sha256", "splits")}
    return TokenFiles(
        folder=folder,
        source=index["source"],
        vocab=index["vocab"],
        end_of_text=index["end_of_text"],
        tokenizer=folder / TOKENIZER,
        identity=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        train=train,
        validation=validation,
    )


def vocabulary_too_large(what: str, has: int, vocab: int) -> DataError:
    """The error for a tokenizer or prepared folder `what` with `has` ids, more than the model's `vocab`."""
    return DataError(
        f"{what}: its tokenizer has {has} ids, but model.vocab={vocab}. "
        f"Set model.vocab to {has} or more, or use a tokenizer of at most {vocab}."
    )


def unigram_entropy(split: TokenSplit) -> float:
    """Nats per predicted token of the best guess that ignores context: the entropy of the label distribution.

    Counted as labels are: every token but the first of each document, end-of-text included. 0 if nothing is predicted.
    """
    counts = np.zeros(split.vocab, dtype=np.int64)
    for start in range(0, len(split.tokens), BLOCK_TOKENS):
        counts += np.bincount(split.tokens[start : start + BLOCK_TOKENS], minlength=split.vocab)
    for start in range(0, len(split.offsets) - 1, BLOCK_TOKENS):
        firsts = split.offsets[:-1][start : start + BLOCK_TOKENS]
        counts -= np.bincount(split.tokens[firsts], minlength=split.vocab)
    shares = counts[counts > 0] / max(1, int(counts.sum()))
    return float(-(shares * np.log(shares)).sum()) + 0.0  # + 0.0: a certain label has entropy 0, not -0


def index_bytes(index: dict[str, Any]) -> bytes:
    """The content of index.json; equal data gives equal bytes."""
    return (json.dumps({"format": FORMAT, "version": VERSION, **index}, indent=1, sort_keys=True) + "\n").encode()


# ------------------------------------------------------------------------------------------------------- checks


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from error


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}, so this is not a whole folder of token files. {ADVICE}, or give another path.")


def _index(folder: Path, data: bytes) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(data)
    except ValueError as error:
        raise _damaged(path, f"not JSON ({error})") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _damaged(path, "not an index of token files")
    if index.get("version") != VERSION:
        raise DataError(
            f"{path}: format version {index.get('version')}, but this program reads {VERSION}. Prepare the data again."
        )
    if not _well_formed(index):
        raise _damaged(path, "fields are missing or of the wrong kind")
    return index


def _well_formed(index: dict[str, Any]) -> bool:
    def count(value: object) -> bool:
        return isinstance(value, int) and value > 0

    splits = index.get("splits")
    return (
        count(index.get("vocab"))
        and index.get("dtype") in DTYPES
        and isinstance(index.get("end_of_text"), int)
        and 0 <= index["end_of_text"] < index["vocab"]
        and all(isinstance(index.get(field), str) for field in ("source", "tokenizer_sha256"))
        and isinstance(splits, dict)
        and all(isinstance(splits.get(name), dict) for name in SPLITS)
        and all(count(splits[name].get(field)) for name in SPLITS for field in ("tokens", "documents"))
    )


def _open_split(folder: Path, index: dict[str, Any], name: str) -> TokenSplit:
    path, dtype = folder / name / TOKENS, DTYPES[index["dtype"]]
    num_tokens, documents = index["splits"][name]["tokens"], index["splits"][name]["documents"]
    try:
        there = path.stat().st_size
        if there != num_tokens * dtype.itemsize:
            raise _damaged(path, f"{there} bytes, but the index says {num_tokens} tokens of {dtype.itemsize} bytes")
        tokens = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from error
    offsets = _open_offsets(folder / name / OFFSETS, documents, num_tokens)
    split = TokenSplit(name=name, folder=folder, vocab=index["vocab"], tokens=tokens, offsets=offsets)
    _check_tokens(path, split, index["end_of_text"])
    return split


def _open_offsets(path: Path, documents: int, num_tokens: int) -> np.ndarray:
    try:
        offsets = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, f"cannot be read as offsets ({error})") from error
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.dtype("<i8") or offsets.shape != (documents + 1,):
        raise _damaged(path, f"not {documents + 1} int64 offsets")
    offsets = offsets.view(np.ndarray)
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise _damaged(path, f"offsets run from {offsets[0]} to {offsets[-1]}, not from 0 to {num_tokens}")
    for start in range(0, documents, BLOCK_TOKENS):
        block = offsets[start : start + BLOCK_TOKENS + 1]
        falls = np.flatnonzero(block[1:] <= block[:-1])
        if len(falls):
            raise _damaged(path, f"offsets do not increase at document {start + int(falls[0])}")
    return offsets


def _check_tokens(path: Path, split: TokenSplit, end_of_text: int) -> None:
    for start in _checked_starts(len(split.tokens)):
        block = split.tokens[start : start + BLOCK_TOKENS]
        if int(block.max()) >= split.vocab:
            place = start + int(np.argmax(block >= split.vocab))
            raise _damaged(
                path, f"token id {split.tokens[place]} at position {place} is not below the vocabulary of {split.vocab}"
            )
    for start in _checked_starts(len(split.offsets) - 1):
        ends = split.offsets[1:][start : start + BLOCK_TOKENS] - 1
        wrong = np.flatnonzero(split.tokens[ends] != end_of_text)
        if len(wrong):
            raise _damaged(path, f"document {start + int(wrong[0])} does not end with the end-of-text id {end_of_text}")


def _checked_starts(length: int) -> Iterator[int]:
    blocks = math.ceil(length / BLOCK_TOKENS)
    chosen = (
        range(blocks)
        if blocks <= CHECKED_BLOCKS
        else (i * (blocks - 1) // (CHECKED_BLOCKS - 1) for i in range(CHECKED_BLOCKS))
    )
    return (block * BLOCK_TOKENS for block in chosen)
