"""All kernels on one GPU, at the shapes of DeepSeek-V3, Qwen3-235B and Mixtral: right, and how fast beside torch's own.

Needs torch and Triton alone. Each line checks a kernel against its reference in plain torch on the very operands that are timed, and
gives the milliseconds of both, the bandwidth or rate achieved, and which share that is of this GPU's copy bandwidth (measured by a copy
of a gibibyte) or of the rate of one dense product with as many operations. Bytes count what must be read and written once.
Whole layers stand at the end, beside transformers' where that is installed.

    python -m benchmarks.gpu [--shape deepseek_v3] [--tokens 4096] [--device cuda]

With `--device cpu --tiny` and TRITON_INTERPRET=1 the same checks run slowly in Triton's interpreter; times mean nothing then.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gpu_fused_casts, gpu_products, gpu_quantise
from benchmarks.moe_layer import ours, transformers
from core.config.architecture import AuxLoss, Groups, MoE, Router
from core.config.mapping import ParallelConfig
from core.kernels.permute import RowMap, map_rows
from core.kernels.routing import auxiliary_loss_reference, balance_choices_reference, route_reference
from core.layers.place import Place
from core.moe.layer import MoELayer
from core.parallel.groups import one_rank

Action = Callable[[], Any]
# One rounding to bfloat16, which Triton's interpreter cuts off instead.
_ROUNDED = 2.0**-7
BALANCE = (AuxLoss(scope="microbatch", coefficient=0.001),)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, and over how many GPUs its experts would be spread: this one holds the first part of them."""

    name: str
    hidden: int
    vocab: int
    moe: MoE
    ep: int

    @property
    def held(self) -> int:
        """Experts that this GPU holds."""
        return self.moe.experts // self.ep


SHAPES = (
    Shape(
        name="deepseek_v3",
        hidden=7168,
        vocab=129280,
        ep=8,
        moe=MoE(
            experts=256,
            top_k=8,
            expert_ffn=2048,
            router=Router(score="sigmoid", normalise=True, groups=Groups(total=8, kept=4), scale=2.5, balance=BALANCE),
        ),
    ),
    Shape(
        name="qwen3",
        hidden=4096,
        vocab=151936,
        ep=8,
        moe=MoE(experts=128, top_k=8, expert_ffn=1536, router=Router(score="softmax", normalise=True, balance=BALANCE)),
    ),
    Shape(
        name="mixtral",
        hidden=4096,
        vocab=32000,
        ep=1,
        moe=MoE(
            experts=8,
            top_k=2,
            expert_ffn=14336,
            router=Router(score="softmax_after_top_k", normalise=False, balance=BALANCE),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel, what it is measured against, and the reference that says what is right.

    peer: torch's own way to the same result. bound: largest error allowed, relative to the largest element. moved_bytes or
    operations: what it is rated by; neither for what is too small for either.
    """

    name: str
    ours: Action
    peer: Action
    reference: Action
    bound: float
    moved_bytes: int = 0
    operations: float = 0.0
    dense: Action | None = None


def main() -> None:
    """Check and measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], action="append")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)
    shapes = [shape for shape in SHAPES if given.shape is None or shape.name in given.shape]
    begin = time.perf_counter()
    wrong = run([small(shape) for shape in shapes] if given.tiny else shapes, given.tokens, device)
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    if wrong:
        raise SystemExit("not what the reference says: " + ", ".join(wrong))


