"""One training step of the zoo against transformers': same model, same dtype, same cores, side by side in one run.

A step is forward, backward, clipping and AdamW (torch's fused one on both sides) on 2048 tokens in sequences of 512. The peer runs
its fastest experts implementation of `eager` and `grouped_mm`, found on fewer tokens first. Both take turns; the table gives
medians, and how much of each step the bare matrix products of our step would take on this machine.

    python benchmarks/step.py [--model mixtral] [--dtype float32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.huggingface import save_pretrained
from ckpt.memory import keep_freed_memory
from core.config.architecture import (
    GQA,
    MLA,
    AuxLoss,
    Dense,
    ExpertBias,
    Groups,
    Layer,
    ModelConfig,
    MoE,
    RMSNorm,
    Rope,
    Router,
    SharedExperts,
    repeat,
)
from core.config.run import IGNORE, OptimizerConfig
from core.kernels.backend import matmul_backend
from core.optim.chained import ChainedOptimizer
from core.parallel.groups import one_rank
from core.state.inventory import initialise
from core.training.step import train_step
from core.transformer.stage import Stage, build_model

TOKENS, SEQUENCE, VOCAB, HIDDEN, LAYERS = 2048, 512, 8192, 512, 4
PROBE_TOKENS = 256
# A cell stops taking turns after this long: bfloat16 without processor support takes the peer minutes a step.
BUDGET_SECONDS = 60.0
RATE = 1e-4
NORM = RMSNorm(eps=1e-6)
FINE = {"experts": 64, "top_k": 8, "expert_ffn": 192}


Step = Callable[[], float]


def mixtral() -> ModelConfig:
    """Eight experts of width 1024, two a token."""
    router = Router(
        score="softmax_after_top_k", normalise=False, balance=(AuxLoss(scope="microbatch", coefficient=0.001),)
    )
    layer = Layer(
        attention=GQA(heads=8, kv_heads=4, head_dim=64), mlp=MoE(experts=8, top_k=2, expert_ffn=1024, router=router)
    )
    return _model(repeat(LAYERS, layer))


def qwen3() -> ModelConfig:
    """64 experts of width 192, eight a token, with head norms."""
    router = Router(score="softmax", normalise=True, balance=(AuxLoss(scope="microbatch", coefficient=0.001),))
    attention = GQA(heads=8, kv_heads=4, head_dim=64, head_norm=NORM)
    return _model(repeat(LAYERS, Layer(attention=attention, mlp=MoE(**FINE, router=router))))


def deepseek_v3() -> ModelConfig:
    """The same experts in eight groups, a shared one, latent attention, a dense first layer."""
    attention = MLA(
        heads=8, query_rank=192, latent_rank=128, nope_dim=64, rope_dim=32, value_dim=64, latent_norm=RMSNorm(eps=1e-6)
    )
    groups = Groups(total=8, kept=4, best=2)
    router = Router(score="sigmoid", normalise=True, groups=groups, scale=2.5, balance=(ExpertBias(rate=0.001),))
    sparse = Layer(attention=attention, mlp=MoE(**FINE, router=router, shared=SharedExperts(count=1)))
    return _model((Layer(attention=attention, mlp=Dense(ffn=1536)), *repeat(LAYERS - 1, sparse)))


MODELS = {"mixtral": mixtral, "qwen3": qwen3, "deepseek_v3": deepseek_v3}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; seconds are medians of a step."""

    model: str
    dtype: str
    ours: float
    peer: float
    peer_name: str
    rounds: tuple[int, int]
    products: float


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    # As a run does; both sides have it.
    keep_freed_memory()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {cores} cores, {capability}, {TOKENS} tokens a step, vocabulary {VOCAB}")
    print(f"{'model':12} {'dtype':9} {'ours':>11} {'transformers':>12}  {'implementation':14} {'ratio':>6} "
          f"{'products/ours':>13} {'products/theirs':>15}  steps measured")  # fmt: skip
    for dtype in args.dtype or ("float32", "bfloat16"):
        for name in args.model or MODELS:
            show(measure(name, dtype, args.rounds))


def show(row: Row) -> None:
    """One line: tokens per second of both, their ratio, and the share of bare matrix products in the step time of both."""
    ours, theirs = (f"{TOKENS / seconds:,.0f} tok/s" for seconds in (row.ours, row.peer))
    print(f"{row.model:12} {row.dtype:9} {ours:>11} {theirs:>12}  {row.peer_name:14} {row.peer / row.ours:5.2f}x "
          f"{row.products / row.ours:13.0%} {row.products / row.peer:15.0%}  {row.rounds[0]} and {row.rounds[1]}",
          flush=True)  # fmt: skip


