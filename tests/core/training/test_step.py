"""One optimizer step: the same under every mapping, dispatcher and split into microbatches (known faults, pattern 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from core.config.architecture import Dense, ExpertBias, Layer, ModelConfig, MoE
from core.config.mapping import DispatcherName, ParallelConfig
from core.config.run import IGNORE
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import groups_for, one_rank
from core.state.inventory import initialise, inventory
from core.training.evaluate import generate, validation_loss
from core.training.step import NotFiniteError, StepResult, train_step
from core.transformer.stage import Stage, build_model
from tests.core.tiny import (
    ATTENTION,
    GLOBAL_LOSS,
    MICROBATCH_LOSS,
    PLAIN,
    SEQUENCE_LOSS,
    Z_LOSS,
    Case,
    Trained,
    assemble,
    batch_of,
    deepseek,
    empty_batch,
    microbatches,
    mixtral,
    qwen3,
    total_of,
    train,
    train_all,
)
from tests.ranks import Ranks

CLIPPED = replace(PLAIN, clip_norm=0.1)
BIAS = ExpertBias(rate=0.05)
# Balances whose losses do not depend on how the batch is split.
SPLIT_FREE = (BIAS, SEQUENCE_LOSS, Z_LOSS)


def mappings(world: int) -> list[ParallelConfig]:
    """Every degree of expert parallelism in `world` with both dispatchers, which a group of one rank needs to show only once."""
    degrees = [ep for ep in (1, 2, 4) if world % ep == 0]
    names: tuple[DispatcherName, ...] = ("allgather", "alltoall")
    return [
        ParallelConfig(ep=ep, dispatcher=name)
        for ep in degrees
        for name in (names if ep > 1 or world == 1 else names[:1])
    ]


def kinds(world: int, parallel: ParallelConfig) -> list[tuple[str, Case]]:
    """What is trained under a mapping, each with the name of the run on one rank that it must equal."""
    mine = 8 // world
    split = mine if parallel.dispatcher == "allgather" else max(1, mine // 2)
    return [
        # a microbatch's own balance: two windows at a time, wherever they lie
        ("mixtral", Case(model=mixtral(), parallel=parallel, microbatch=2)),
        # balance over the global batch: seen in one piece
        ("qwen3", Case(model=qwen3(), parallel=parallel, microbatch=mine, optimizer=CLIPPED)),
        ("deepseek", Case(model=deepseek(), parallel=parallel, microbatch=mine, steps=2)),
        ("deepseek in any split", Case(model=deepseek(SPLIT_FREE), parallel=parallel, microbatch=split, steps=2)),
    ]


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, Trained]:
    """The truth: one rank, and one microbatch wherever the definition allows it."""
    cases = dict(kinds(1, ParallelConfig()))
    cases["deepseek in any split"] = replace(cases["deepseek in any split"], microbatch=8)
    return {name: train(case) for name, case in cases.items()}


def check_equal(found: Sequence[Trained], truth: Trained) -> None:
    """Every rank's results and the assembled weights, up to rounding in float64."""
    for trained in found:
        for result, expected in zip(trained.results, truth.results, strict=True):
            check_results(result, expected)
    weights, expected_weights = assemble(found), assemble([truth])
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        # A router bias is float32, and moves by the same float32 numbers.
        torch.testing.assert_close(tensor, expected_weights[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: n + m)


def check_results(found: StepResult, expected: StepResult) -> None:
    numbers = {"loss": found.loss, "norm": found.gradient_norm, **dict(enumerate(found.ahead)), **found.balance}
    truth = {"loss": expected.loss, "norm": expected.gradient_norm}
    truth |= {**dict(enumerate(expected.ahead)), **expected.balance}
    # Shares of balance losses are logged in the router's precision, which is float64 here.
    assert numbers == pytest.approx(truth, rel=1e-9)
    assert found.expert_counts == expected.expert_counts
    assert found.tokens == expected.tokens


def test_the_batch_of_the_matrix_is_uneven_over_ranks() -> None:
    labels = [int((microbatches(0, r, 4, 2)[0].labels != IGNORE).sum()) for r in range(4)]
    assert len(set(labels)) > 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_b1_b2_c2_c4_every_mapping_dispatcher_and_split_trains_the_same_model(
    ranks: Ranks, on_one_rank: dict[str, Trained], world: int
) -> None:
    named = [named for parallel in mappings(world) for named in kinds(world, parallel)]
    found = ranks.run(train_all, world, [case for _, case in named], timeout_seconds=60.0)
    for i, (name, _) in enumerate(named):
        check_equal([rank[i] for rank in found], on_one_rank[name])


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_b1_gradients_do_not_depend_on_the_number_of_microbatches(
    on_one_rank: dict[str, Trained], microbatch: int
) -> None:
    found = train(Case(model=deepseek(SPLIT_FREE), microbatch=microbatch, steps=2))
    check_equal([found], on_one_rank["deepseek in any split"])


def test_training_changes_every_tensor_and_the_matrix_would_see_it(on_one_rank: dict[str, Trained]) -> None:
    start = assemble([train(Case(model=deepseek(), steps=0))])
    trained = assemble([on_one_rank["deepseek"]])
    same = [name for name, tensor in trained.items() if torch.equal(tensor, start[name])]
    assert same == []


def test_clipping_was_active_and_scales_by_the_true_norm() -> None:
    free, clipped = (train(Case(model=qwen3(), steps=1, optimizer=o)) for o in (PLAIN, CLIPPED))
    norm = free.results[0].gradient_norm
    assert clipped.results[0].gradient_norm == norm > 0.1
    start = assemble([train(Case(model=qwen3(), steps=0))])
    name = "layers.1.attention.output.weight"
    moved = [assemble([t])[name] - start[name] * 0.9 for t in (free, clipped)]
    # update = g / (|g| + 1), so g = u / (1 - |u|)
    gradients = [-u / (1 - u.abs()) for u in moved]
    torch.testing.assert_close(gradients[1], gradients[0] * (0.1 / norm), rtol=1e-8, atol=1e-12)


def fresh(model: ModelConfig) -> tuple[Stage, ChainedOptimizer]:
    built = build_model(model, dtype=torch.float64)
    initialise(built, 7)
    return built, ChainedOptimizer(built, PLAIN, one_rank())


def test_the_gradient_norm_counts_every_parameter_once_and_a_tied_embedding_too() -> None:
    """E4 in one stage: embedding shared by input, head and prediction ahead."""
    model, optimizer = fresh(replace(deepseek(), tied_embeddings=True))
    reference, _ = fresh(replace(deepseek(), tied_embeddings=True))
    batch = microbatches(0)[0]
    found = train_step(model, optimizer, [batch], rate=0.0, groups=one_rank())
    total_of(reference, batch).backward()
    squares = [float(p.grad.square().sum()) for p in reference.parameters() if p.grad is not None]
    assert len(squares) == len(list(reference.parameters()))
    assert found.gradient_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-12)


