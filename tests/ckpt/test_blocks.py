"""Blocks: they tile their piece, one behind the other, in sizes that are worth a read; and no damage of one passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import ckpt.blocks
from ckpt.blocks import as_bytes, block_boxes, block_shape, crc32c, decode, encode
from ckpt.manifest import Codec
from core.errors import CheckpointError
from core.state.box import Box, tiling_fault, whole

CODECS: list[Codec] = ["raw", "zstd"]
shapes = st.lists(st.integers(1, 7) | st.integers(20, 40), max_size=3).map(tuple)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that shapes of some hundred elements have many blocks."""
    monkeypatch.setattr(ckpt.blocks, "BLOCK_BYTES", 96)


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.data())
def test_blocks_are_the_piece_cut_into_consecutive_stretches(
    shape: tuple[int, ...], item: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    piece, block = Box(offset=offset, shape=shape), block_shape(shape, item)
    boxes = list(block_boxes(piece, block))
    assert tiling_fault(piece, boxes) is None
    values = np.arange(math.prod(shape)).reshape(shape)
    read = [
        values[tuple(slice(at - o, at - o + n) for at, o, n in zip(b.offset, offset, b.shape, strict=True))]
        for b in boxes
    ]
    assert np.array_equal(np.concatenate([r.reshape(-1) for r in read]), values.reshape(-1))
    assert all(r.flags.c_contiguous for r in read), "a block can be read straight into memory"


@given(shapes, st.sampled_from([1, 2, 4, 8]))
def test_blocks_are_neither_larger_than_asked_nor_much_smaller_than_need_be(shape: tuple[int, ...], item: int) -> None:
    block = block_shape(shape, item)
    assert math.prod(block) * item <= 96
    if math.prod(shape) * item > 96:
        assert math.prod(block) * item >= 96 / 8
    else:
        assert block == shape


@pytest.mark.parametrize(
    "shape, item, block",
    [
        ((), 8, ()),
        ((1,), 8, (1,)),
        ((13, 11), 4, (1, 11)),  # two rows would fit, but only single ones are all equal
        ((12, 11), 4, (2, 11)),
        ((15, 11), 4, (1, 11)),
        ((9, 8), 4, (3, 8)),
        ((1, 2, 97), 1, (1, 1, 49)),
        ((2, 3, 30), 2, (1, 1, 30)),
        ((2, 5, 10), 4, (1, 1, 10)),
        ((101,), 1, (51,)),  # no equal ones but single bytes
        ((29, 3), 4, (8, 3)),
        ((5, 1, 1, 96), 1, (1, 1, 1, 96)),
    ],
    ids=str,
)
def test_block_shapes_by_hand(shape: tuple[int, ...], item: int, block: tuple[int, ...]) -> None:
    assert block_shape(shape, item) == block
    sizes = [math.prod(box.shape) for box in block_boxes(whole(shape), block)]
    assert sum(sizes) == math.prod(shape) and max(sizes) == math.prod(block)


def test_a_tensor_without_elements_has_no_blocks() -> None:
    assert list(block_boxes(whole((3, 0, 5)), block_shape((3, 0, 5), 4))) == []


def test_the_checksum_is_crc32c_and_goes_on_where_it_stopped() -> None:
    # The check value of CRC-32C (Castagnoli), from its catalogue entry.
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(b"6789", crc32c(np.frombuffer(b"12345", np.uint8))) == 0xE3069283


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(), (1,), (7, 5, 3)], ids=str)
def test_values_come_back_from_their_stored_bytes(codec: Codec, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(3).standard_normal(shape)
    stored = np.frombuffer(bytes(encode(values, codec)), np.uint8)
    assert decode(stored, codec, values.nbytes).tobytes() == values.tobytes()


def test_a_view_is_stored_by_its_values_and_a_contiguous_array_is_not_copied() -> None:
    values = np.arange(35).reshape(5, 7)
    assert np.shares_memory(as_bytes(values[1:3]), values)
    assert as_bytes(values.T[1:6:2]).tobytes() == values.T[1:6:2].copy().tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("said", [0, 79, 81, 1 << 20])
def test_another_number_of_values_than_was_written_is_refused(codec: Codec, said: int) -> None:
    stored = np.frombuffer(bytes(encode(np.arange(10.0), codec)), np.uint8)
    with pytest.raises(CheckpointError, match=r"instead of|cannot be decompressed"):
        decode(stored, codec, said)


@pytest.mark.parametrize("content", [b"", b"no frame at all", b"\x28\xb5\x2f\xfd"], ids=range(3))
def test_bytes_that_were_never_compressed_are_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be decompressed"):
        decode(np.frombuffer(content, np.uint8), "zstd", 80)


def test_compressed_bytes_are_what_any_zstd_reads() -> None:
    stored = encode(np.arange(1000), "zstd")
    assert len(stored) < 4000
    assert zstandard.ZstdDecompressor().decompress(bytes(stored)) == np.arange(1000).tobytes()
