"""Loading under any mapping what any other mapping saved; strict, bit for bit, and no damage passes for data."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckpt.files.local import LocalFiles
from ckpt.load import load
from ckpt.manifest import MANIFEST, Manifest, manifest_bytes, read_manifest
from ckpt.read import read_into
from ckpt.save import Saving
from ckpt.verify import verify
from core.errors import CheckpointError
from core.parallel.groups import one_rank
from core.state.box import Box, flat_boxes, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.ledger import watched
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
    target_like,
)
from tests.core.state.test_box import split

ALONE = one_rank().world
EXPERTS, FFN, HIDDEN = 12, 8, 5


def experts() -> dict[str, Tensor]:
    """Expert i of layer l holds i + 100 l everywhere, plus a thousandth of its row: gate rows 0…, up rows half way on."""
    values = {}
    for layer in (0, 1):
        number = torch.arange(EXPERTS).reshape(-1, 1, 1, 1) + 100 * layer
        row = torch.arange(2 * FFN).reshape(1, 2, FFN, 1)
        values[f"layers.{layer}.mlp.experts.gate_up"] = (number + row / 1000).expand(-1, -1, -1, HIDDEN).contiguous()
    return values


def by_experts_and_rows(ep: int, tp: int) -> list[Rank]:
    return joined(*(cut(name, tensor, (ep, 1, tp, 1)) for name, tensor in experts().items()))


MAPPINGS = list(itertools.product((1, 2, 3, 4), (1, 2)))


@pytest.mark.parametrize(("ep", "tp"), MAPPINGS)
def test_an_expert_is_the_same_expert_under_every_other_mapping(tmp_path: Path, ep: int, tp: int) -> None:
    folder = save_as_ranks(tmp_path, 1, by_experts_and_rows(ep, tp))
    for other in MAPPINGS:
        assert_loads(folder, by_experts_and_rows(*other), experts())


def test_a_rank_under_tensor_parallelism_gets_its_rows_of_gate_and_of_up(tmp_path: Path) -> None:
    # Gate rows 0..7, up rows 100..107: the second of two ranks holds 4..7 and 104..107 (Megatron-LM#360).
    gate_up = torch.stack([torch.arange(8.0), torch.arange(100.0, 108.0)]).unsqueeze(2)
    folder = save_as_ranks(tmp_path, 1, cut("gate_up", gate_up, (1, 1, 1)))
    ((target,),) = cut("gate_up", torch.full((2, 8, 1), torch.nan), (1, 2, 1))[1:]
    with pytest.raises(CheckpointError, match="held by no piece"):
        load(folder, [target], ALONE)
    (both,) = joined(*(cut("gate_up", torch.full((2, 8, 1), torch.nan), (1, 2, 1))[i : i + 1] for i in (0, 1)))
    load(folder, both, ALONE)
    assert both[1].data.flatten().tolist() == [4, 5, 6, 7, 104, 105, 106, 107]


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
savings = st.sampled_from([Saving(), Saving(codec="zstd"), Saving(store="torch_dist")])


def manifest_of(folder: str) -> Manifest:
    return read_manifest(LocalFiles(Path(folder)))


@settings(max_examples=50)
@given(st.data(), shapes, dtypes, savings, st.sampled_from([8, 24, 1 << 20]))
def test_any_pieces_are_read_from_any_other_pieces_bit_for_bit_and_from_just_the_blocks_that_they_meet(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    saving: Saving,
    small: int,
) -> None:
    truth = {"w": random_bits("w", shape, dtype)}

    def mapping(copies: int) -> list[Rank]:
        """Drawn pieces on drawn ranks, every piece `copies` times."""
        ranks: list[Rank] = [[] for _ in range(3 + copies)]
        for box in split(whole(shape), data.draw):
            first = data.draw(st.integers(0, 3))
            for copy in range(copies):
                ranks[(first + copy) % len(ranks)].append(piece("w", truth["w"], box, copy, copies))
        return ranks

    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, block_bytes=small, own_file_bytes=small, share_bytes=2 * small)
        ranks = mapping(data.draw(st.integers(1, 3)))
        folder = save_as_ranks(tmp_path_factory.mktemp("run"), 1, ranks, saving=saving, piece_bytes=8 * small)
    manifest = manifest_of(folder)
    for rank in mapping(1):
        targets = target_like(rank)
        with watched(targets) as ledger:
            read_into(LocalFiles(Path(folder)), manifest, targets)
        ledger.assert_each_target_written_once()
        ledger.assert_read_just_what_is_met(manifest)
        for t in targets:
            assert bits(t.data) == bits(truth["w"][t.box.slices]), t.box
    assert verify(folder) == ()


def test_a_load_of_everything_reads_every_block_once_and_writes_every_element_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch, block_bytes=100, own_file_bytes=1000, share_bytes=200)
    truth = {"big": random_bits("big", (12, 3, 8, 5), torch.bfloat16), "small": random_bits("s", (7,), torch.float32)}
    truth |= {"scalar": torch.tensor(5), "none": torch.zeros(0, 3)}
    ranks = cut("big", truth["big"], (2, 1, 2, 1), copies=2)
    ranks[3] += [piece(name, truth[name], whole(tuple(truth[name].shape))) for name in ("small", "scalar", "none")]
    folder = save_as_ranks(tmp_path, 1, ranks)
    targets = [target(name, tuple(tensor.shape), tensor.dtype) for name, tensor in truth.items()]
    with watched(targets) as ledger:
        load(folder, targets, ALONE)
    ledger.assert_each_target_written_once()
    ledger.assert_read_just_what_is_met(manifest_of(folder))
    assert ledger.bytes == sum(tensor.numel() * tensor.element_size() for tensor in truth.values())
    assert len(ledger.reads) > 20
    assert all(bits(t.data) == bits(truth[t.name]) for t in targets)


def test_a_rank_reads_the_bytes_of_its_own_blocks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch, block_bytes=160, own_file_bytes=640, share_bytes=1 << 20)
    truth = random_bits("w", (32, 10), torch.float32)
    folder = save_as_ranks(tmp_path, 1, cut("w", truth, (2, 1)))

    def read_by(*boxes: Box) -> int:
        rank = target_like([piece("w", truth, box) for box in boxes])
        with watched(rank) as ledger:
            read_into(LocalFiles(Path(folder)), manifest_of(folder), rank)
        ledger.assert_each_target_written_once()
        ledger.assert_read_just_what_is_met(manifest_of(folder))
        return ledger.bytes

    # Blocks are of 4 rows of 40 bytes.
    assert read_by(whole((32, 10))) == 32 * 40
    assert read_by(Box(offset=(8, 0), shape=(8, 10))) == 8 * 40
    assert read_by(Box(offset=(5, 3), shape=(1, 1))) == 4 * 40
    assert read_by(Box(offset=(3, 0), shape=(2, 10))) == 8 * 40
    assert read_by(Box(offset=(0, 9), shape=(32, 1))) == 32 * 40
    assert read_by(Box(offset=(7, 0), shape=(0, 10))) == 0
    assert read_by() == 0
    # A flat shard: the end of row 1, rows 2 to 5, and the beginning of row 6.
    assert read_by(*(box for box, _ in flat_boxes(whole((32, 10)), 13, 65))) == 8 * 40


def test_two_targets_of_the_same_piece_are_both_filled(tmp_path: Path) -> None:
    truth = {"w": random_bits("w", (5, 3), torch.float32)}
    folder = saved(tmp_path, truth)
    targets = [target("w", (5, 3)), target("w", (5, 3))]
    with watched(targets) as ledger:
        load(folder, targets, ALONE)
    ledger.assert_each_target_written_once()
    ledger.assert_read_just_what_is_met(manifest_of(folder))
    assert all(bits(t.data) == bits(truth["w"]) for t in targets)


def test_flat_shards_over_other_numbers_of_ranks_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ZeRO-1 cuts: ranges of a flat buffer that begin and end within rows of a piece that tp cut."""
    make_small(monkeypatch, block_bytes=64, own_file_bytes=128, share_bytes=64)
    truth = {"w": random_bits("w", (6, 2, 7, 3), torch.float32)}

    def flat(tp: int, dp: int) -> list[Rank]:
        ranks: list[Rank] = []
        for local in (Box(offset=(0, 0, 0, 0), shape=(6, 2, 7, 3)),) if tp == 1 else tp_boxes:
            ends = [local.elements * i // dp for i in range(dp + 1)]
            for low, high in itertools.pairwise(ends):
                ranks.append([piece("w", truth["w"], box) for box, _ in flat_boxes(local, low, high)])
        return ranks

    tp_boxes = (Box(offset=(0, 0, 0, 0), shape=(6, 2, 3, 3)), Box(offset=(0, 0, 3, 0), shape=(6, 2, 4, 3)))
    mappings = list(itertools.product((1, 2), (1, 2, 5)))
    for step, mapping in enumerate(mappings):
        folder = save_as_ranks(tmp_path, step, flat(*mapping))
        assert verify(folder) == ()
        for other in mappings:
            assert_loads(folder, flat(*other), truth)


def target(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ShardedTensor:
    return ShardedTensor(name=name, shape=shape, box=whole(shape), data=poisoned(shape, dtype))


def saved(run: Path, tensors: dict[str, Tensor]) -> str:
    return save_as_ranks(run, 1, [[piece(n, t, whole(tuple(t.shape))) for n, t in tensors.items()]])


def refusal(folder: str | Path, targets: list[ShardedTensor], skip: tuple[str, ...] = ()) -> str:
    """The message of a refused load, after which every target must be as poisoned as before."""
    before = [bits(t.data) for t in targets]
    with pytest.raises(CheckpointError) as caught:
        load(folder, targets, ALONE, skip)
    assert [bits(t.data) for t in targets] == before
    return str(caught.value)


def test_everything_that_does_not_fit_is_listed_before_anything_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(2, 3), "d": torch.ones(5), "e": torch.ones(1)}
    folder = saved(tmp_path, tensors)
    targets = [target("a", (3,)), target("c", (3, 2)), target("d", (5,), torch.int64), target("z", (1,))]
    assert refusal(folder, targets).splitlines()[1:] == [
        "  z: missing in the checkpoint",
        "  b: in the checkpoint, but nothing to load it into",
        "  e: in the checkpoint, but nothing to load it into",
        "  c: has shape (2, 3) in the checkpoint, but (3, 2) is wanted",
        "  d: is float32 in the checkpoint, which cannot fill int64",
    ]


def test_parts_can_be_left_out_only_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"model.w": torch.ones(3), "optimizer.exp_avg.w": torch.ones(3)})
    assert "optimizer.exp_avg.w: in the checkpoint, but nothing" in refusal(folder, [target("model.w", (3,))])
    wanted = target("model.w", (3,))
    load(folder, [wanted], ALONE, skip=("optimizer.",))
    assert wanted.data.tolist() == [1, 1, 1]


