"""Text to token files: tokenised once, split by document, written whole or not at all, and kept in a cache."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import uuid
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer

from core.data.corpus import Corpus, find_corpus, identity, read_corpus, sample
from core.data.formats import Document
from core.data.storage import (
    DTYPES,
    INDEX,
    OFFSETS,
    SPLITS,
    TOKENIZER,
    TOKENS,
    VERSION,
    TokenFiles,
    TokenSplit,
    index_bytes,
    is_prepared,
    open_tokens,
    token_dtype,
    unigram_entropy,
    vocabulary_too_large,
)
from core.data.tokenizer import end_of_text_id, load_tokenizer, train_tokenizer, vocabulary_size
from core.errors import ConfigError, DataError, Fault

__all__ = [
    "TokenFiles",
    "TokenSplit",
    "cached",
    "load_tokenizer",
    "open_tokens",
    "prepare",
    "train_tokenizer",
    "unigram_entropy",
]

BATCH_CHARACTERS = 1 << 21
COPY_BYTES = 1 << 24


def prepare(
    *, source: str | None, out: Path, vocab: int, tokenizer: str | None, validation_fraction: float
) -> TokenFiles:
    """Tokenises `source` into the new folder `out` and opens it.

    source: as for `documents`. tokenizer: a tokenizer.json (None: a BPE of at most `vocab` ids, trained on a sample of the source).
    Whether a document is for validation follows from its content alone: about `validation_fraction` of them, at least one in
    either split; of equal documents one is kept. The folder appears by one rename when it is complete; of several processes
    that prepare the same at once, one wins and all return the same. Raises DataError, and ConfigError for the fraction.
    """
    if not 0 < validation_fraction < 1:
        rule = "must be a share of the documents between 0 and 1, both excluded"
        raise ConfigError(
            [Fault(setting="data.validation_fraction", value=validation_fraction, rule=rule, works="0.05")]
        )
    _refuse_taken(out)
    corpus = find_corpus(source)
    made, content = _tokenizer(corpus, vocab, tokenizer)
    with _new_folder(out) as folder:
        _write_tokens(folder, corpus, made, content, validation_fraction)
        _publish(folder, out)
    return open_tokens(out, vocab=vocab)


def cached(
    *, source: str | None, vocab: int, tokenizer: str | None, validation_fraction: float, cache_root: Path
) -> TokenFiles:
    """The token files of `source`, from `cache_root` if they are there, else prepared into it.

    They are made anew when a file of the source changes (path, bytes, time), the Python version does for its own library, or
    any argument. A process that finds another one at work waits for it. A folder written by `prepare` is opened as it is.
    Raises DataError.
    """
    if source and is_prepared(Path(source)):
        return _as_it_is(Path(source), vocab, tokenizer)
    key = _key(source, vocab, tokenizer, validation_fraction)
    folder = cache_root / key
    if (found := _usable(folder, vocab)) is not None:
        return found
    with _locked(cache_root, key) as locked:
        if (found := _usable(folder, vocab)) is not None:
            return found
        if (
            locked
        ):  # nobody else is at work on this key, so what lies about is from a process that was killed, or damaged
            for rest in (*cache_root.glob(f".{glob.escape(key)}.*.tmp"), folder):
                shutil.rmtree(rest, ignore_errors=True)
        return prepare(
            source=source, out=folder, vocab=vocab, tokenizer=tokenizer, validation_fraction=validation_fraction
        )


# ------------------------------------------------------------------------------------------------------- tokenising


def _tokenizer(corpus: Corpus, vocab: int, path: str | None) -> tuple[Tokenizer, bytes]:
    """The tokenizer and the bytes of its file."""
    if path is None:
        made = train_tokenizer(sample(corpus), vocab)
        return made, made.to_str(pretty=True).encode()
    given = load_tokenizer(Path(path))
    if vocabulary_size(given) > vocab:
        raise vocabulary_too_large(path, vocabulary_size(given), vocab)
    return given, _tokenizer_bytes(path)


def _tokenizer_bytes(path: str) -> bytes:
    file = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: the tokenizer cannot be read: {error.strerror}. Give the path of a tokenizer.json."
        ) from error


@dataclass(kw_only=True)
class _Writer:
    """Appends documents to a split's tokens.bin; what is in memory is one offset and one digest per document."""

    stream: BinaryIO
    dtype: np.dtype
    offsets: array = field(default_factory=lambda: array("q", [0]))
    digests: array = field(default_factory=lambda: array("Q"))

    def add(self, tokens: np.ndarray, digest: int) -> None:
        self.stream.write(tokens.astype(self.dtype).tobytes())
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.digests.append(digest)

    def take(self, document: int) -> tuple[np.ndarray, int]:
        """Removes a document and returns it; what follows moves forward, a block at a time."""
        start, end = (self.offsets[i] * self.dtype.itemsize for i in (document, document + 1))
        self.stream.seek(start)
        taken = np.frombuffer(self.stream.read(end - start), dtype=self.dtype)
        while True:
            self.stream.seek(end)
            if not (block := self.stream.read(COPY_BYTES)):
                break
            self.stream.seek(start)
            self.stream.write(block)
            start, end = start + len(block), end + len(block)
        self.stream.truncate(start)
        self.stream.seek(start)
        self.offsets = array(
            "q", [*self.offsets[: document + 1], *(o - len(taken) for o in self.offsets[document + 2 :])]
        )
        return taken, self.digests.pop(document)