def run(shapes: list[Shape], tokens: int, device: torch.device) -> list[str]:
    """Print a table of each shape; the names of what was wrong."""
    copy = copy_bandwidth(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    print(f"{name}, torch {torch.__version__}: a copy moves {copy / 1e9:,.0f} GB/s")
    if device.type == "cuda":
        print(*gpu_quantise.lines(*gpu_quantise.MATRIX, seconds, copy, device), sep="\n", flush=True)
    wrong = []
    for shape in shapes:
        print(f"\n{shape.name}: {tokens} tokens of {shape.hidden}, {shape.held} of {shape.moe.experts} experts here")
        print("kernel\tms\ttorch ms\tratio\tachieved\tshare\terror")
        for case in cases(shape, tokens, device):
            error = difference(case.ours(), case.reference())
            if not error <= case.bound:
                wrong.append(f"{shape.name}/{case.name} ({error:.2g} > {case.bound:.2g})")
            print(line(case, error, copy), flush=True)
        if device.type == "cuda":
            print(layer_line(shape, tokens, device), flush=True)
        print(*gpu_products.lines(*product_sizes(shape, tokens, device), seconds), sep="\n", flush=True)
        hidden, _, counts_E = product_sizes(shape, tokens, device)
        print(*gpu_quantise.grouped_lines(hidden, counts_E, seconds, copy), sep="\n", flush=True)
        print(*gpu_fused_casts.lines(*product_sizes(shape, tokens, device), seconds, copy), sep="\n", flush=True)
    return wrong


def line(case: Case, error: float, copy: float) -> str:
    """One line of the table."""
    mine, theirs = seconds(case.ours), seconds(case.peer)
    cells = [case.name, f"{mine * 1e3:.3f}", f"{theirs * 1e3:.3f}", f"{theirs / mine:.2f}x"]
    if case.moved_bytes:
        rate = case.moved_bytes / mine
        cells += [f"{rate / 1e9:,.0f} GB/s", f"{rate / copy:.0%} of a copy"]
    elif case.dense is not None:
        cells += [f"{case.operations / mine / 1e12:,.0f} TFLOP/s", f"{seconds(case.dense) / mine:.0%} of dense"]
    else:
        cells += ["", ""]
    return "\t".join([*cells, f"{error:.1e}"])


def cases(shape: Shape, tokens: int, device: torch.device) -> Iterator[Case]:
    """Every kernel at a shape."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

    logits = normal(tokens, shape.moe.experts, dtype=torch.float32)
    yield from _routing(shape, logits)
    # As many rows as a balanced rank gets: the choices of its own tokens, over the experts that it holds.
    ids = torch.rand(tokens, shape.held, generator=generator, device=device).argsort(dim=1)
    chosen = ids[:, : min(shape.moe.top_k, shape.held)].contiguous()
    yield from _moving(shape, chosen, normal(tokens, shape.hidden))
    rows = map_rows(chosen, shape.held)
    yield from _swiglu(normal(rows.rows, 2 * shape.moe.expert_ffn), normal(rows.rows, dtype=torch.float32).abs())
    yield from _products(shape, rows, normal)
    chunk = min(tokens, max(1, (512 << 20) // (4 * shape.vocab)))
    yield from _cross_entropy(normal(chunk, shape.vocab, dtype=torch.float32))


def _routing(shape: Shape, logits: Tensor) -> Iterator[Case]:
    from core.kernels.triton.routing import auxiliary_forward, balance_forward, route_forward

    moe, tokens = shape.moe, len(logits)
    read = logits.nbytes

    def reference() -> tuple[Tensor, Tensor]:
        return route_reference(logits, moe.router, moe.top_k)

    yield Case(
        name="scores, top-k, weights",
        ours=lambda: route_forward(logits, moe.router, moe.top_k, None, None)[:2],
        peer=reference,
        reference=reference,
        bound=1e-5,
        moved_bytes=read + tokens * moe.top_k * 12,
    )

    def balance() -> tuple[Tensor, Tensor]:
        return balance_choices_reference(logits, moe.router.score, moe.top_k, None)

    yield Case(
        name="scores of the balance",
        ours=lambda: balance_forward(logits, moe.router.score, moe.top_k, None)[:2],
        peer=balance,
        reference=balance,
        bound=1e-5,
        moved_bytes=3 * read,
    )
    scores, picked = balance()
    counts, factor = picked.sum(0, keepdim=True), logits.new_full((1,), 1.0 / tokens)
    yield Case(
        name="auxiliary loss",
        ours=lambda: auxiliary_forward(scores, counts, factor, None),
        peer=lambda: auxiliary_loss_reference(scores, counts, factor),
        reference=lambda: auxiliary_loss_reference(scores.double(), counts.double(), factor.double()),
        bound=1e-5,
        moved_bytes=read,
    )


def _moving(shape: Shape, chosen: Tensor, hidden: Tensor) -> Iterator[Case]:
    from core.kernels.triton.permute import place_rows, scatter_tokens, sum_of_rows

    flat, experts = chosen.flatten(), shape.held
    rows = map_rows(chosen, experts)

    def sorted_rows() -> tuple[Tensor, Tensor, Tensor]:
        order = torch.argsort(flat, stable=True)
        row = torch.empty_like(order)
        row[order] = torch.arange(order.numel(), device=order.device)
        return (
            order,
            row,
            torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat)),
        )

    yield Case(
        name="row map",
        ours=lambda: place_rows(flat, experts, multiple=1, rows_per_expert=None),
        peer=sorted_rows,
        reference=sorted_rows,
        bound=0.0,
        moved_bytes=3 * flat.nbytes,
    )
    moved = hidden.nbytes + rows.rows * hidden[:1].nbytes
    token_R = rows.token_R
    yield Case(
        name="permute",
        ours=lambda: scatter_tokens(hidden, rows.row_TK, None, rows.rows)[0],
        peer=lambda: hidden.index_select(0, token_R),
        reference=lambda: hidden.index_select(0, token_R),
        bound=0.0,
        moved_bytes=moved,
    )
    arrived = hidden.index_select(0, token_R)
    yield Case(
        name="unpermute",
        ours=lambda: sum_of_rows(arrived, rows.row_TK)[0],
        peer=lambda: torch.zeros_like(hidden).index_add_(0, token_R, arrived),
        reference=lambda: _sums(arrived, rows, len(hidden)),
        bound=_ROUNDED,
        moved_bytes=moved,
    )


def _sums(rows_RH: Tensor, rows: RowMap, tokens: int) -> Tensor:
    """The sum of each token's rows in float32."""
    zeros = torch.zeros(tokens, rows_RH.shape[1], dtype=torch.float32, device=rows_RH.device)
    return zeros.index_add_(0, rows.token_R, rows_RH.float())


def _swiglu(product: Tensor, weight: Tensor) -> Iterator[Case]:
    from core.kernels.triton.swiglu import backward, forward

    gate, up = product.chunk(2, dim=1)
    grad = gate.contiguous()

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up * weight[:, None].to(gate.dtype)

    yield Case(
        name="SwiGLU x weight",
        ours=lambda: forward(gate, up, weight),
        peer=lambda: plain(gate, up),
        reference=lambda: plain(gate.float(), up.float()),
        bound=_ROUNDED,
        moved_bytes=product.nbytes + grad.nbytes,
    )

    def ours() -> tuple[Tensor, ...]:
        out, act = torch.empty_like(product), torch.empty_like(grad)
        of_gate, of_up = out.chunk(2, dim=1)
        of_weight = backward(grad, gate, up, weight, out_gate=of_gate, out_up=of_up, out_act=act)
        assert of_weight is not None
        return out, of_weight, act

    def by_autograd(wide: bool) -> tuple[Tensor, ...]:
        x = (product.float() if wide else product).detach().requires_grad_()
        w = weight.detach().requires_grad_()
        out = F.silu(x.chunk(2, dim=1)[0]) * x.chunk(2, dim=1)[1] * w[:, None].to(x.dtype)
        of_x, of_w = torch.autograd.grad(out, (x, w), grad.to(out.dtype))
        return of_x, of_w, out.detach()

    yield Case(
        name="SwiGLU x weight backward",
        ours=ours,
        peer=lambda: by_autograd(wide=False),
        reference=lambda: by_autograd(wide=True),
        bound=2 * _ROUNDED,
        moved_bytes=2 * product.nbytes + 2 * grad.nbytes,
    )


def _products(shape: Shape, rows: RowMap, normal: Callable[..., Tensor]) -> Iterator[Case]:
    from core.kernels.triton.grouped_matmul import product, weight_gradient

    ends = rows.counts_E.cumsum(0).to(torch.int32)
    width, depth = 2 * shape.moe.expert_ffn, shape.hidden
    x, weight = normal(rows.rows, depth), normal(shape.held, width, depth) * depth**-0.5
    grad = normal(rows.rows, width)
    operations = 2.0 * rows.rows * width * depth
    turned = weight.transpose(1, 2)

    def loop(a: Tensor, matrices: Tensor) -> Tensor:
        pieces = a.split(rows.counts_E.tolist())
        return torch.cat([(piece.float() @ matrix.float()) for piece, matrix in zip(pieces, matrices, strict=True)])

    def gradients() -> Tensor:
        counts = rows.counts_E.tolist()
        pieces = zip(grad.split(counts), x.split(counts), strict=True)
        return torch.stack([g.float().T @ piece.float() for g, piece in pieces])

    def grouped(a: Tensor, b: Tensor) -> Action:
        # torch's product wants rows of whole 16 bytes, and a GPU or none of the interpreter's odd sizes.
        return lambda: F.grouped_mm(a, b, offs=ends)

    for name, ours_, peer, reference, dense in (
        ("grouped product", lambda: product(x, turned, ends), grouped(x, turned), lambda: loop(x, turned), lambda: x @ weight[0].T),
        ("... input gradient", lambda: product(grad, weight, ends), grouped(grad, weight), lambda: loop(grad, weight), lambda: grad @ weight[0]),
        ("... weight gradient", lambda: weight_gradient(grad, x, ends), grouped(grad.T, x), gradients, lambda: grad.T @ x),
    ):  # fmt: skip
        yield Case(
            name=name,
            ours=ours_,
            peer=peer,
            reference=reference,
            bound=2 * _ROUNDED,
            operations=operations,
            dense=dense,
        )


def _cross_entropy(logits: Tensor) -> Iterator[Case]:
    from core.kernels.triton.cross_entropy import loss_and_gradient_

    rows, vocab = logits.shape
    labels = torch.arange(rows, device=logits.device) % vocab
    valid = torch.ones(rows, dtype=torch.bool, device=logits.device)
    work = logits.clone()

    def ours() -> Tensor:
        work.copy_(logits)
        return loss_and_gradient_(work, labels, valid, gradient=True)

    def by_autograd() -> Tensor:
        x = logits.detach().requires_grad_()
        loss = F.cross_entropy(x, labels, reduction="none")
        torch.autograd.grad(loss.sum(), x)
        return loss.detach()

    yield Case(
        name="cross-entropy with gradient",
        ours=ours,
        peer=by_autograd,
        reference=lambda: F.cross_entropy(logits.double(), labels, reduction="none"),
        bound=1e-5,
        # The copy in front, and the logits read and their gradient written.
        moved_bytes=4 * logits.nbytes,
    )


def product_sizes(shape: Shape, tokens: int, device: torch.device) -> tuple[int, int, Tensor]:
    """Of an expert's first product: what is summed over, its width, and a balanced rank's rows of experts, whole blocks of every recipe's."""
    moe = shape.moe
    each = max(1, tokens * min(moe.top_k, shape.held) // shape.held // 128) * 128
    return shape.hidden, 2 * moe.expert_ffn, torch.full((shape.held,), each, device=device)


def layer_line(shape: Shape, tokens: int, device: torch.device) -> str:
    """Forward and backward of a whole layer with the experts of one GPU, beside transformers' with torch's grouped product."""
    moe = replace(shape.moe, experts=shape.held)
    if moe.router.groups is not None:
        moe = replace(moe, router=replace(moe.router, groups=Groups(total=4, kept=2)))
    place = Place(groups=one_rank(), parallel=ParallelConfig(), dtype=torch.bfloat16, device=device)
    layer = MoELayer(moe, shape.hidden, 0.02, place)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    x = torch.randn(tokens, shape.hidden, device=device).to(torch.bfloat16).requires_grad_()
    arrives = torch.randn_like(x)
    mine = seconds(lambda: ours(layer, tokens).step(x, arrives))
    if find_spec("transformers") is None:
        return f"whole layer\t{mine * 1e3:.3f}\ttransformers is not installed"
    peer = transformers(shape.name, layer, "grouped_mm", moe, shape.hidden)
    theirs = seconds(lambda: peer.step(x, arrives))
    return f"whole layer\t{mine * 1e3:.3f}\t{theirs * 1e3:.3f}\t{theirs / mine:.2f}x"


def difference(found: Any, truth: Any) -> float:
    """The largest error of any of some tensors, each by its truth's largest element."""
    if isinstance(found, Tensor):
        found, truth = (found,), (truth,)
    errors = []
    for mine, right in zip(found, truth, strict=True):
        size = max(float(right.double().abs().max()), 1e-30)
        errors.append(float((mine.double() - right.double()).abs().max()) / size)
    return max(errors)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty((1 << 30) if device.type == "cuda" else (1 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def seconds(action: Action) -> float:
    """Median seconds of an action: on a GPU with its cache flushed in between, as Triton measures."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return float(do_bench(action, warmup=10, rep=50, return_mode="median")) / 1e3
    times = []
    for _ in range(2):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def small(shape: Shape) -> Shape:
    """A shape for the interpreter."""
    groups = shape.moe.router.groups and Groups(total=4, kept=2)
    router = replace(shape.moe.router, groups=groups)
    moe = replace(shape.moe, experts=8, top_k=min(shape.moe.top_k, 3), expert_ffn=16, router=router)
    return replace(shape, hidden=24, vocab=67, ep=min(shape.ep, 2), moe=moe)


if __name__ == "__main__":
    main()
