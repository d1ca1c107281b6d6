"""Text in: documents from files, folders, or (nothing given) the Python standard library's own sources."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.data.formats import PART_BYTES, Document, read_file
from core.data.storage import is_prepared
from core.errors import DataError

__all__ = ["Corpus", "Document", "documents", "find_corpus", "identity", "read_corpus", "sample"]

# Folders and files of the standard library that are no text to learn from: installed packages, tests, tables of numbers.
STDLIB_SKIPPED_FOLDERS = frozenset(
    (
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "ensurepip",
    )
)
STDLIB_SKIPPED_PREFIX = "_sysconfigdata"
STDLIB_FILE_BYTES = range(1000, 250_000)
STDLIB_TOTAL_BYTES = 12_000_000

SINGLE_FILE_PARTS = 64
SMALLEST_PART_BYTES = 1024
SAMPLE_FILES = 64


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where documents come from: `files` below `root`, sorted by relative path. `title` is for people."""

    title: str
    root: Path
    files: tuple[Path, ...]
    part_bytes: int = PART_BYTES
    skip_undecodable: bool = False


def documents(path: str | None) -> Iterator[Document]:
    """Every document of a text file, a .jsonl(.gz/.zst), a .parquet, or a folder of these; None: the standard library's sources.

    Sorted by relative path, so always the same; streamed, at most one part of a text or one group of rows in memory. A plain
    text file is one document, unless it is over 1 MiB or the whole corpus: then it is cut after line ends into several.
    Raises DataError: at once for a path that cannot be used, while reading for what is wrong inside.
    """
    return read_corpus(find_corpus(path))


def find_corpus(path: str | None) -> Corpus:
    """The files that `path` stands for. Raises DataError if it is missing, unreadable, empty, or already tokenised."""
    if path is None:
        return _standard_library()
    if not path:
        raise DataError("--data '': an empty path. Name a file or folder, or leave --data out for the built-in corpus.")
    root = Path(path)
    try:
        is_folder, is_file, exists = root.is_dir(), root.is_file(), root.exists()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check that you may read it.") from error
    if is_folder:
        if is_prepared(root):
            raise DataError(f"{path}: already tokenised. Use it as it is, or give the text that it was made from.")
        return Corpus(title=str(root.resolve()), root=root, files=_folder(root))
    if is_file:
        size = root.stat().st_size
        part = min(PART_BYTES, max(SMALLEST_PART_BYTES, size // SINGLE_FILE_PARTS))
        return Corpus(title=str(root.resolve()), root=root.parent, files=(root,), part_bytes=part)
    if exists:
        raise DataError(f"{path}: neither a regular file nor a folder. Save the text to a file first.")
    raise DataError(
        f"{path}: there is no such file or folder. Check the path, or leave it out for the built-in corpus."
    )


def read_corpus(corpus: Corpus) -> Iterator[Document]:
    """Every document of `corpus` in order. Raises DataError, also if there is not one with text in it."""
    empty = True
    for file in corpus.files:
        for document in _read(corpus, file):
            empty = False
            yield document
    if empty:
        raise DataError(
            f"{corpus.title}: holds no text: {len(corpus.files)} file(s), all empty or blank. Give data with text."
        )


def sample(corpus: Corpus) -> Iterator[Document]:
    """Every document of `corpus`, but from up to 64 files spread evenly over it in turn: the beginning of it is a fair sample."""
    groups = -(-len(corpus.files) // SAMPLE_FILES)
    for group in range(groups):
        turns = [_read(corpus, file) for file in corpus.files[group::groups]]
        while turns:
            drawn = [(turn, next(turn, None)) for turn in turns]
            yield from (document for _, document in drawn if document is not None)
            turns = [turn for turn, document in drawn if document is not None]


def identity(corpus: Corpus) -> list[list[str | int]]:
    """What changes when the files do: relative path, bytes and time of change of each; of the standard library without times."""
    rows: list[list[str | int]] = []
    for file in corpus.files:
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}.") from error
        time = 0 if corpus.skip_undecodable else status.st_mtime_ns
        rows.append([file.relative_to(corpus.root).as_posix(), status.st_size, time])
    return rows


def _read(corpus: Corpus, file: Path) -> Iterator[Document]:
    name = file.relative_to(corpus.root).as_posix()
    if not corpus.skip_undecodable:
        yield from read_file(file, name, part_bytes=corpus.part_bytes)
        return
    try:
        yield from list(read_file(file, name, part_bytes=corpus.part_bytes))
    except DataError:  # a few library sources are in another encoding on purpose
        return


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Every file below `root`, in no order, hidden ones left out. A folder that cannot be listed is an error, not an empty one."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed: {error.strerror}. Check that you may read it.") from error

    seen = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # links may lead back up, or twice to one folder
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in sorted(folders) if not name.startswith(".") and name not in skipped]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def _folder(root: Path) -> tuple[Path, ...]:
    files = sorted(_walk(root), key=lambda file: file.relative_to(root).as_posix())
    if not files:
        raise DataError(f"{root}: the folder is empty. Put text, .jsonl(.gz/.zst) or .parquet files into it.")
    for file in files:
        if not _is_regular(file):  # a pipe or a device would block for ever, a dangling link has no text
            raise DataError(
                f"{file}: not a regular file (a broken link, a pipe or a device). Take it out of the data folder."
            )
    return tuple(files)


def _is_regular(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}. Check that you may read it.") from error


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files, total = [], 0
    for file in sorted(_walk(root, STDLIB_SKIPPED_FOLDERS), key=lambda file: file.relative_to(root).as_posix()):
        if file.suffix != ".py" or file.name.startswith(STDLIB_SKIPPED_PREFIX) or not file.is_file():
            continue
        size = file.stat().st_size
        if size in STDLIB_FILE_BYTES and total + size <= STDLIB_TOTAL_BYTES:
            files.append(file)
            total += size
    if not files:
        raise DataError(
            f"{root}: this Python's standard library holds no sources. Give data of your own with --data PATH."
        )
    return Corpus(
        title=f"Python {platform.python_version()} standard library",
        root=root,
        files=tuple(files),
        skip_undecodable=True,
    )
