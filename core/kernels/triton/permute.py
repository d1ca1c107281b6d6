"""Triton kernels of core/kernels/permute.py: row map without a sort, rows to experts, their sums (report section 4.3.3).

Both directions go token by token: a token is read once and written to all its rows, or all its rows are read and it is
written once. So nothing is read twice, nothing is added up by atomics, and every run gives the same bits.
Shape letters: T tokens, K choices per token, R routed rows, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.kernels.triton.tiles import sum_dtype, tile

# Choices that one program ranks against each other, all pairs of them.
CHOICES_PER_PROGRAM = 128


def place_rows(
    flat_N: Tensor, experts: int, *, multiple: int, rows_per_expert: int | None, block: int = CHOICES_PER_PROGRAM
) -> tuple[Tensor, Tensor, Tensor]:
    """order_R, row_N and counts_E of `core.kernels.permute.RowMap`, all int64, of the choices flat_N int64 (-1: not routed).

    Counts per expert and block, their running sums, and each choice's place among its equals: linear in N, and stable.
    The host waits for the number of rows, once all is launched, unless rows_per_expert tells it.
    """
    choices, device = flat_N.numel(), flat_N.device
    blocks = triton.cdiv(choices, block)
    before_EB = torch.zeros(experts, blocks, dtype=torch.int32, device=device)
    rank_N = torch.empty(choices, dtype=torch.int32, device=device)
    routed_E = torch.empty(experts, dtype=torch.int32, device=device)
    counts_E, starts = (torch.empty(n, dtype=torch.int64, device=device) for n in (experts, experts + 1))
    row_N = torch.empty_like(flat_N)
    padded = multiple > 1 or rows_per_expert is not None
    room = choices + experts * (multiple - 1) if rows_per_expert is None else experts * rows_per_expert
    order = torch.full((room,), -1, dtype=torch.int64, device=device) if padded else torch.empty_like(flat_N)
    _rank[(blocks,)](flat_N, rank_N, before_EB, choices, blocks, BLOCK=block, num_warps=8)
    _scan[(experts,)](before_EB, routed_E, blocks, BLOCK=8 * block)
    _starts[(1,)](
        routed_E, counts_E, starts, experts, multiple, rows_per_expert or 0,
        FIXED=rows_per_expert is not None, BLOCK=triton.next_power_of_2(experts),
    )  # fmt: skip
    _place[(blocks,)](
        flat_N, rank_N, before_EB, counts_E, starts, row_N, order, choices, blocks, experts, BLOCK=block
    )  # fmt: skip
    total = int(starts[experts]) if rows_per_expert is None else room
    return order[:total], row_N, counts_E


def scatter_tokens(
    x_TH: Tensor, row_TK: Tensor, order_R: Tensor | None, rows: int, weights_TK: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Every token at each of its rows: [rows, H]; and, where weights_TK is given, the weight of every row [rows].

    order_R: given where rows may be of zeros, those where it is negative. Every other row is some choice's in row_TK.
    """
    (tokens, width), choices = x_TH.shape, row_TK.shape[1]
    if not (tokens and rows and choices):
        return x_TH.new_zeros(rows, width), None if weights_TK is None else weights_TK.new_zeros(rows)
    out = x_TH.new_empty(rows, width)
    out_weights = None if weights_TK is None else weights_TK.new_empty(rows)
    high, wide = tile(width)
    token_programs = triton.cdiv(tokens, high)
    programs = token_programs + (0 if order_R is None else triton.cdiv(rows, high))
    _scatter[(programs, max(1, triton.cdiv(width, wide)))](
        x_TH.contiguous(), row_TK.contiguous(), order_R, None if weights_TK is None else weights_TK.contiguous(),
        out, out_weights, tokens, width, rows, token_programs,
        K=choices, PADDED=order_R is not None, WEIGHTED=weights_TK is not None, HIGH=high, WIDE=wide,
    )  # fmt: skip
    return out, out_weights