def test_b14_one_bias_update_per_step_from_undoubled_counts_whatever_runs_between() -> None:
    model, optimizer = fresh(deepseek(SPLIT_FREE))
    once, once_optimizer = fresh(deepseek(SPLIT_FREE))
    batches = microbatches(0, microbatch=2)
    validation_loss(model, batches, one_rank())
    generate(model, [1, 2, 3], tokens=2, end_of_text=-1)
    first = train_step(model, optimizer, batches, rate=0.1, groups=one_rank())
    expected = train_step(once, once_optimizer, microbatches(0), rate=0.1, groups=one_rank())
    assert first.expert_counts == expected.expert_counts
    assert all(sum(counts) == 8 * 13 * 4 for counts in first.expert_counts.values())
    assert set(first.expert_counts) == {"layers.1", "mtp.0.layer", "mtp.1.layer"}
    biases = {n: p.data for n, p in inventory(model, one_rank()).items() if n.endswith("router.bias")}
    assert len(biases) == 3
    for name, bias in biases.items():
        counts = torch.tensor(first.expert_counts[name.removesuffix(".mlp.router.bias")])
        mean = 8 * 13 * 4 / 16
        assert torch.equal(bias, 0.05 * torch.sign(mean - counts.float()))
    second = train_step(model, optimizer, microbatches(1, microbatch=2), rate=0.1, groups=one_rank())
    assert all(sum(counts) == 8 * 13 * 4 for counts in second.expert_counts.values())


