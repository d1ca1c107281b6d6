"""Loading under any mapping what any other mapping saved; strict, bit for bit, and no damage passes for data."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ckpt.store.zarr as zarr_store
from ckpt.load import load
from ckpt.manifest import read_manifest, write_manifest
from ckpt.verify import verify
from core.errors import CheckpointError
from core.parallel.groups import one_rank
from core.state.box import Box, whole
from core.state.sharded import ShardedTensor
from tests.ckpt.pieces import Rank, assert_loads, bits, cut, joined, piece, poisoned, random_bits, save_as_ranks
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


@settings(max_examples=60)
@given(st.data(), shapes, dtypes)
def test_any_pieces_are_read_from_any_other_pieces_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
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

    folder = save_as_ranks(tmp_path_factory.mktemp("run"), 1, mapping(data.draw(st.integers(1, 3))))
    assert_loads(folder, mapping(1), truth)
    assert verify(folder) == ()


def test_large_pieces_are_read_across_inner_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_store, "INNER_BYTES", 100)
    truth = {"w": random_bits("w", (12, 3, 8, 5), torch.bfloat16)}
    folder = save_as_ranks(tmp_path, 1, cut("w", truth["w"], (2, 1, 2, 1)))
    assert_loads(folder, cut("w", truth["w"], (3, 1, 4, 5)), truth)
    assert verify(folder) == ()


def target(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ShardedTensor:
    return ShardedTensor(name=name, shape=shape, box=whole(shape), data=poisoned(shape, dtype))


def saved(run: Path, tensors: dict[str, Tensor]) -> Path:
    return save_as_ranks(run, 1, [[piece(n, t, whole(tuple(t.shape))) for n, t in tensors.items()]])


def refusal(folder: Path, targets: list[ShardedTensor], skip: tuple[str, ...] = ()) -> str:
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


def damaged(run: Path) -> tuple[Path, dict[str, Tensor]]:
    truth = {"good": torch.ones(3, 5), "hit": torch.arange(24.0).reshape(4, 6)}
    ranks = joined(cut("good", truth["good"], (1, 5)), cut("hit", truth["hit"], (2, 1)) + [[], [], []])
    return save_as_ranks(run, 1, ranks), truth


def wanted() -> list[ShardedTensor]:
    return [target("good", (3, 5)), target("hit", (4, 6))]


@pytest.mark.parametrize("file", ["c.1.0", "zarr.json"])
@pytest.mark.parametrize("cut_short", [False, True])
def test_a_missing_or_truncated_file_is_found_before_anything_is_read(
    tmp_path: Path, file: str, cut_short: bool
) -> None:
    folder, _ = damaged(tmp_path)
    path = folder / "tensors" / "hit" / file
    path.write_bytes(path.read_bytes()[:-1]) if cut_short else path.unlink()
    message = refusal(folder, wanted())
    assert f"hit: tensors/hit/{file}" in message and str(folder) in message and "good" not in message
    hit = [("hit", 1)] if file == "c.1.0" else [("hit", 0), ("hit", 1)]
    assert [(d.tensor, d.rank) for d in verify(folder)] == hit


def test_every_flipped_bit_of_a_chunk_is_found_and_named(tmp_path: Path) -> None:
    folder, _ = damaged(tmp_path)
    path = folder / "tensors" / "hit" / "c.1.0"
    intact = path.read_bytes()
    for position in range(0, len(intact), 5):
        flipped = bytearray(intact)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="tensors/hit"):
            load(folder, wanted(), ALONE)
        (damage,) = verify(folder)
        assert (damage.tensor, damage.rank) == ("hit", 1)
    path.write_bytes(intact)
    assert verify(folder) == ()


def test_a_chunk_of_another_checkpoint_in_its_place_is_found(tmp_path: Path) -> None:
    # Its own checksum is right; only the manifest knows that it is not what was written.
    truth = torch.arange(24.0).reshape(4, 6)
    other = saved(tmp_path / "a", {"hit": truth + 1})
    mine = saved(tmp_path / "b", {"hit": truth})
    (mine / "tensors/hit/c.0.0").write_bytes((other / "tensors/hit/c.0.0").read_bytes())
    with pytest.raises(CheckpointError, match=r"tensors/hit: hit is damaged \(checksum is \w+ instead of \w+\)"):
        load(mine, [target("hit", (4, 6))], ALONE)
    assert [damage.tensor for damage in verify(mine)] == ["hit"]


def test_a_folder_that_is_no_checkpoint_is_refused_untouched(tmp_path: Path) -> None:
    assert "this is not a checkpoint" in refusal(tmp_path, wanted())


def test_a_store_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder, _ = damaged(tmp_path)
    write_manifest(folder, replace(read_manifest(folder), store="tape"))
    assert "written by the store tape" in refusal(folder, wanted())