def _write_tokens(folder: Path, corpus: Corpus, tokenizer: Tokenizer, content: bytes, fraction: float) -> None:
    vocab, end = vocabulary_size(tokenizer), end_of_text_id(tokenizer, corpus.title)
    dtype = token_dtype(vocab)
    for name in SPLITS:
        (folder / name).mkdir()
    with (folder / "train" / TOKENS).open("w+b") as first, (folder / "validation" / TOKENS).open("w+b") as second:
        train, validation = (_Writer(stream=stream, dtype=DTYPES[dtype]) for stream in (first, second))
        for batch in _batches(read_corpus(corpus)):
            encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
            for encoding, (_, digest) in zip(encodings, batch, strict=True):
                split = validation if digest < fraction * 2**64 else train
                split.add(np.array([*encoding.ids, end]), digest)
        _fill_empty(corpus, train, validation)
        splits = {
            name: _finish(folder / name, writer) for name, writer in zip(SPLITS, (train, validation), strict=True)
        }
    _write(folder / TOKENIZER, content)
    index = {"source": corpus.title, "vocab": vocab, "end_of_text": end, "dtype": dtype, "splits": splits}
    index |= {"tokenizer_sha256": hashlib.sha256(content).hexdigest(), "validation_fraction": fraction}
    _write(folder / INDEX, index_bytes(index))


def _batches(documents: Iterator[Document]) -> Iterator[list[tuple[str, int]]]:
    """Texts with the digest of their content, no content twice, about BATCH_CHARACTERS at a time."""
    seen: set[int] = set()
    batch: list[tuple[str, int]] = []
    characters = 0
    for document in documents:
        # 64 bits keep the memory small; two different documents of 100 million share them with odds of 1 to 4,000
        digest = int.from_bytes(hashlib.blake2b(document.text.encode(), digest_size=8).digest(), "big")
        if digest in seen:
            continue
        seen.add(digest)
        batch.append((document.text, digest))
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _fill_empty(corpus: Corpus, train: _Writer, validation: _Writer) -> None:
    """Gives a split without documents the one of the other that is nearest to belonging there, whatever the order was."""
    if len(train.digests) + len(validation.digests) < len(SPLITS):
        raise DataError(
            f"{corpus.title}: too short: it holds one document (equal ones count once), but training needs two, "
            "of which one is kept for validation. Give more text."
        )
    if not validation.digests:
        validation.add(*train.take(min(range(len(train.digests)), key=train.digests.__getitem__)))
    if not train.digests:
        train.add(*validation.take(max(range(len(validation.digests)), key=validation.digests.__getitem__)))


