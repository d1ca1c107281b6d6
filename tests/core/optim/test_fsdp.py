"""FSDP2 with experts: the training of one rank under every mapping, from shards that are whole only while they are used."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from core.config.mapping import ParallelConfig
from core.optim.fsdp import shard
from core.optim.shards import FullyShardedOptimizer
from core.parallel.groups import one_rank
from core.parallel.meter import Meter
from core.state.box import Box, tiling_fault, whole
from core.state.inventory import declared, initialise, inventory
from core.state.shard import is_sharded
from core.training.evaluate import generate, validation_loss
from core.training.step import NotFiniteError, train_step
from core.transformer.block import Block
from core.transformer.stage import build_model
from tests.core.optim.sharded import FSDP, built, plain, steps_of, told, train_several, train_sharded
from tests.core.tiny import Case, Trained, deepseek, empty_batch, microbatches, mixtral, qwen3
from tests.core.training.test_step import CLIPPED, SPLIT_FREE, check_equal
from tests.ranks import Ranks

# Two windows at a time balance a microbatch of mixtral; those of the others do not depend on how a step is split, or are not.
KINDS = {
    "mixtral": Case(model=mixtral(), microbatch=2, steps=2),
    "qwen3": Case(model=qwen3(), optimizer=CLIPPED, steps=2),
    "deepseek": Case(model=deepseek(SPLIT_FREE), steps=2),
}


def sharded(**degrees: object) -> ParallelConfig:
    return replace(FSDP, **degrees)  # type: ignore[arg-type]


MAPPINGS: dict[int, list[tuple[ParallelConfig, tuple[str, ...]]]] = {
    1: [(FSDP, ("mixtral", "qwen3", "deepseek"))],
    2: [
        (FSDP, ("mixtral", "qwen3", "deepseek")),
        (sharded(ep=2), ("mixtral", "deepseek")),
        (sharded(tp=2), ("qwen3", "deepseek")),
        (sharded(tp=2, etp=2), ("deepseek",)),
        (sharded(cp=2), ("qwen3", "deepseek")),
        (sharded(fsdp_replicas=2), ("qwen3",)),
        (sharded(pp=2, schedule="gpipe"), ("qwen3",)),
        (sharded(pp=2, vpp=2, layout="Et|t|m|mL"), ("deepseek",)),
    ],
    4: [
        (FSDP, ("mixtral", "deepseek")),
        (sharded(ep=2), ("deepseek",)),
        (sharded(ep=4, dispatcher="allgather"), ("mixtral", "deepseek")),
        (sharded(tp=2), ("qwen3", "deepseek")),
        (sharded(cp=2, ep=2), ("deepseek",)),
        (sharded(fsdp_replicas=2), ("mixtral", "deepseek")),
        (sharded(fsdp_replicas=2, ep=4), ("qwen3",)),
        (sharded(tp=2, fsdp_replicas=2, ep=2), ("deepseek",)),
        (sharded(pp=2), ("qwen3", "deepseek")),
        (sharded(pp=2, ep=2, schedule="gpipe"), ("deepseek",)),
        (sharded(pp=2, fsdp_replicas=2), ("qwen3",)),
        (sharded(pp=2, vpp=2, layout="Et|t|m|mL"), ("deepseek",)),
    ],
}


def cases_for(world: int) -> list[tuple[str, Case]]:
    """Every mapping of a world with its models; several microbatches where the model allows them."""
    found = []
    for parallel, names in MAPPINGS[world]:
        mine = 8 * parallel.tp * parallel.cp * parallel.pp // world
        split = {"mixtral": 2, "qwen3": mine, "deepseek": max(1, mine // 2)}
        found += [(name, replace(KINDS[name], parallel=parallel, microbatch=split[name])) for name in names]
    return found


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, Trained]:
    """The truth: the plain optimizer, one rank, and one microbatch wherever the definition allows it."""
    cases = {name: plain(case) for name, case in KINDS.items()}
    cases["mixtral"] = replace(cases["mixtral"], microbatch=2)
    return {name: train_sharded(case) for name, case in cases.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_mapping_schedule_and_split_trains_the_model_of_one_rank(
    ranks: Ranks, on_one_rank: dict[str, Trained], world: int
) -> None:
    cases = cases_for(world)
    found = ranks.run(train_several, world, [case for _, case in cases], timeout_seconds=120.0)
    for i, (name, case) in enumerate(cases):
        try:
            check_equal([rank[i] for rank in found], on_one_rank[name])
        except AssertionError as error:
            raise AssertionError(f"{name} under {case.parallel}: {error}") from error


def test_without_torch_distributed_nothing_is_sharded_and_the_model_trains(on_one_rank: dict[str, Trained]) -> None:
    case = replace(KINDS["deepseek"], parallel=FSDP, microbatch=2)
    check_equal([train_sharded(case)], on_one_rank["deepseek"])
    model, _, _ = built(case)
    assert not any(is_sharded(parameter) for parameter in model.parameters())


# ------------------------------------------------------------------------------------------- shards


def held_between_uses(rank: int, world: int, case: Case) -> tuple[list[dict[str, int]], list[int], list[int]]:
    """Elements of every parameter that lie here: before, after a forward, after a step. Bytes of the whole output projection of
    a layer, as its forward saw it, while it ran and afterwards."""
    model, optimizer, groups = built(case)
    seen: list[Tensor] = []
    during: list[int] = []

    def look(module: nn.Module, inputs: object, output: object) -> None:
        seen.append(module.weight)  # type: ignore[arg-type]
        during.append(seen[-1].untyped_storage().nbytes())

    block = model.layers["0"]
    assert isinstance(block, Block)
    block.attention.output.register_forward_hook(look)
    counts = [{name: entry.tensor.numel() for name, entry in declared(model).items()}]
    batches = microbatches(0, groups.dp.position, groups.dp.size, case.microbatch, groups)
    model.run(0, None, batches[0], purpose="loss")
    counts.append({name: entry.tensor.numel() for name, entry in declared(model).items()})
    freed = [weight.untyped_storage().nbytes() for weight in seen]
    steps_of(case, model, optimizer, groups, [0])
    counts.append({name: entry.tensor.numel() for name, entry in declared(model).items()})
    freed += [weight.untyped_storage().nbytes() for weight in seen]
    return counts, during, freed


def test_a_rank_keeps_its_shards_alone_and_whole_weights_only_while_they_are_used(ranks: Ranks) -> None:
    case = Case(model=deepseek(), parallel=sharded(ep=2), microbatch=2)
    found = ranks.run(held_between_uses, 4, case)
    sizes = {n: entry.spec.box.elements for n, entry in declared(build_model(case.model)).items()}
    for counts, during, freed in found:
        assert counts[0] == counts[1] == counts[2]
        assert len(set(during)) == 1 and during[0] >= 8 * 16 * 12 and set(freed) == {0}
    for name, size in sizes.items():
        held = [counts[0][name] for counts, _, _ in found]
        if not name.endswith("router.bias"):
            assert sum(held) == size, name
        if ".experts." in name:  # two ranks share each half
            assert held == [size // 4] * 4


def pieces_of(rank: int, world: int, case: Case) -> list[tuple[str, tuple[int, ...], Box, int, int]]:
    model, _, groups = built(case)
    return [(p.name, p.shape, p.box, p.copy, p.copies) for p in inventory(model, groups).values()]


@pytest.mark.parametrize(
    "parallel", [FSDP, sharded(fsdp_replicas=2, ep=4), sharded(tp=2, fsdp_replicas=2), sharded(tp=2, ep=2)]
)
def test_the_shards_of_all_ranks_tile_the_canonical_state_and_each_copy_is_there_once(
    ranks: Ranks, parallel: ParallelConfig
) -> None:
    found = ranks.run(pieces_of, 4, Case(model=deepseek(), parallel=parallel))
    shapes = {name: entry.spec.shape for name, entry in declared(build_model(deepseek())).items()}
    held: dict[str, dict[Box, list[tuple[int, int]]]] = {name: {} for name in shapes}
    for pieces in found:
        for name, shape, box, copy, copies in pieces:
            assert shape == shapes[name] and box.elements
            held[name].setdefault(box, []).append((copy, copies))
    for name, boxes in held.items():
        assert tiling_fault(whole(shapes[name]), list(boxes)) is None, name
        for claims in boxes.values():
            assert sorted(claims) == [(i, len(claims)) for i in range(len(claims))], name


def test_uneven_and_empty_shards_occur_and_a_pair_of_matrices_is_not_padded(ranks: Ranks) -> None:
    """Six rows for four ranks leave the last none; [2, ffn, hidden] is cut where four ranks divide it."""
    found = ranks.run(pieces_of, 4, Case(model=deepseek(), parallel=FSDP))
    rows = [{name: box.shape for name, _, box, _, _ in pieces} for pieces in found]
    norm = "layers.0.attention.query_norm.weight"
    assert [told.get(norm) for told in rows] == [(2,), (2,), (2,), None]
    assert [told["embedding.weight"][0] for told in rows] == [8, 8, 8, 7]
    assert {told["layers.0.mlp.gate_up"] for told in rows} == {(2, 6, 16)}


def initialised(rank: int, world: int, case: Case, device: str) -> list[str]:
    """What has not the same bits where a model is initialised as shards, having been built on `device`."""
    before, _, groups = built(case)
    after = build_model(case.model, groups=groups, parallel=case.parallel, dtype=torch.float64, device=device)
    shard(after, groups)
    after.to_empty(device="cpu")
    initialise(after, 7)
    there, here = inventory(before, groups), inventory(after, groups)
    assert there.keys() == here.keys()
    return [name for name in here if not torch.equal(there[name].data, here[name].data)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_may_be_initialised_before_or_after_it_is_sharded_and_never_be_whole(ranks: Ranks, device: str) -> None:
    assert ranks.run(initialised, 3, Case(model=deepseek(), parallel=FSDP), device) == [[]] * 3


# ------------------------------------------------------------------------------------------- traffic


def traffic(rank: int, world: int, case: Case) -> dict[tuple[str, str], int]:
    """Bytes that leave this rank in one step beyond those of the step itself, by axis and collective."""
    meter = Meter()
    model, optimizer, groups = built(case, meter=meter)
    steps_of(case, model, optimizer, groups, [0])
    return dict(Counter(meter.sent_bytes))


def test_every_unit_is_gathered_twice_and_summed_once_a_microbatch_over_its_own_ranks(ranks: Ranks) -> None:
    """Of two ranks each sends half of a unit, padded; the embedding needs no weights in its backward."""
    case = replace(KINDS["mixtral"], parallel=FSDP)
    half: Counter[str] = Counter()
    for name, entry in declared(build_model(case.model)).items():
        kind = "edp" if ".experts." in name else "embedding" if name.startswith("embedding") else "replicas"
        shape = entry.spec.shape
        half[kind] += 8 * entry.spec.box.elements * -(-shape[0] // 2) // shape[0]
    for sent in ranks.run(traffic, 2, case):
        assert sent["edp", "all_gather"] == 2 * 2 * half["edp"]
        assert sent["edp", "reduce_scatter"] == 2 * half["edp"]
        assert sent["replicas", "all_gather"] == 2 * (2 * half["replicas"] + half["embedding"])
        assert sent["replicas", "reduce_scatter"] == 2 * (half["replicas"] + half["embedding"])


def test_copies_of_shards_are_summed_once_a_step_however_many_microbatches_there_are(ranks: Ranks) -> None:
    parallel = sharded(fsdp_replicas=2)
    elements = sum(e.spec.box.elements for e in declared(build_model(deepseek())).values() if e.spec.trained)
    sums = []
    for microbatch in (4, 1):
        case = replace(KINDS["deepseek"], parallel=parallel, microbatch=microbatch)
        found = ranks.run(traffic, 2, case)
        sums.append([sum(n for (_, c), n in sent.items() if c in ("reduce_scatter", "all_gather")) for sent in found])
    assert sums[0] == sums[1]
    for sent in sums[0]:  # as an all-reduce of all gradients: half is sent twice
        assert 8 * elements <= sent <= 1.1 * 8 * elements


def passes_left(rank: int, world: int, case: Case) -> set[int]:
    """How many more backward passes each parameter was told to expect than there were."""
    model, optimizer, groups = built(case)
    assert isinstance(optimizer, FullyShardedOptimizer)
    steps_of(case, model, optimizer, groups, [0])
    return {slot.passes_left for bucket in optimizer.buckets for slot in bucket.slots}


@pytest.mark.parametrize(("name", "parallel"), [("deepseek", FSDP), ("qwen3", sharded(pp=2))])
def test_fsdp_gives_each_gradient_once_a_backward_so_that_sums_start_beside_the_last(
    ranks: Ranks, name: str, parallel: ParallelConfig
) -> None:
    """Embeddings and heads are used several times in a backward."""
    case = replace(KINDS[name], parallel=parallel, microbatch=2)
    assert ranks.run(passes_left, 4, case) == [{0}] * 4


# ------------------------------------------------------------------------------------------- odd steps


def lopsided(rank: int, world: int, case: Case) -> Trained:
    """Each step's whole batch lies on one rank; the others have no token at all."""
    model, optimizer, groups = built(case)
    results = []
    for step, owner in enumerate((world - 1, 0)):
        batch = microbatches(step)[0] if rank == owner else empty_batch()
        results.append(train_step(model, optimizer, [batch], rate=1.0, groups=groups))
    return told(model, groups, results)


