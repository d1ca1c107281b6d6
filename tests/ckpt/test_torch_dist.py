"""The torch_dist store: plain torch.distributed.checkpoint reads it, and every byte of it is checked by us."""

from __future__ import annotations

import io
import itertools
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from ckpt.dtype import ITEM_BYTES
from ckpt.files.local import LocalFiles
from ckpt.manifest import read_manifest
from ckpt.save import Saving, save
from ckpt.store import torch_dist
from ckpt.verify import verify
from core.parallel.groups import one_rank
from core.state.box import flat_boxes, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import (
    Rank,
    assert_loads,
    bits,
    cut,
    joined,
    make_small,
    piece,
    poisoned,
    random_bits,
    save_as_ranks,
)
from tests.ranks import Ranks

TORCH_DIST = Saving(store="torch_dist")
DTYPES = [getattr(torch, name) for name in ITEM_BYTES]


def truth() -> dict[str, Tensor]:
    """Every type; no, one and odd numbers of elements; a tensor of several blocks."""
    found = {f"model.{str(dtype)[6:]}": random_bits(str(dtype), (3, 7), dtype) for dtype in DTYPES}
    found["model.scalar"] = random_bits("scalar", (), torch.float64)
    found["model.one"] = random_bits("one", (1, 1), torch.bfloat16)
    found["model.nothing"] = torch.empty((5, 0, 3))
    found["model.experts"] = random_bits("experts", (12, 2, 3, 5), torch.bfloat16)
    found["optimizer.exp_avg.experts"] = random_bits("moment", (12, 2, 3, 5), torch.float32)
    return found


def on_four_ranks(tensors: dict[str, Tensor]) -> list[Rank]:
    """Experts cut in two directions, their moment in flat ranges of no shape at all, the rest copied to all."""
    copied = [[piece(name, t, whole(tuple(t.shape)), copy, 4) for name, t in tensors.items()] for copy in range(4)]
    cut_ones = ("model.experts", "optimizer.exp_avg.experts")
    held = [[t for t in rank if t.name not in cut_ones] for rank in copied]
    moment = tensors[cut_ones[1]]
    ends = (0, 101, 102, 102, 360)
    flat = [
        [piece(cut_ones[1], moment, box) for box, _ in flat_boxes(whole((12, 2, 3, 5)), start, stop)]
        for start, stop in itertools.pairwise(ends)
    ]
    return joined(held, cut(cut_ones[0], tensors[cut_ones[0]], (2, 1, 1, 1), copies=2), flat)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What four ranks have written, with several blocks in an item and several items in a file."""
    make_small(monkeypatch, block_bytes=64, own_file_bytes=1, share_bytes=100)
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 500)
    return save_as_ranks(tmp_path, 3, on_four_ranks(truth()), saving=TORCH_DIST, piece_bytes=500)


def load_with_torch(state: dict[str, Tensor], folder: str) -> None:
    with warnings.catch_warnings():
        # torch warns of what it is asked for: to load without other ranks.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def test_torch_alone_loads_every_type_and_shape_bit_for_bit(folder: str) -> None:
    state = {name: poisoned(tensor.shape, tensor.dtype) for name, tensor in truth().items()}
    load_with_torch(state, folder)
    for name, tensor in truth().items():
        assert bits(state[name]) == bits(tensor), name


def test_torch_s_own_tool_turns_it_into_one_file(folder: str, tmp_path: Path) -> None:
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)
    assert {name: bits(tensor) for name, tensor in state.items()} == {n: bits(t) for n, t in truth().items()}


def test_torch_finds_every_tensor_in_the_description_also_one_without_elements(folder: str) -> None:
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {
        name: (tuple(m.size), m.properties.dtype) for name, m in found.items() if isinstance(m, TensorStorageMetadata)
    } == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in truth().items()}


def load_as_dtensors(rank: int, world: int, folder: str, placement: list) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Tensor] = {}
    for name, tensor in truth().items():
        # float8 and the unsigned integers know no collective, not even the one that hands an empty tensor out.
        placed = placement if tensor.dim() == 4 else [Replicate()]
        local = distribute_tensor(torch.zeros(tensor.shape, dtype=torch.float32), mesh, placed).to_local()
        state[name] = DTensor.from_local(
            poisoned(local.shape, tensor.dtype),
            mesh,
            placed,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.contiguous().stride(),
        )
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in truth().items():
        held = state[name]
        assert isinstance(held, DTensor)
        wanted = tensor
        for place in placement if tensor.dim() == 4 else ():
            if isinstance(place, Shard):
                chunks = wanted.chunk(world, place.dim)
                wanted = chunks[rank]
        assert bits(held.to_local()) == bits(wanted), name
    dist.barrier()


@pytest.mark.parametrize("placement", [[Replicate()], [Shard(0)], [Shard(2)]], ids=str)
def test_torch_alone_loads_it_into_shards_of_two_ranks(folder: str, ranks: Ranks, placement: list) -> None:
    ranks.run(load_as_dtensors, 2, folder, placement)


def test_we_load_it_under_another_cut(folder: str) -> None:
    assert_loads(folder, on_four_ranks(truth()), truth())
    assert_loads(folder, [[piece(name, t, whole(tuple(t.shape))) for name, t in truth().items()]], truth())
    assert_loads(folder, cut("model.experts", truth()["model.experts"], (3, 1, 1, 5)), truth())


def test_files_are_of_one_rank_and_of_bounded_size(folder: str) -> None:
    manifest = read_manifest(LocalFiles(Path(folder)))
    written_by = {block.file: piece.rank for e in manifest.entries for piece in e.pieces for block in piece.blocks}
    assert {path.split("_")[2] for path in written_by} == {"0", "1", "2", "3"}
    assert all(path.startswith(f"__{rank}_") for path, rank in written_by.items())
    held: dict[str, int] = {}
    for entry in manifest.entries:
        for piece_ in entry.pieces:
            size = sum(block.size for block in piece_.blocks)
            held[piece_.blocks[0].file] = held.get(piece_.blocks[0].file, 0) + size
    assert max(held.values()) <= 500
    assert len(held) > 4


def test_the_blocks_of_an_item_are_the_record_that_zip_finds_in_it(folder: str) -> None:
    """The archives are read by Python's zipfile, which knows nothing of torch."""
    manifest = read_manifest(LocalFiles(Path(folder)))
    with open(f"{folder}/.metadata", "rb") as file:
        places = pickle.load(file).storage_data
    seen = 0
    for entry in manifest.entries:
        for piece_ in entry.pieces:
            place = next(p for i, p in places.items() if i.fqn == entry.name and i.offset == piece_.box.offset)
            content = Path(folder, place.relative_path).read_bytes()
            archive = zipfile.ZipFile(io.BytesIO(content[place.offset : place.offset + place.length]))
            record = archive.getinfo("archive/data/0")
            name, extra = (
                int.from_bytes(content[place.offset + record.header_offset + at :][:2], "little") for at in (26, 28)
            )
            start = place.offset + record.header_offset + 30 + name + extra
            first, last = piece_.blocks[0], piece_.blocks[-1]
            assert (first.offset, last.offset + last.size) == (start, start + record.file_size), entry.name
            seen += len(piece_.blocks) > 1
    assert seen > 1, "some items must be of several blocks"


