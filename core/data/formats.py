"""One file in, its documents out: plain text, JSON lines (also gzip and zstd), parquet. Streamed; every failure names its place."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import DataError

BLOCK_BYTES = 1 << 16
PART_BYTES = 1 << 20
PARQUET_ROWS = 256
COLUMN = "text"
COMPRESSED_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
}


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text that is learnt as a whole; `name` says where it stands, for messages."""

    name: str
    text: str


def read_file(path: Path, name: str, *, part_bytes: int = PART_BYTES) -> Iterator[Document]:
    """The documents of one file, by what its name says it is; blank ones are left out.

    name: how the file is called in the documents' names. part_bytes: a plain text longer than this is cut after a line end
    into several documents, so that no document needs more memory than that. Raises DataError.
    """
    lower = path.name.lower()
    if lower.endswith(".parquet"):
        found = _read_parquet(path, name)
    elif lower.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        found = _read_json_lines(path, name)
    else:
        found = _read_text(path, name, part_bytes)
    return (document for document in found if document.text.strip())


def _blocks(path: Path, size: int) -> Iterator[bytes]:
    """The bytes of a file, `size` at a time."""
    try:
        with path.open("rb") as stream:
            while block := stream.read(size):
                yield block
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}. Check that it exists and that you may read it."
        ) from error


def _decode(path: Path, data: bytes, offset: int) -> str:
    """`data`, which stands at byte `offset` of the file, as text."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = offset + error.start
        raise DataError(
            f"{path}: not UTF-8: byte 0x{data[error.start]:02x} at offset {place} ({error.reason}). "
            "Convert the file to UTF-8, for example with iconv."
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


# ------------------------------------------------------------------------------------------------------- plain text


def _read_text(path: Path, name: str, part_bytes: int) -> Iterator[Document]:
    rest, offset, parts = b"", 0, 0
    for block in _blocks(path, part_bytes):
        if offset == 0 and not rest:
            _refuse_binary(path, block)
        rest += block
        while len(rest) > part_bytes:
            cut = _cut(rest, part_bytes)
            yield Document(name=f"{name}#{parts}", text=_decode(path, rest[:cut], offset))
            rest, offset, parts = rest[cut:], offset + cut, parts + 1
    yield Document(name=f"{name}#{parts}" if parts else name, text=_decode(path, rest, offset))


def _cut(data: bytes, limit: int) -> int:
    """Where to cut `data`, at most `limit` bytes in: after the last line end, or else where a character begins."""
    line_end = data.rfind(b"\n", 0, limit)
    if line_end >= 0:
        return line_end + 1
    place = limit
    while place > limit - 3 and data[place] & 0xC0 == 0x80:  # 10xxxxxx continues a character, at most three of them
        place -= 1
    return place


def _refuse_binary(path: Path, head: bytes) -> None:
    for magic, kind in COMPRESSED_MAGIC.items():
        if head.startswith(magic):
            raise DataError(
                f"{path}: a {kind} file that is not named as one we read. Use .jsonl.gz, .jsonl.zst or .parquet, or unpack it."
            )
    utf16 = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in head and not utf16:
        raise DataError(
            f"{path}: an unknown binary file (byte 0x00 at offset {head.index(0)}). "
            "Data is UTF-8 text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, or a folder of these: take this file out."
        )


# ------------------------------------------------------------------------------------------------------- JSON lines


def _read_json_lines(path: Path, name: str) -> Iterator[Document]:
    for number, offset, line in _lines(path):
        if line.strip():
            text = _text_of(path, number, _decode(path, line, offset))
            yield Document(name=f"{name}:{number}", text=text)


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f'{path}: line {number} is not JSON: {error}. Every line must be one object like {{"text": …}}.'
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f'{path}: line {number} is a JSON {type(record).__name__}. Every line must be one object like {{"text": …}}.'
        )
    if COLUMN not in record:
        there = ", ".join(sorted(record)) or "none"
        raise DataError(
            f"{path}: line {number} has no field `{COLUMN}`. Its fields: {there}. Rename the one that holds the text."
        )
    return _checked(path, f"line {number}", record[COLUMN])


def _checked(path: Path, place: str, text: object) -> str:
    if not isinstance(text, str):
        raise DataError(
            f"{path}: {place}: `{COLUMN}` is {type(text).__name__}, not a string. Correct or leave out that document."
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no UTF-8 text can hold
        raise DataError(
            f"{path}: {place}: `{COLUMN}` is not Unicode text: {error.reason} at character {error.start}."
        ) from error
    return text


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Lines with their number from 1 and their byte offset (after decompression)."""
    chunks = _decompressed(path)
    number, offset, pending = 1, 0, [b""]
    while True:
        try:
            chunk = next(chunks, None)
        except EOFError as error:
            raise DataError(
                f"{path}: line {number}: the compressed data is broken: {error}. Fetch or write the file again."
            ) from error
        first, *others = (chunk or b"").split(b"\n")
        pending.append(first)
        for other in others:
            line = b"".join(pending)
            yield number, offset, line
            number, offset, pending = number + 1, offset + len(line) + 1, [other]
        if chunk is None:
            yield number, offset, b"".join(pending)
            return


def _decompressed(path: Path) -> Iterator[bytes]:
    """The file's bytes, unpacked as its name says. Raises EOFError where they are broken or end too soon."""
    blocks = _blocks(path, BLOCK_BYTES)
    if path.name.lower().endswith(".gz"):
        # a decompressor object, unlike gzip.open, also reads what follows a first member without a second pass
        return _unpack(blocks, lambda: zlib.decompressobj(wbits=31), zlib.error)
    if path.name.lower().endswith(".zst"):
        import zstandard

        # zstandard's stream_reader ends a cut-off frame without an error; a decompressor object knows (`eof`)
        return _unpack(blocks, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    return blocks


def _unpack(blocks: Iterator[bytes], new: Callable[[], Any], broken: type[Exception]) -> Iterator[bytes]:
    current = None
    for block in blocks:
        data = block if current else block.lstrip(b"\0")  # members may be padded with zeros, as tape tools do
        while data:
            current = current or new()
            try:
                yield current.decompress(data)
            except broken as error:
                raise EOFError(str(error)) from error
            data = current.unused_data.lstrip(b"\0") if current.eof else b""
            if current.eof:
                current = None
    if current is not None:
        raise EOFError("it ends in the middle")


# ------------------------------------------------------------------------------------------------------- parquet


def _read_parquet(path: Path, name: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_schema(path, file.schema_arrow)
            row = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[COLUMN]):
                for text in batch.column(0).to_pylist():
                    yield Document(name=f"{name}:{row}", text=_checked(path, f"row {row}", text))
                    row += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8: a text in or after row {row} holds byte 0x{error.object[error.start]:02x}."
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        kind = (
            "cannot be read"
            if isinstance(error, OSError) and error.errno
            else "not a parquet file, although named so, or damaged"
        )
        raise DataError(
            f"{path}: {kind}: {str(error).splitlines()[0]}. Rename it to what it is, or fetch it again."
        ) from error


def _check_schema(path: Path, schema: Any) -> None:
    from pyarrow import types

    if COLUMN not in schema.names:
        there = ", ".join(schema.names) or "none"
        raise DataError(f"{path}: has no column `{COLUMN}`. Its columns: {there}. Rename the one that holds the text.")
    kind = schema.field(COLUMN).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(f"{path}: column `{COLUMN}` is of type {kind}, not string. Write it as strings.")
