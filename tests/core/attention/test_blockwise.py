"""Attention of a block and its gradient: every kernel against the definition, and blocks against the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from core.attention import blockwise
from core.attention.blockwise import block_attention, block_backend, block_gradients
from tests.core.numbers import BACKENDS, draw, near, use_backend

SCALE = 0.37
# Sequences, queries, keys, heads, key/value heads, head size, value size.
SIZES = [(1, 1, 1, 1, 1, 1, 1), (2, 3, 7, 4, 2, 5, 3), (3, 5, 2, 3, 1, 3, 7), (1, 600, 40, 2, 2, 4, 4)]
Sizes = tuple[int, ...]


def operands(sizes: Sizes, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the result."""
    count, queries, keys, heads, shared, size, value = sizes
    shapes = ((queries, heads, size), (keys, shared, size), (keys, shared, value), (queries, heads, value))
    q, k, v, grad = (draw(i, count, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k, v, grad


def square(sizes: Sizes) -> Sizes:
    """With as many keys as queries, for a causal mask."""
    return (*sizes[:2], sizes[1], *sizes[3:])


def numpy_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """The result and the lse, head by head."""
    share = q.shape[2] // k.shape[2]
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.zeros(q.shape[:3])
    for b, a in np.ndindex(q.shape[0], q.shape[2]):
        logits = SCALE * q[b, :, a].double().numpy() @ k[b, :, a // share].double().numpy().T
        if causal:
            logits[np.triu_indices_from(logits, 1)] = -np.inf
        weights = np.exp(logits)
        lse[b, :, a] = np.log(weights.sum(-1))
        out[b, :, a] = weights / weights.sum(-1, keepdims=True) @ v[b, :, a // share].double().numpy()
    return out, lse


@pytest.fixture(params=["plain", "cpu_flash"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kernel that runs on a processor."""
    monkeypatch.setattr(blockwise, "block_backend", lambda dtype, device: request.param)
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_block_is_softmax_attention_with_the_log_of_the_sum_of_its_exponentials(
    kernel: str, sizes: Sizes, causal: bool
) -> None:
    q, k, v, _ = operands(square(sizes) if causal else sizes)
    for got, exact in zip(
        block_attention(q, k, v, SCALE, causal=causal), numpy_attention(q, k, v, causal), strict=True
    ):
        near(got, torch.from_numpy(exact), units=32, least=1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES[:-1])
def test_gradients_of_a_single_block_equal_those_by_differences(kernel: str, sizes: Sizes, causal: bool) -> None:
    *qkv, grad = operands(square(sizes) if causal else sizes)
    found = block_gradients(grad, tuple(qkv), *block_attention(*qkv, SCALE, causal=causal), SCALE, causal=causal)
    for at, ours in enumerate(found):
        assert ours.shape == qkv[at].shape
        direction = draw(7, *qkv[at].shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [x + step * direction if i == at else x for i, x in enumerate(qkv)]
            ends.append(float((block_attention(*moved, SCALE, causal=causal)[0] * grad).sum()))
        assert float((ours * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_shares_of_blocks_are_the_gradients_of_the_whole(kernel: str, sizes: Sizes) -> None:
    q, k, v, grad = operands(sizes)
    out, lse = block_attention(q, k, v, SCALE, causal=False)
    whole = block_gradients(grad, (q, k, v), out, lse, SCALE, causal=False)
    shares = [
        block_gradients(grad, (q, k[:, part], v[:, part]), out, lse, SCALE, causal=False)
        for part in (slice(1), slice(1, None))
    ]
    near(shares[0][0] + shares[1][0], whole[0], units=32, least=1.0)
    for first, second, together in zip(shares[0][1:], shares[1][1:], whole[1:], strict=True):
        near(torch.cat([first, second], 1), together, units=32, least=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_narrow_formats_stay_within_their_own_rounding_and_come_out_wide(
    kernel: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, backend: str, causal: bool
) -> None:
    use_backend(monkeypatch, backend)
    q, k, v, grad = operands(square(SIZES[1]) if causal else SIZES[1], dtype)
    out, lse = block_attention(q, k, v, SCALE, causal=causal)
    found = [out, *block_gradients(grad, (q, k, v), out.to(dtype), lse, SCALE, causal=causal)]
    monkeypatch.setattr(blockwise, "block_backend", lambda dtype, device: "plain")
    exact_out, exact_lse = block_attention(q.double(), k.double(), v.double(), SCALE, causal=causal)
    exact = (q.double(), k.double(), v.double())
    truth = [exact_out, *block_gradients(grad.double(), exact, exact_out, exact_lse, SCALE, causal=causal)]
    near(lse, exact_lse, units=32, least=1.0)
    for ours, expected in zip(found, truth, strict=True):
        assert ours.dtype == torch.float32
        near(ours.to(dtype), expected, units=4 if dtype == torch.bfloat16 else 32)


def test_every_device_has_the_kernel_that_knows_its_dtype() -> None:
    cpu, cuda, meta = (torch.device(name) for name in ("cpu", "cuda", "meta"))
    assert {block_backend(dtype, cpu) for dtype in (torch.float64, torch.float32, torch.bfloat16)} == {"cpu_flash"}
    assert block_backend(torch.bfloat16, cuda) == block_backend(torch.float16, cuda) == "cuda_flash"
    assert block_backend(torch.float32, cuda) == "plain"
    assert {block_backend(dtype, meta) for dtype in (torch.float32, torch.bfloat16)} == {"cuda_flash"}, "for plans"


@pytest.mark.parametrize("name", ["plain", "cuda_flash"])
def test_shapes_on_the_meta_device_are_those_of_the_operands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All that can be seen of the GPU's kernel without one: that it is called as torch declares it."""
    monkeypatch.setattr(blockwise, "block_backend", lambda dtype, device: name)
    for sizes in SIZES:
        q, k, v, grad = (x.to("meta") for x in operands(sizes, torch.bfloat16))
        out, lse = block_attention(q, k, v, SCALE, causal=False)
        assert (out.shape, lse.shape) == (grad.shape, grad.shape[:3])
        assert out.dtype == lse.dtype == torch.float32
        found = block_gradients(grad, (q, k, v), out, lse, SCALE, causal=False)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