def test_targets_that_together_miss_a_part_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"experts": torch.ones(4, 3)})
    local = ShardedTensor(name="experts", shape=(4, 3), box=Box(offset=(0, 0), shape=(2, 3)), data=torch.zeros(2, 3))
    assert "experts: the element at (2, 0) is held by no piece" in refusal(folder, [local])


def test_a_router_bias_in_float32_keeps_every_bit(tmp_path: Path) -> None:
    bias = 7 + 0.001 * torch.arange(64.0)
    wanted = target("router.bias", (64,))
    load(saved(tmp_path, {"router.bias": bias}), [wanted], ALONE)
    assert bits(wanted.data) == bits(bias) and len(set(wanted.data.tolist())) == 64


def test_another_floating_type_is_converted_by_value_and_an_eight_bit_one_refused(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 1.00390625, -3.0e-5, 65504.0])
    folder = saved(tmp_path, {"w": values})
    half = target("w", (4,), torch.bfloat16)
    load(folder, [half], ALONE)
    assert torch.equal(half.data, values.bfloat16())
    assert "w: is float32 in the checkpoint, which cannot fill float8_e4m3fn" in refusal(
        folder, [target("w", (4,), torch.float8_e4m3fn)]
    )


def test_a_parameter_that_trains_and_a_view_are_filled_in_place(tmp_path: Path) -> None:
    truth = torch.arange(12.0).reshape(3, 4)
    folder = saved(tmp_path, {"p": truth, "v": truth})
    parameter = torch.nn.Parameter(torch.full((3, 4), torch.nan))
    memory = torch.full((4, 3), torch.nan)
    targets = [
        ShardedTensor(name="p", shape=(3, 4), box=whole((3, 4)), data=parameter),
        ShardedTensor(name="v", shape=(3, 4), box=whole((3, 4)), data=memory.T),
    ]
    load(folder, targets, ALONE)
    assert torch.equal(parameter, truth) and torch.equal(memory.T, truth)