def test_a_tensor_that_is_a_view_is_stored_by_its_values(tmp_path: Path) -> None:
    tensor = torch.arange(35.0).reshape(5, 7).T[1:6:2]
    held = ShardedTensor(name="w", shape=(3, 5), box=whole((3, 5)), data=tensor)
    folder = save(tmp_path, 1, [held], {}, one_rank().world, TORCH_DIST)
    state = {"w": torch.full((3, 5), torch.nan)}
    load_with_torch(state, folder)
    assert torch.equal(state["w"], tensor)


def test_a_checkpoint_without_any_tensor_is_one_to_torch_too(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, [], {"only": "this"}, one_rank().world, TORCH_DIST)
    assert dcp.FileSystemReader(folder).read_metadata().state_dict_metadata == {}
    assert verify(folder) == ()


def test_every_flipped_bit_of_every_file_is_found(tmp_path: Path) -> None:
    """Also in the bytes that torch writes around the values, and in its description."""
    tensors = {"model.a": random_bits("a", (2, 3), torch.bfloat16), "model.b": random_bits("b", (5,), torch.uint8)}
    ranks = [[piece(name, t, whole(tuple(t.shape)))] for name, t in tensors.items()]
    folder = Path(save_as_ranks(tmp_path, 1, ranks, saving=TORCH_DIST))
    manifest = read_manifest(LocalFiles(folder))
    spans = {block.file: (e, p, block) for e in manifest.entries for p in e.pieces for block in p.blocks}
    assert verify(folder) == ()
    for path in manifest.files:
        content = (folder / path).read_bytes()
        for at in range(0, len(content), 11):
            damaged = bytearray(content)
            damaged[at] ^= 1 << at % 8
            (folder / path).write_bytes(damaged)
            (found,) = verify(folder)
            assert found.file == path
            if path in spans and spans[path][2].offset <= at < spans[path][2].offset + spans[path][2].size:
                assert (found.tensor, found.rank) == (spans[path][0].name, spans[path][1].rank)
            else:
                assert found.tensor is None
        (folder / path).write_bytes(content)
    assert verify(folder) == ()


def test_other_saves_of_this_process_still_carry_what_torch_computes(tmp_path: Path) -> None:
    save(tmp_path, 1, [piece("w", torch.arange(7.0), whole((7,)))], {}, one_rank().world, TORCH_DIST)
    file = io.BytesIO()
    torch.save(torch.arange(7.0), file)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        data = next(name for name in archive.namelist() if name.endswith("/data/0"))
        assert archive.read(data) == np.arange(7, dtype=np.float32).tobytes()