def _finish(folder: Path, writer: _Writer) -> dict[str, int | str]:
    """Writes the offsets and returns what the index says of the split."""
    digest = hashlib.sha256()
    writer.stream.seek(0)
    while block := writer.stream.read(COPY_BYTES):
        digest.update(block)
    writer.stream.flush()
    os.fsync(writer.stream.fileno())
    offsets = np.frombuffer(writer.offsets, dtype=np.int64).astype("<i8")
    digest.update(offsets.tobytes())
    with (folder / OFFSETS).open("wb") as stream:
        np.save(stream, offsets)
        stream.flush()
        os.fsync(stream.fileno())
    return {"tokens": writer.offsets[-1], "documents": len(writer.digests), "sha256": digest.hexdigest()}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


# ------------------------------------------------------------------------------------------------------- all or nothing


def _refuse_taken(out: Path) -> None:
    """Nothing that is there is overwritten; an empty folder may be filled."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        what = "holds prepared token files" if is_prepared(out) else "exists"
        raise DataError(f"{out}: {what} already. Choose another folder, or delete this one first.")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` under a hidden name, gone afterwards unless it was renamed. A failure to write is a DataError."""
    folder = out.parent / f".{out.name}.{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        advice = "Free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose another folder"
        raise DataError(f"{out}: cannot be written: {error.strerror}. {advice}; nothing was changed.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, out: Path) -> None:
    """Renames `folder` to `out`; if another process was faster with the same content, its folder stands."""
    try:
        folder.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if (out / INDEX).is_file() and (out / INDEX).read_bytes() == (folder / INDEX).read_bytes():
            return
        raise DataError(
            f"{out}: appeared with other content while it was being prepared. Choose another folder."
        ) from error


# ------------------------------------------------------------------------------------------------------- the cache


def _as_it_is(folder: Path, vocab: int, tokenizer: str | None) -> TokenFiles:
    found = open_tokens(folder, vocab=vocab)
    if tokenizer is not None and _tokenizer_bytes(tokenizer) != found.tokenizer.read_bytes():
        raise DataError(
            f"{folder}: its tokens were made with another tokenizer than data.tokenizer={tokenizer}. "
            "Leave data.tokenizer out, or give the text instead of its tokens."
        )
    return found


def _key(source: str | None, vocab: int, tokenizer: str | None, fraction: float) -> str:
    corpus = find_corpus(source)
    given = hashlib.sha256(_tokenizer_bytes(tokenizer)).hexdigest() if tokenizer is not None else None
    root = "" if source is None else str(corpus.root.resolve())
    parts = [VERSION, corpus.title, root, identity(corpus), vocab, given, fraction]
    name = "stdlib" if source is None else Path(source).resolve().name[:40]
    return f"{name}-vocab{vocab}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def _usable(folder: Path, vocab: int) -> TokenFiles | None:
    if not folder.is_dir():
        return None
    try:
        return open_tokens(folder, vocab=vocab)
    except DataError:  # a damaged entry of a cache is made anew
        return None


@contextmanager
def _locked(cache_root: Path, key: str) -> Iterator[bool]:
    """Waits until no other process prepares `key`; False where the file system has no locks: then the rename decides."""
    try:
        cache_root.mkdir(parents=True, exist_ok=True)
        stream = (cache_root / f"{key}.lock").open("wb")
    except OSError as error:
        raise DataError(
            f"{cache_root}: the cache cannot be written: {error.strerror}. Choose another folder."
        ) from error
    with stream:
        locked = False
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)  # ends with the process, however that ends
            locked = True
        yield locked