HIT = "tensors/hit/c.1.0"


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tensor `hit` in two files of its own, by ranks 0 and 1, and `good` behind others in a file of rank 0."""
    make_small(monkeypatch, block_bytes=64, own_file_bytes=64, share_bytes=1 << 20)
    truth = {"good": torch.ones(3, 5), "hit": torch.arange(48.0).reshape(4, 12)}
    hit = cut("hit", truth["hit"], (2, 1))
    return Path(save_as_ranks(tmp_path, 1, [hit[0] + [piece("good", truth["good"], whole((3, 5)))], hit[1]]))


def wanted() -> list[ShardedTensor]:
    return [target("good", (3, 5)), target("hit", (4, 12))]


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_missing_or_truncated_file_is_found_before_anything_is_read(checkpoint: Path, cut_short: bool) -> None:
    path = checkpoint / HIT
    path.write_bytes(path.read_bytes()[:-1]) if cut_short else path.unlink()
    message = refusal(checkpoint, wanted())
    said = "has 139 bytes instead of 140" if cut_short else "is missing"
    assert message.splitlines()[1:] == [f"  {HIT} {said}, which holds hit (written by rank 1)"]
    assert str(checkpoint) in message
    assert [(d.tensor, d.rank, d.file) for d in verify(checkpoint)] == [("hit", 1, HIT)]
    # Who needs nothing of it is not kept from its own.
    upper = ShardedTensor(
        name="hit", shape=(4, 12), box=Box(offset=(0, 0), shape=(2, 12)), data=poisoned((2, 12), torch.float32)
    )
    read_into(LocalFiles(checkpoint), manifest_of(str(checkpoint)), [upper])
    assert torch.equal(upper.data, torch.arange(24.0).reshape(2, 12))


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_missing_or_truncated_description_hits_no_tensor_but_is_found(checkpoint: Path, cut_short: bool) -> None:
    path = checkpoint / "tensors/hit/zarr.json"
    path.write_bytes(path.read_bytes()[:-1]) if cut_short else path.unlink()
    load(checkpoint, wanted(), ALONE)
    assert [(d.tensor, d.rank, d.file) for d in verify(checkpoint)] == [(None, None, "tensors/hit/zarr.json")]


def test_every_flipped_bit_of_a_block_is_found_and_named_and_those_around_it_are_found(checkpoint: Path) -> None:
    path = checkpoint / HIT
    intact = path.read_bytes()
    piece_of_rank_1 = next(e for e in manifest_of(str(checkpoint)).entries if e.name == "hit").pieces[1]
    inside = {at for block in piece_of_rank_1.blocks for at in range(block.offset, block.offset + block.size)}
    assert 0 < len(intact) - len(inside) < 45
    for position in range(len(intact)):
        flipped = bytearray(intact)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        (damage,) = verify(checkpoint)
        assert damage.file == HIT
        if position in inside:
            with pytest.raises(CheckpointError, match=rf"{HIT}: hit \(written by rank 1\) is damaged: .*checksum"):
                load(checkpoint, wanted(), ALONE)
            assert (damage.tensor, damage.rank) == ("hit", 1)
        else:
            load(checkpoint, wanted(), ALONE)
            assert (damage.tensor, damage.rank) == (None, None)
    path.write_bytes(intact)
    assert verify(checkpoint) == ()


def test_a_file_of_another_checkpoint_in_its_place_is_found(tmp_path: Path, checkpoint: Path) -> None:
    # Its own checksums are right; only the manifest knows that it is not what was written.
    other = save_as_ranks(tmp_path / "other", 1, cut("hit", torch.arange(48.0).reshape(4, 12) + 1, (2, 1)))
    shutil.copy(Path(other) / HIT, checkpoint / HIT)
    with pytest.raises(CheckpointError, match=r"hit \(written by rank 1\) is damaged: .* checksum \w+ instead of \w+"):
        load(checkpoint, wanted(), ALONE)
    assert {(damage.tensor, damage.rank) for damage in verify(checkpoint)} == {("hit", 1), (None, None)}


def test_a_manifest_whose_pieces_leave_a_hole_fills_nothing(checkpoint: Path) -> None:
    """As if a rank's pieces had never arrived in it."""
    manifest = manifest_of(str(checkpoint))
    entries = tuple(replace(e, pieces=e.pieces[:1]) for e in manifest.entries)
    (checkpoint / MANIFEST).write_bytes(manifest_bytes(replace(manifest, entries=entries)))
    assert "hit: the stored pieces do not fill it: the element at (2, 0) is held by no piece" in refusal(
        checkpoint, wanted()
    )


def test_a_folder_that_is_no_checkpoint_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    assert "this is not a checkpoint" in refusal(tmp_path, wanted())


def test_a_store_that_is_not_known_does_not_matter_to_a_reader(checkpoint: Path) -> None:
    """The manifest says where every block lies; the store is for other programs."""
    (checkpoint / MANIFEST).write_bytes(manifest_bytes(replace(manifest_of(str(checkpoint)), store="tape")))
    targets = wanted()
    load(checkpoint, targets, ALONE)
    assert torch.equal(targets[1].data, torch.arange(48.0).reshape(4, 12))