@pytest.mark.parametrize("parallel", [FSDP, sharded(ep=2), sharded(ep=2, fsdp_replicas=2)])
def test_ranks_without_tokens_take_part_and_change_nothing(
    ranks: Ranks, on_one_rank: dict[str, Trained], parallel: ParallelConfig
) -> None:
    case = replace(KINDS["deepseek"], parallel=parallel)
    check_equal(ranks.run(lopsided, 4, case, timeout_seconds=30.0), on_one_rank["deepseek"])


def partly_reached(rank: int, world: int, case: Case) -> tuple[float, Trained]:
    """A step of the main head's loss alone, which the prediction modules do not reach, and one that reaches nothing."""
    model, optimizer, groups = built(case)
    batch = microbatches(0, rank, world, 8 // world)[0]
    optimizer.begin({name: int(not name.startswith("mtp")) for name, _ in model.named_parameters()})
    hidden = model.run(0, None, batch, purpose="hidden").out
    assert hidden is not None
    model.output_head.loss(hidden[0], batch.labels).backward()
    optimizer.accumulate()
    optimizer.reduce()
    norm = optimizer.gradient_norm()
    optimizer.step(0.5, norm)
    optimizer.wait_all()
    optimizer.begin(0)
    optimizer.reduce()
    assert optimizer.gradient_norm() == 0.0
    optimizer.step(0.5, 0.0)
    optimizer.wait_all()
    return norm, told(model, groups, [])


def test_parameters_that_no_backward_reaches_count_as_zero_and_decay(ranks: Ranks) -> None:
    case = Case(model=deepseek(), parallel=FSDP)
    norm, truth = partly_reached(0, 1, replace(case, parallel=ParallelConfig()))
    found = ranks.run(partly_reached, 2, case)
    assert [n for n, _ in found] == pytest.approx([norm] * 2, rel=1e-9)
    check_equal([trained for _, trained in found], truth)


def not_finite(rank: int, world: int, case: Case) -> None:
    model, optimizer, groups = built(case)
    steps_of(case, model, optimizer, groups, [0])
    with torch.no_grad():
        for piece in inventory(model, groups).values():
            if piece.name == "final_norm.weight" and rank == 0:
                piece.data[0] = torch.nan
    state = {t.name: t.data.clone() for t in (*inventory(model, groups).values(), *optimizer.state())}
    with pytest.raises(NotFiniteError, match=r"step 2: .*nothing was updated"):
        steps_of(case, model, optimizer, groups, [1])
    for tensor in (*inventory(model, groups).values(), *optimizer.state()):
        assert torch.equal(tensor.data.nan_to_num(99.0), state[tensor.name].nan_to_num(99.0)), tensor.name
    assert optimizer.steps == 1


def test_a_gradient_that_is_not_finite_on_one_rank_raises_on_all_and_changes_nothing(ranks: Ranks) -> None:
    ranks.run(not_finite, 2, Case(model=qwen3(), parallel=FSDP, microbatch=4))


def measured(rank: int, world: int, case: Case) -> tuple[float, list[int], float]:
    """Validation loss and a continuation between two steps, and the loss of the second."""
    model, optimizer, groups = built(case)
    steps_of(case, model, optimizer, groups, [0])
    batches = microbatches(5, groups.dp.position, groups.dp.size, case.microbatch, groups)
    loss = validation_loss(model, batches, groups)
    text = generate(model, [1, 2, 3], tokens=4, end_of_text=-1)
    return loss, text, steps_of(case, model, optimizer, groups, [1])[0].loss


@pytest.mark.parametrize("parallel", [FSDP, sharded(pp=2)])
def test_evaluation_and_sampling_between_steps_see_the_parameters_and_disturb_nothing(
    ranks: Ranks, parallel: ParallelConfig
) -> None:
    case = replace(KINDS["deepseek"], parallel=parallel, microbatch=4)
    loss, text, after = measured(0, 1, plain(case))
    for found in ranks.run(measured, 2, case):
        assert found[0] == pytest.approx(loss, rel=1e-9) and found[1] == text
        assert found[2] == pytest.approx(after, rel=1e-9)


@pytest.mark.parametrize("schedule", ["zero_bubble", "combined"])
def test_schedules_that_go_past_the_hooks_are_our_mistake_here(schedule: str) -> None:
    parallel = sharded(schedule=schedule)
    model = build_model(mixtral(), parallel=parallel)
    with pytest.raises(AssertionError, match=f"{schedule} goes past the hooks of FSDP"):
        shard(model, one_rank())


def test_groups_without_groups_for_shards_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="not for sharding=fsdp"):
        shard(build_model(mixtral()), replace(one_rank(), shards=None))
