"""Cross-entropy over rows of logits, as `core/kernels/cross_entropy.py` needs it: a program goes over one row of a stretch of the
vocabulary, sums in float32.

Labels count within the stretch: a label outside [0, V) lies on another rank, or counts nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a program takes at a time.
_BLOCK = 4096


def loss_and_gradient_(logits_CV: Tensor, label_C: Tensor, valid_C: Tensor, *, gradient: bool) -> Tensor:
    """-log softmax(logits)[label] of every row, float32 [C], zero where not valid.

    With `gradient`, softmax(logits) less one at the label, zero where not valid, is left in place of the logits: each row is read
    twice, the second time from the cache, and written once. label_C: int64 column.
    """
    loss, _, _ = _over_rows(logits_CV, label_C, valid_C, gradient=gradient)
    return loss


def row_sums(logits_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit of every row (-inf without columns), the sum of exp(logit - largest), the logit at the label or 0.

    float32 [C] each; label_C: int64 column, -1 where it is not among mine.
    """
    loss, largest, total = _over_rows(logits_CV, label_C, None, gradient=False)
    return largest, total, loss


def gradient_(logits_CV: Tensor, label_C: Tensor, valid_C: Tensor, largest_C: Tensor, total_C: Tensor) -> None:
    """softmax less one at the label in place of the logits, zero where not valid, given the whole rows' largest and total."""
    rows, columns = logits_CV.shape
    if rows and columns:
        _gradient[(rows,)](
            logits_CV, label_C, valid_C.view(torch.uint8), largest_C, total_C, columns, logits_CV.stride(0),
            BLOCK=_block(columns), num_warps=8,
        )  # fmt: skip


def _over_rows(logits: Tensor, label: Tensor, valid: Tensor | None, *, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of every row (the label's logit where `valid` is None), its largest logit and its sum."""
    rows, columns = logits.shape
    largest, total, loss = torch.empty(3, rows, dtype=torch.float32, device=logits.device).unbind(0)
    if rows:
        _row[(rows,)](
            logits, label, label if valid is None else valid.view(torch.uint8), largest, total, loss,
            columns, logits.stride(0), LOSS=valid is not None, GRADIENT=gradient, BLOCK=_block(columns), num_warps=8,
        )  # fmt: skip
    return loss, largest, total


def _block(columns: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(max(1, columns)))


@triton.jit
def _row(
    logits_ptr, label_ptr, valid_ptr, largest_ptr, total_ptr, loss_ptr, columns, stride,
    LOSS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    # Each lane has its own largest and sum, so that a block needs no exchange; lanes are joined at the end.
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        known = first + column < columns
        logits = tl.load(start + first + column, mask=known, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, logits)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - shift) + tl.exp(logits - shift)
        largest = higher
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    sum_ = tl.sum(total * tl.exp(largest - shift), axis=0)
    label = tl.load(label_ptr + row)
    at_label = tl.load(start + label, mask=(label >= 0) & (label < columns), other=0.0).to(tl.float32)
    tl.store(largest_ptr + row, top)
    tl.store(total_ptr + row, sum_)
    if LOSS:
        valid = tl.load(valid_ptr + row) != 0
        tl.store(loss_ptr + row, tl.where(valid, tl.log(sum_) + (top - at_label), 0.0))
        if GRADIENT:
            # The label's logit above is read before any lane writes.
            tl.debug_barrier()
            _softmax_less_label(start, columns, label, valid, top, sum_, BLOCK)
    else:
        tl.store(loss_ptr + row, at_label)


@triton.jit
def _gradient(
    logits_ptr, label_ptr, valid_ptr, largest_ptr, total_ptr, columns, stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    _softmax_less_label(
        logits_ptr + row.to(tl.int64) * stride, columns, tl.load(label_ptr + row), tl.load(valid_ptr + row) != 0,
        tl.load(largest_ptr + row), tl.load(total_ptr + row), BLOCK,
    )  # fmt: skip


@triton.jit
def _softmax_less_label(start, columns, label, valid, largest, total, BLOCK: tl.constexpr):
    """Written over the logits of one row."""
    column = tl.arange(0, BLOCK)
    scale = tl.where(valid, 1.0 / total, 0.0)
    one = tl.where(valid, 1.0, 0.0)
    for first in range(0, columns, BLOCK):
        known = first + column < columns
        logits = tl.load(start + first + column, mask=known, other=float("-inf")).to(tl.float32)
        probability = tl.exp(logits - largest) * scale
        probability = tl.where(first + column == label, probability - one, probability)
        tl.store(start + first + column, probability.to(start.dtype.element_ty), mask=known)