def measure(name: str, dtype_name: str, rounds: int) -> Row:
    """Both sides of one model in one dtype, from the same weights, taking turns."""
    dtype = getattr(torch, dtype_name)
    model = build_model(MODELS[name](), dtype=dtype)
    initialise(model, 0)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / name
        save_pretrained(model, folder, family=name)
        kinds = ("eager", "grouped_mm")
        peer_name = min(kinds, key=lambda kind: _seconds(peer_step(folder, dtype, kind, PROBE_TOKENS)))
        peer = peer_step(folder, dtype, peer_name, TOKENS)
    ours = our_step(model)
    losses: list[float] = []
    shapes = record_products(lambda: losses.append(ours()) or 0.0)
    times = take_turns({"ours": ours, "peer": peer}, rounds, losses)
    # Theirs has the auxiliary loss in it, of the order of its coefficient, a thousandth.
    assert abs(losses[0] - losses[1]) < 0.05, f"first losses {losses} are not those of one model"
    return Row(
        model=name,
        dtype=dtype_name,
        ours=statistics.median(times["ours"]),
        peer=statistics.median(times["peer"]),
        peer_name=peer_name,
        rounds=(len(times["ours"]), len(times["peer"])),
        products=bare_seconds(shapes, dtype),
    )


def take_turns(steps: dict[str, Step], rounds: int, losses: list[float]) -> dict[str, list[float]]:
    """Seconds of each step, one after the other in turn, after one of the peer to warm up (which counts if it used the budget).

    The loss of that one is added to `losses`.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    spent = dict.fromkeys(steps, 0.0)
    spent["peer"] = _seconds(lambda: losses.append(steps["peer"]()) or 0.0)
    if spent["peer"] > BUDGET_SECONDS:
        times["peer"].append(spent["peer"])
    for _ in range(rounds):
        for name, step in steps.items():
            if spent[name] < BUDGET_SECONDS:
                times[name].append(_seconds(step))
                spent[name] += times[name][-1]
    return times


def our_step(model: Stage) -> Step:
    """The zoo's own training step, as a run takes it; gives the loss."""
    groups = one_rank()
    optimizer = ChainedOptimizer(model, OptimizerConfig(learning_rate=RATE), groups)
    text = _text(TOKENS)
    cuts = torch.arange(0, TOKENS + 1, SEQUENCE)
    labels = text[1:].clone()
    labels[SEQUENCE - 1 :: SEQUENCE] = IGNORE  # as in the peer, nothing is predicted across sequences
    batch = model.batch(text[:-1], labels, cuts)
    return lambda: train_step(model, optimizer, [batch], rate=RATE, groups=groups).loss


def peer_step(folder: Path, dtype: torch.dtype, experts: str, tokens: int) -> Step:
    """The same step in transformers, on our initial weights; gives the loss."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=experts)
    model.config.output_router_logits = True  # with the auxiliary loss where the model has one, as ours
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text = _text(TOKENS)[:tokens].view(-1, min(SEQUENCE, tokens))

    def step() -> float:
        loss = model(input_ids=text, labels=text, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class _Products(TorchDispatchMode):
    """Notes the shapes of the matrix products that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            self.shapes[a.shape[0], a.shape[1], b.shape[1]] += 1
        return func(*args, **(kwargs or {}))


def record_products(step: Step) -> Counter[tuple[int, int, int]]:
    """How often a step multiplies [m, k] with [k, n]."""
    with _Products() as seen:
        step()
    return seen.shapes


def bare_seconds(shapes: Counter[tuple[int, int, int]], dtype: torch.dtype, *, sets: int = 1) -> float:
    """The time of those products alone, operands ready, median of three; in the dtype in which this machine can do them.

    sets: so many different operands of each shape take turns. One stays in the processor's cache; those of many experts do not.
    """
    work = torch.float32 if matmul_backend(dtype, torch.device("cpu")) == "float32" else dtype

    def operands(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
        m, k, n = shape
        return torch.randn(m, k).to(work), torch.randn(k, n).to(work), torch.empty(m, n, dtype=work)

    held = {shape: [operands(shape) for _ in range(min(sets, count))] for shape, count in shapes.items()}

    def products() -> None:
        for shape, count in shapes.items():
            for i in range(count):
                a, b, out = held[shape][i % len(held[shape])]
                torch.mm(a, b, out=out)

    return statistics.median(_seconds(products) for _ in range(3))


def _model(layers: tuple[Layer, ...]) -> ModelConfig:
    return ModelConfig(
        vocab=VOCAB, hidden=HIDDEN, max_tokens=TOKENS, norm=NORM, rope=Rope(theta=1e4), layers=layers, embedding_std=1.0
    )


def _text(tokens: int) -> Tensor:
    return torch.randint(0, VOCAB, (tokens + 1,), generator=torch.Generator().manual_seed(0))


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