def test_b14_evaluation_and_sampling_leave_bias_and_weights_alone() -> None:
    model, _ = fresh(deepseek())
    before = {name: piece.data.clone() for name, piece in inventory(model, one_rank()).items()}
    validation_loss(model, microbatches(0), one_rank())
    generate(model, [1, 2, 3], tokens=3, end_of_text=-1)
    for name, piece in inventory(model, one_rank()).items():
        assert torch.equal(piece.data, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def uneven_experts() -> ModelConfig:
    """Layers with 4 and with 8 experts."""
    base = deepseek((BIAS, SEQUENCE_LOSS))
    moe = base.layers[1].mlp
    assert isinstance(moe, MoE)
    few = replace(moe, experts=4, top_k=2, router=replace(moe.router, groups=None))
    many = replace(few, experts=8)
    layers = (Layer(attention=ATTENTION, mlp=few), Layer(attention=ATTENTION, mlp=many))
    return replace(base, layers=layers, predict_ahead=None)


def test_b18_layers_with_different_numbers_of_experts_are_all_updated(ranks: Ranks) -> None:
    truth = train(Case(model=uneven_experts(), steps=2))
    assert {k: len(v) for k, v in truth.results[0].expert_counts.items()} == {"layers.0": 4, "layers.1": 8}
    weights = assemble([truth])
    assert all(weights[f"layers.{i}.mlp.router.bias"].abs().max() > 0 for i in range(2))
    case = Case(model=uneven_experts(), steps=2, parallel=ParallelConfig(ep=2), microbatch=2)
    check_equal([rank[0] for rank in ranks.run(train_all, 2, [case])], truth)


def dense_only() -> ModelConfig:
    return replace(mixtral(), layers=(Layer(attention=ATTENTION, mlp=Dense(ffn=8)),) * 2)


LOPSIDED = {"deepseek": deepseek(), "qwen3": qwen3(), "mixtral": mixtral(), "dense": dense_only()}


def lopsided(rank: int, world: int, name: str, dispatcher: DispatcherName) -> tuple[Trained, dict[str, bool]]:
    """Each step's whole batch lies on one rank, the others have no token; with a bias all tokens go to the first experts.

    Also whether each expert weight's gradient is nothing but zeros, in one more backward.
    """
    parallel = ParallelConfig(ep=world, dispatcher=dispatcher)
    groups = groups_for(parallel)
    model = build_model(LOPSIDED[name], groups=groups, parallel=parallel, dtype=torch.float64)
    initialise(model, 7)
    for path, buffer in model.named_buffers():
        if path.endswith("router.bias"):
            buffer[:8] = 100.0
    optimizer = ChainedOptimizer(model, PLAIN, groups)
    results = []
    for step, owner in enumerate((1, 0, 1)):
        batches = [microbatches(step)[0] if rank == owner % world else empty_batch()]
        results.append(train_step(model, optimizer, batches, rate=1.0, groups=groups))
    optimizer.wait_all()
    pieces = [(p.name, p.shape, p.box, p.data.clone()) for p in inventory(model, groups).values()]
    batch = microbatches(0)[0] if rank == 0 else empty_batch()
    hidden = model.run(0, None, batch, purpose="hidden").out
    model.output_head.loss(hidden[0], batch.labels).backward()
    zero = {}
    for path, parameter in model.named_parameters():
        if ".experts." in path and not path.startswith("mtp"):
            assert parameter.grad is not None, f"{path} has no gradient on rank {rank}"
            assert parameter.grad.shape == parameter.shape
            zero[path] = not bool(parameter.grad.any())
    return Trained(results=results, pieces=pieces), zero


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("name", LOPSIDED)
def test_c1_a_rank_without_tokens_or_without_routed_rows_finishes_and_changes_nothing(
    ranks: Ranks, name: str, dispatcher: DispatcherName
) -> None:
    truth, _ = lopsided(0, 1, name, dispatcher)
    found = ranks.run(lopsided, 2, name, dispatcher, timeout_seconds=10.0)
    check_equal([trained for trained, _ in found], truth)
    if name == "deepseek":
        assert all(max(counts[8:]) == 0 for result in truth.results for counts in result.expert_counts.values())
        assert not any(found[0][1].values()) and all(found[1][1].values()) and found[1][1]


@pytest.mark.parametrize("config", [dense_only(), qwen3()], ids=["dense", "experts"])
def test_a_batch_with_nothing_to_predict_is_a_step_without_loss(config: ModelConfig) -> None:
    model, optimizer = fresh(config)
    result = train_step(model, optimizer, [batch_of([1, 2, 3], [IGNORE] * 3, [3])], rate=0.1, groups=one_rank())
    assert result.loss == 0.0 and result.tokens == 3


def test_a_loss_that_is_not_finite_raises_and_changes_nothing() -> None:
    model, optimizer = fresh(deepseek())
    train_step(model, optimizer, microbatches(0), rate=0.1, groups=one_rank())
    with torch.no_grad():
        model.final_norm.weight[3] = torch.nan
    state = {t.name: t.data.clone() for t in (*inventory(model, one_rank()).values(), *optimizer.state())}
    with pytest.raises(NotFiniteError, match=r"step 2: .*nothing was updated"):
        train_step(model, optimizer, microbatches(1), rate=0.1, groups=one_rank())
    for tensor in (*inventory(model, one_rank()).values(), *optimizer.state()):
        assert torch.equal(tensor.data.nan_to_num(99.0), state[tensor.name].nan_to_num(99.0)), tensor.name
    assert optimizer.steps == 1


def test_b3_the_global_balance_of_several_microbatches_uses_the_load_seen_so_far() -> None:
    """Against the definition, from each microbatch's own routing: f over all tokens so far, P over the global batch."""
    config = qwen3((GLOBAL_LOSS,))
    model, optimizer = fresh(config)
    batches = microbatches(0, microbatch=2)
    with torch.no_grad():
        chosen, means = _routing_statistics(model, batches)
    found = train_step(model, optimizer, batches, rate=0.0, groups=one_rank())
    for layer in ("layers.0", "layers.1"):
        total, seen, tokens = 0.0, torch.zeros(12, dtype=torch.float64), 0
        for m, batch in enumerate(batches):
            seen += chosen[layer][m]
            tokens += len(batch.tokens)
            total += float((seen / (3 * tokens) * means[layer][m]).sum()) * 12 / (8 * 13)
        assert found.balance[f"{layer}/aux_global_batch"] == pytest.approx(0.4 * total, rel=1e-9)


def _routing_statistics(
    model: Stage, batches: Sequence
) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
    """By layer and microbatch: how often each expert was chosen, and the sum of its softmax scores, read off the routers."""
    chosen: dict[str, list[torch.Tensor]] = {}
    sums: dict[str, list[torch.Tensor]] = {}
    handles = []
    for path, block in model.layers.items():
        name = f"layers.{path}"

        def note(module: torch.nn.Module, inputs: tuple, output: object, name: str = name) -> None:
            weight = dict(module.named_parameters())["weight"]
            scores = torch.softmax(inputs[0] @ weight.T, -1)
            best = scores.argsort(-1, descending=True)[:, :3]
            chosen.setdefault(name, []).append(torch.bincount(best.flatten(), minlength=12).double())
            sums.setdefault(name, []).append(scores.sum(0))

        handles.append(block.mlp.router.register_forward_hook(note))
    for batch in batches:
        model.run(0, None, batch, purpose="hidden")
    for handle in handles:
        handle.remove()
    return chosen, sums


def test_b5_balance_is_logged_once_per_layer_and_microbatches_do_not_add_to_it() -> None:
    config = mixtral((SEQUENCE_LOSS, Z_LOSS, MICROBATCH_LOSS))
    found = [train(Case(model=config, microbatch=m, steps=1)).results[0].balance for m in (8, 1)]
    names = {f"layers.{i}/{n}" for i in range(2) for n in ("aux_sequence", "z", "aux_microbatch")}
    assert set(found[0]) == set(found[1]) == names
    for name in names:
        if not name.endswith("microbatch"):
            assert found[0][name] == pytest.approx(found[1][name], rel=1e-9)