def sum_of_rows(
    rows_RH: Tensor, row_TK: Tensor, *, weights_TK: Tensor | None = None, of_rows_R: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """sum over k of rows[row_TK[:, k]], an index of R adding nothing: [T, H], summed in float32 (float64 for float64).

    weights_TK: what each row is multiplied by first. of_rows_R: a number per row, brought to its choice: [T, K], 0 without
    a row.
    """
    (rows, width), (tokens, choices) = rows_RH.shape, row_TK.shape
    if not (tokens and rows and choices):
        return rows_RH.new_zeros(tokens, width), None if of_rows_R is None else of_rows_R.new_zeros(tokens, choices)
    out = rows_RH.new_empty(tokens, width)
    of_choices = None if of_rows_R is None else of_rows_R.new_empty(tokens, choices)
    high, wide = tile(width)
    _sum[(triton.cdiv(tokens, high), max(1, triton.cdiv(width, wide)))](
        rows_RH.contiguous(), row_TK.contiguous(), None if weights_TK is None else weights_TK.contiguous(),
        None if of_rows_R is None else of_rows_R.contiguous(), out, of_choices, tokens, width, rows,
        K=choices, WEIGHTED=weights_TK is not None, BRING=of_rows_R is not None, SUM=sum_dtype(rows_RH.dtype),
        HIGH=high, WIDE=wide,
    )  # fmt: skip
    return out, of_choices


def weighted_sum_backward(
    grad_TH: Tensor, rows_RH: Tensor, row_TK: Tensor, weights_TK: Tensor, order_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_of_rows` with weights: of the rows [R, H], and of the weights [T, K], summed in float32.

    order_R: as for `scatter_tokens`; rows of zeros get gradient zero.
    """
    (rows, width), (tokens, choices) = rows_RH.shape, row_TK.shape
    if not (tokens and rows and choices):
        return torch.zeros_like(rows_RH), torch.zeros_like(weights_TK)
    of_rows, of_weights = (
        torch.empty_like(rows_RH, memory_format=torch.contiguous_format),
        weights_TK.new_empty(tokens, choices),
    )
    high, wide = tile(width)
    token_programs = triton.cdiv(tokens, high)
    programs = token_programs + (0 if order_R is None else triton.cdiv(rows, high))
    _weighted_backward[(programs,)](
        grad_TH.contiguous(), rows_RH.contiguous(), row_TK.contiguous(), order_R, weights_TK.contiguous(),
        of_rows, of_weights, tokens, width, rows, token_programs,
        K=choices, PADDED=order_R is not None, SUM=sum_dtype(rows_RH.dtype), HIGH=high, WIDE=wide,
    )  # fmt: skip
    return of_rows, of_weights


@triton.jit
def _rank(experts_ptr, rank_ptr, before_ptr, choices, blocks, BLOCK: tl.constexpr):
    """Each choice's place among its equals of one block, and how many equals the block has, said by the last of them."""
    block = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    here = block * BLOCK + n
    mine = tl.load(experts_ptr + here, mask=here < choices, other=-1)
    same = mine[:, None] == mine[None, :]
    rank = tl.sum((same & (n[None, :] < n[:, None])).to(tl.int32), axis=1)
    after = tl.sum((same & (n[None, :] > n[:, None])).to(tl.int32), axis=1)
    tl.store(rank_ptr + here, rank, mask=here < choices)
    tl.store(before_ptr + mine * blocks + block, rank + 1, mask=(mine >= 0) & (after == 0))


@triton.jit
def _scan(before_ptr, routed_ptr, blocks, BLOCK: tl.constexpr):
    """One expert's counts per block become the numbers of its choices before each block; and their total."""
    expert = tl.program_id(0).to(tl.int64)
    total = tl.zeros([], tl.int32)
    for first in range(0, blocks, BLOCK):
        b = first + tl.arange(0, BLOCK)
        counts = tl.load(before_ptr + expert * blocks + b, mask=b < blocks, other=0)
        tl.store(before_ptr + expert * blocks + b, total + tl.cumsum(counts, 0) - counts, mask=b < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(routed_ptr + expert, total)


@triton.jit
def _starts(
    routed_ptr, counts_ptr, starts_ptr, experts, multiple, rows_per_expert, FIXED: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows per expert, those of zeros included, the first row of each, and behind the last the number of all."""
    e = tl.arange(0, BLOCK)
    counts = tl.load(routed_ptr + e, mask=e < experts, other=0).to(tl.int64)
    if FIXED:
        counts = tl.where(e < experts, rows_per_expert, 0).to(tl.int64)
    else:
        counts = (counts + multiple - 1) // multiple * multiple
    tl.store(counts_ptr + e, counts, mask=e < experts)
    tl.store(starts_ptr + e, tl.cumsum(counts, 0) - counts, mask=e < experts)
    tl.store(starts_ptr + experts, tl.sum(counts, axis=0))


@triton.jit
def _place(
    experts_ptr,
    rank_ptr,
    before_ptr,
    counts_ptr,
    starts_ptr,
    row_ptr,
    order_ptr,
    choices,
    blocks,
    experts,
    BLOCK: tl.constexpr,
):
    """The row of each choice, or the row that does not exist; and the choice of that row."""
    block = tl.program_id(0)
    here = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + here, mask=here < choices, other=-1)
    routed = expert >= 0
    place = tl.load(before_ptr + expert * blocks + block, mask=routed, other=0) + tl.load(
        rank_ptr + here, mask=routed, other=0
    )
    fits = routed & (place < tl.load(counts_ptr + expert, mask=routed, other=0))
    row = tl.load(starts_ptr + expert, mask=fits, other=0) + place
    tl.store(row_ptr + here, tl.where(fits, row, tl.load(starts_ptr + experts)), mask=here < choices)
    tl.store(order_ptr + row, here.to(tl.int64), mask=fits)


@triton.jit
def _clear(order_ptr, out_ptr, r, h, width, rows):
    """Zeros in the rows of zeros among r; also says which those are."""
    empty = (r < rows) & (tl.load(order_ptr + r, mask=r < rows, other=0) < 0)
    zeros = tl.zeros([r.shape[0], h.shape[0]], out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * width + h[None, :], zeros, mask=empty[:, None] & (h < width)[None, :])
    return empty


@triton.jit
def _scatter(
    x_ptr, row_ptr, order_ptr, weight_ptr, out_ptr, out_weight_ptr, tokens, width, rows, token_programs,
    K: tl.constexpr, PADDED: tl.constexpr, WEIGHTED: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of tokens to all its rows. Programs behind those of the tokens clear the rows of zeros."""
    program = tl.program_id(0)
    h = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    if program < token_programs:
        t = program.to(tl.int64) * HIGH + tl.arange(0, HIGH)
        inside = (t < tokens)[:, None] & (h < width)[None, :]
        x = tl.load(x_ptr + t[:, None] * width + h[None, :], mask=inside)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + t * K + k, mask=t < tokens, other=rows)
            here = row < rows
            tl.store(out_ptr + row[:, None] * width + h[None, :], x, mask=inside & here[:, None])
            if WEIGHTED:
                if tl.program_id(1) == 0:
                    tl.store(out_weight_ptr + row, tl.load(weight_ptr + t * K + k, mask=here), mask=here)
    elif PADDED:
        r = (program - token_programs).to(tl.int64) * HIGH + tl.arange(0, HIGH)
        empty = _clear(order_ptr, out_ptr, r, h, width, rows)
        if WEIGHTED:
            if tl.program_id(1) == 0:
                tl.store(out_weight_ptr + r, tl.zeros([HIGH], out_weight_ptr.dtype.element_ty), mask=empty)


@triton.jit
def _sum(
    rows_ptr, row_ptr, weight_ptr, of_row_ptr, out_ptr, of_choice_ptr, tokens, width, rows,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BRING: tl.constexpr, SUM: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of tokens from all its rows, in order of choice."""
    t = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    h = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (t < tokens)[:, None] & (h < width)[None, :]
    total = tl.zeros([HIGH, WIDE], SUM)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + t * K + k, mask=t < tokens, other=rows)
        here = row < rows
        x = tl.load(rows_ptr + row[:, None] * width + h[None, :], mask=inside & here[:, None], other=0).to(SUM)
        if WEIGHTED:
            x = x * tl.load(weight_ptr + t * K + k, mask=here, other=0).to(SUM)[:, None]
        total += x
        if BRING:
            if tl.program_id(1) == 0:
                number = tl.load(of_row_ptr + row, mask=here, other=0)
                tl.store(of_choice_ptr + t * K + k, number, mask=t < tokens)
    tl.store(out_ptr + t[:, None] * width + h[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_backward(
    grad_ptr, rows_ptr, row_ptr, order_ptr, weight_ptr, of_rows_ptr, of_weight_ptr, tokens, width, rows, token_programs,
    K: tl.constexpr, PADDED: tl.constexpr, SUM: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of tokens' gradients, times the weights, to all its rows; and their products with the rows, summed over H."""
    program = tl.program_id(0)
    if program < token_programs:
        t = program.to(tl.int64) * HIGH + tl.arange(0, HIGH)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + t * K + k, mask=t < tokens, other=rows)
            here = row < rows
            weight = tl.load(weight_ptr + t * K + k, mask=here, other=0).to(SUM)
            total = tl.zeros([HIGH], SUM)
            for first in range(0, width, WIDE):
                h = first + tl.arange(0, WIDE)
                inside = here[:, None] & (h < width)[None, :]
                place = row[:, None] * width + h[None, :]
                # The gradient is read again for every choice: from the cache, where the first choice has brought it.
                grad = tl.load(grad_ptr + t[:, None] * width + h[None, :], mask=inside, other=0).to(SUM)
                total += tl.sum(grad * tl.load(rows_ptr + place, mask=inside, other=0).to(SUM), axis=1)
                scaled = grad * weight[:, None]
                tl.store(of_rows_ptr + place, scaled.to(of_rows_ptr.dtype.element_ty), mask=inside)
            tl.store(of_weight_ptr + t * K + k, total.to(of_weight_ptr.dtype.element_ty), mask=t < tokens)
    elif PADDED:
        r = (program - token_programs).to(tl.int64) * HIGH + tl.arange(0, HIGH)
        for first in range(0, width, WIDE):
            _clear(order_ptr, of_rows_ptr, r, first + tl.arange(0, WIDE), width, rows)
