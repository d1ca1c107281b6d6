"""The adapter to Transformer Engine, with a stand-in of its published signature that multiplies for real."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.config.architecture import SquaredReLU
from core.errors import ConfigError
from core.kernels.grouped_matmul import expert_mlp_loop
from core.kernels.grouped_products import Biases, Form, expert_mlp_grouped, products_of
from core.kernels.transformer_engine import SIGNATURE, load
from tests.core.numbers import draw, gradients, near


def general_grouped_gemm(  # noqa: PLR0913, PLR0917
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[list[Tensor], ...]:
    """The signature of transformer-engine 2.20.2. Its matrices lie by columns: out.T = op(A.T) @ op(B.T), op as the layout says."""
    assert not (gelu or accumulate or use_bias or bias or D_dtype), "not asked for by the adapter"
    assert quantization_params == [None] * len(A) and out_dtype == out[0].dtype
    assert m_splits is not None, "the binding takes a list of numbers, and nothing else"
    outs = list(out)
    if single_output:
        assert len(out) == 1 and len(m_splits) == len(A) == len(B)
        assert sum(m_splits) == len(out[0]) and [len(b) for b in B] == m_splits
        outs = list(out[0].split(m_splits))
    for a, b, y in zip(A, B, outs, strict=True):
        assert a.is_contiguous() and b.is_contiguous() and a.numel() and b.numel() and y.numel(), (
            "TE is spared empty ones"
        )
        left = a if layout[0] == "T" else a.T
        right = b.T if layout[1] == "N" else b
        y.copy_((left.double() @ right.double()).T)
    return out, [], []


def install(monkeypatch: pytest.MonkeyPatch, gemm: Callable[..., Any]) -> None:
    """A package of that name with this function, until the test ends."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions")
    modules = [types.ModuleType(name) for name in names]
    modules[2].general_grouped_gemm = gemm  # type: ignore[attr-defined]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("counts", [(3, 0, 7, 2), (0, 0), (1,), (0, 4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_by_transformer_engine_are_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    install(monkeypatch, general_grouped_gemm)
    experts, rows, hidden, ffn = len(counts), sum(counts), 5, 7
    shapes = (experts, 1, ffn, hidden), (experts, hidden, ffn), (experts, 1, ffn), (experts, 3)
    weight = draw(1, rows).sigmoid().float()
    tensors = [
        draw(0, rows, hidden, dtype=dtype),
        weight,
        *(draw(2 + i, *s, dtype=dtype) for i, s in enumerate(shapes)),
    ]
    products = products_of("transformer_engine")
    form = Form(first=products, second=products, activation=SquaredReLU())

    def engine(*x: Tensor) -> Tensor:
        return expert_mlp_grouped(*x[:4], counts, Biases(gate_up=x[4], down=x[5], first=1), form)

    def loop(*x: Tensor) -> Tensor:
        biases = Biases(gate_up=x[4], down=x[5], first=1)
        return expert_mlp_loop(*x[:4], counts, activation=SquaredReLU(), biases=biases)

    got, truth = gradients(engine, tensors), gradients(loop, [x.double() for x in tensors])
    for a, b in zip(got, truth, strict=True):
        near(a if dtype in (torch.float32, a.dtype) else a.to(dtype), b, units=64 if dtype == torch.float32 else 8)


def test_the_recorded_signature_is_the_stand_ins() -> None:
    parameters = inspect.signature(general_grouped_gemm).parameters.values()
    found = [(p.name, "" if p.default is inspect.Parameter.empty else repr(p.default)) for p in parameters]
    assert tuple(found) == SIGNATURE


def test_a_signature_that_grew_by_defaults_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [*inspect.signature(general_grouped_gemm).parameters.values()]
    more = inspect.Parameter("alpha", inspect.Parameter.KEYWORD_ONLY, default=1.0)

    def newer(*operands: Any, **options: Any) -> Any:
        return general_grouped_gemm(*operands, **options)

    newer.__signature__ = inspect.Signature([*parameters, more])  # type: ignore[attr-defined]
    install(monkeypatch, newer)
    assert load().gemm is newer


def other_order(B: Any, A: Any, out: Any, *rest: Any) -> None:
    """Operands the other way round, as an older or a newer release might have them."""


def other_layout(A: Any, B: Any, out: Any, quantization_params: Any, out_dtype: Any, layout: str = "NN") -> None:
    """Another layout where none is said."""


@pytest.mark.parametrize("gemm", [other_order, other_layout])
def test_another_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, gemm: Callable[..., Any]) -> None:
    install(monkeypatch, gemm)
    with pytest.raises(ConfigError, match=r"general_grouped_gemm\(.*\) is not that of release 2\.20\.2.*pip install"):
        load()


def test_where_it_is_not_installed_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigError, match=r"ZOO_EXPERTS=transformer_engine: cannot be loaded here.*pip install"):
        products_of("transformer_engine")
