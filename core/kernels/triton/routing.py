"""The three kernels of the router on float32 logits (report section 4.3.4), as `core/kernels/routing.py` launches them.

Experts lie on a tile in G groups of `SIZE` columns each, both filled up to powers of two; without groups there is one. A choice
is the highest of keys that no two experts share: the score's bits, ordered as integers, above the expert's number counted down.
So equal scores go by lowest number, whatever the order of a reduction, and whatever is already taken can never come again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.config.architecture import Groups, Router, Score

_SCORES: dict[Score, int] = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2, "softmax_after_top_k": 3}
_SOFTMAX = tl.constexpr(0)
_SIGMOID = tl.constexpr(1)
_SQRT_SOFTPLUS = tl.constexpr(2)
_AFTER_TOP_K = tl.constexpr(3)
# Below every key, that of -inf included.
_TAKEN = tl.constexpr(-(1 << 63))
_LOW = tl.constexpr((1 << 31) - 1)
# Elements of a tile that one program holds.
_TILE = 1024


def route_forward(
    logits_TE: Tensor, router: Router, top_k: int, bias_E: Tensor | None, valid_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts int64 [T, K], weights [T, K], and what the backward needs: softmax scores [T, E], or the K chosen scores."""
    tokens, experts = logits_TE.shape
    logits = logits_TE.contiguous()
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(tokens, top_k)
    kept = torch.empty_like(logits) if router.score == "softmax" else torch.empty_like(weights)
    if not tokens:
        return ids, weights, kept
    groups = router.groups or Groups(total=1, kept=1, best=1)
    size = experts // groups.total
    padded_groups, padded_size = triton.next_power_of_2(groups.total), triton.next_power_of_2(size)
    rows = _rows(padded_groups * padded_size)
    _route_forward[(triton.cdiv(tokens, rows),)](
        logits, _or(bias_E, logits), _or(valid_T, logits), ids, weights, kept, tokens, router.scale,
        EXPERTS=experts, SIZE=size, TOP_K=top_k, SCORE=_SCORES[router.score], NORMALISE=router.normalise,
        BIASED=bias_E is not None, MASKED=valid_T is not None, GROUPS=groups.total, GROUPS_KEPT=groups.kept,
        BEST=min(groups.best, size), PADDED_GROUPS=padded_groups, PADDED_SIZE=padded_size,
        PADDED_K=triton.next_power_of_2(top_k), ROWS=rows, num_warps=4,
    )  # fmt: skip
    return ids, weights, kept


def route_backward(grad_TK: Tensor, experts_TK: Tensor, kept: Tensor, router: Router, experts: int) -> Tensor:
    """The gradient of the logits [T, experts] from that of the weights."""
    tokens, top_k = experts_TK.shape
    grad = torch.empty(tokens, experts, dtype=grad_TK.dtype, device=grad_TK.device)
    if not tokens:
        return grad
    padded = triton.next_power_of_2(experts)
    rows = _rows(padded)
    _route_backward[(triton.cdiv(tokens, rows),)](
        grad_TK.contiguous(), experts_TK, kept, grad, tokens, router.scale,
        EXPERTS=experts, TOP_K=top_k, SCORE=_SCORES[router.score], NORMALISE=router.normalise,
        PADDED=padded, PADDED_K=triton.next_power_of_2(top_k), ROWS=rows, num_warps=4,
    )  # fmt: skip
    return grad


def balance_forward(
    logits_TE: Tensor, score: Score, top_k: int, valid_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores that add up to 1 and their top-k as 0/1, both [T, E], and a token's sum [T] before the division (None: softmax)."""
    tokens, experts = logits_TE.shape
    logits = logits_TE.contiguous()
    scores, chosen = torch.empty_like(logits), torch.empty_like(logits)
    divided = score in ("sigmoid", "sqrt_softplus")
    total = logits.new_empty(tokens) if divided else None
    if tokens:
        padded = triton.next_power_of_2(experts)
        rows = _rows(padded)
        _balance_forward[(triton.cdiv(tokens, rows),)](
            logits, _or(valid_T, logits), scores, chosen, _or(total, logits), tokens,
            EXPERTS=experts, TOP_K=top_k, SCORE=_SCORES[score] if divided else 0, MASKED=valid_T is not None,
            PADDED=padded, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return scores, chosen, total


def balance_backward(grad_TE: Tensor, scores_TE: Tensor, total_T: Tensor | None, score: Score) -> Tensor:
    """The gradient of the logits [T, E] from that of the balance scores."""
    tokens, experts = scores_TE.shape
    grad = torch.empty_like(scores_TE)
    if tokens:
        padded = triton.next_power_of_2(experts)
        rows = _rows(padded)
        _balance_backward[(triton.cdiv(tokens, rows),)](
            grad_TE.contiguous(), scores_TE, _or(total_T, scores_TE), grad, tokens,
            EXPERTS=experts, SCORE=0 if total_T is None else _SCORES[score], PADDED=padded, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return grad


def auxiliary_forward(scores_TE: Tensor, counts_SE: Tensor, factor_S: Tensor, piece_T: Tensor | None) -> Tensor:
    """sum over tokens x of factor of its piece * sum_i counts of its piece_i * scores_i(x): scalar."""
    tokens, experts = scores_TE.shape
    if not tokens:
        return scores_TE.new_zeros(())
    padded = triton.next_power_of_2(experts)
    rows = _rows(padded)
    steps = 8
    programs = triton.cdiv(tokens, rows * steps)
    # One sum per program, added up afterwards: additions in memory would come in another order every time.
    parts = scores_TE.new_empty(programs)
    _auxiliary_forward[(programs,)](
        scores_TE.contiguous(), counts_SE.contiguous(), factor_S.contiguous(), _or(piece_T, scores_TE), parts, tokens,
        EXPERTS=experts, PIECES=piece_T is not None, PADDED=padded, ROWS=rows, STEPS=steps, num_warps=4,
    )  # fmt: skip
    return parts.sum()


def auxiliary_backward(
    grad: Tensor, counts_SE: Tensor, factor_S: Tensor, piece_T: Tensor | None, tokens: int
) -> Tensor:
    """The gradient of the scores [tokens, E] from that of the loss, a scalar that stays on the device."""
    experts = counts_SE.shape[1]
    of_scores = factor_S.new_empty(tokens, experts)
    if tokens:
        padded = triton.next_power_of_2(experts)
        rows = _rows(padded)
        _auxiliary_backward[(triton.cdiv(tokens, rows),)](
            grad.contiguous(), counts_SE.contiguous(), factor_S.contiguous(), _or(piece_T, counts_SE), of_scores, tokens,
            EXPERTS=experts, PIECES=piece_T is not None, PADDED=padded, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return of_scores


def _rows(columns: int) -> int:
    """Tokens of one program, so that a tile of so many columns stays in registers."""
    return max(1, min(16, _TILE // columns))


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where there is no such tensor; the kernel is compiled without the access."""
    if tensor is None:
        return other
    return tensor.contiguous().view(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()


@triton.jit
def _exp(x):
    """exp(x) for x <= 0 within a few roundings: the hardware's own is off by |x| of them."""
    x = tl.where(x < -104.0, -104.0, x)
    whole = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts, of which the first times a small integer is exact.
    rest = (x - whole * 0.693359375) + whole * 2.12194440e-4
    return tl.exp2(whole) * tl.exp(rest)


@triton.jit
def _log_of_one_and(x):
    """log(1 + x) for 0 <= x <= 1, accurate for the smallest x too: the error of rounding 1 + x cancels."""
    sum_ = 1.0 + x
    return tl.where(sum_ == 1.0, x, tl.log(sum_) * tl.div_rn(x, tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))


@triton.jit
def _one_minus_exp_of_minus(x):
    """1 - exp(-x) for x >= 0, accurate for the smallest x too, by the same cancellation."""
    power = _exp(-x)
    plain = (power == 1.0) | (power < 0.5)
    logarithm = tl.log(tl.where(plain, 0.5, power))
    return tl.where(power == 1.0, x, tl.where(plain, 1.0 - power, (power - 1.0) * tl.div_rn(x, logarithm)))


@triton.jit
def _score(logits, known, SCORE: tl.constexpr):
    """Scores of a tile [rows, columns]; zero in columns that are no expert."""
    if SCORE == _SOFTMAX:
        highest = tl.max(tl.where(known, logits, float("-inf")), axis=1)
        power = tl.where(known, _exp(tl.where(known, logits - highest[:, None], 0.0)), 0.0)
        scores = tl.div_rn(power, tl.broadcast_to(tl.sum(power, axis=1)[:, None], power.shape))
    elif SCORE == _AFTER_TOP_K:
        scores = logits
    else:
        power = _exp(-tl.abs(logits))
        if SCORE == _SIGMOID:
            scores = tl.div_rn(tl.where(logits >= 0, 1.0, power), 1.0 + power)
        else:
            scores = tl.sqrt_rn(tl.maximum(logits, 0.0) + _log_of_one_and(power))
    return tl.where(known, scores, 0.0)


@triton.jit
def _slope(scores, SCORE: tl.constexpr):
    """The derivative of a score by its logit, from the score alone."""
    if SCORE == _SIGMOID:
        return scores * (1.0 - scores)
    # The sigmoid of the logit is 1 - exp(-score^2); a score that is zero has no slope left.
    positive = tl.where(scores > 0, scores, 1.0)
    return tl.where(scores > 0, tl.div_rn(_one_minus_exp_of_minus(positive * positive), 2.0 * positive), 0.0)


@triton.jit
def _ordered(x):
    """int64 that compares as the float32 does: both zeros alike, and what is not a number above all, as torch sorts it."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & _LOW)
    return tl.where(x == x, bits, _LOW).to(tl.int64)


@triton.jit
def _key(x, number):
    """`_ordered` above the number counted down, so that of equal values the lowest number is the highest key."""
    return (_ordered(x) << 32) | (number ^ _LOW).to(tl.int64)


@triton.jit
def _number_of(key):
    return (key & _LOW).to(tl.int32) ^ _LOW


@triton.jit
def _value_of(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & _LOW)).to(tl.float32, bitcast=True)


@triton.jit
def _only_kept_groups(
    selection, keys, group_of_column, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, BEST: tl.constexpr,
    ROWS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """The selection [rows, columns] with -inf in all but the best groups; a group counts its `BEST` highest, added best first."""
    grouped = tl.reshape(keys, [ROWS, PADDED_GROUPS, PADDED_SIZE])
    total = tl.zeros([ROWS, PADDED_GROUPS], tl.float32)
    for _ in tl.static_range(BEST):
        first = tl.max(grouped, axis=2)
        total += _value_of(first)
        grouped = tl.where(grouped == first[:, :, None], _TAKEN, grouped)
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    group_keys = tl.where(group < GROUPS, _key(total, group), _TAKEN)
    kept = tl.zeros([ROWS, PADDED_GROUPS * PADDED_SIZE], tl.int32)
    for _ in range(GROUPS_KEPT):
        best = tl.max(group_keys, axis=1)[:, None]
        kept = tl.where(group_of_column == _number_of(best), 1, kept)
        group_keys = tl.where(group_keys == best, _TAKEN, group_keys)
    return tl.where(kept == 1, selection, float("-inf"))


@triton.jit
def _route_forward(
    logits_ptr, bias_ptr, valid_ptr, ids_ptr, weights_ptr, kept_ptr, tokens, scale,
    EXPERTS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr,
    BIASED: tl.constexpr, MASKED: tl.constexpr, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, BEST: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, PADDED_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED_GROUPS * PADDED_SIZE)[None, :]
    group = column // PADDED_SIZE
    expert = group * SIZE + column % PADDED_SIZE
    is_expert = (group < GROUPS) & (column % PADDED_SIZE < SIZE)
    known = (row < tokens) & is_expert
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=known, other=0.0)
    scores = _score(logits, is_expert, SCORE)
    if SCORE == _SOFTMAX:
        tl.store(kept_ptr + row * EXPERTS + expert, scores, mask=known)
    selection = scores
    if BIASED:
        selection = scores + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, _key(selection, expert), _TAKEN)
    if GROUPS > 1:
        selection = _only_kept_groups(
            selection, keys, group, GROUPS, GROUPS_KEPT, BEST, ROWS, PADDED_GROUPS, PADDED_SIZE
        )
        keys = tl.where(is_expert, _key(selection, expert), _TAKEN)
    place = tl.arange(0, PADDED_K)[None, :]
    ids = tl.zeros([ROWS, PADDED_K], tl.int32)
    chosen = tl.zeros([ROWS, PADDED_K], tl.float32)
    for k in range(TOP_K):
        first = tl.max(keys, axis=1)[:, None]
        # The score itself, not what the bias made of it.
        value = tl.sum(tl.where(keys == first, scores, 0.0), axis=1)[:, None]
        ids = tl.where(place == k, _number_of(first), ids)
        chosen = tl.where(place == k, value, chosen)
        keys = tl.where(keys == first, _TAKEN, keys)
    there = (row < tokens) & (place < TOP_K)
    if SCORE != _SOFTMAX:
        tl.store(kept_ptr + row * TOP_K + place, chosen, mask=there)
    if SCORE == _AFTER_TOP_K:
        weights = _score(chosen, place < TOP_K, _SOFTMAX)
    elif NORMALISE:
        weights = tl.div_rn(chosen, tl.broadcast_to(tl.sum(chosen, axis=1)[:, None] + 1e-20, chosen.shape))
    else:
        weights = chosen
    weights = weights * scale
    if MASKED:
        valid = tl.load(valid_ptr + row, mask=row < tokens, other=0) != 0
        ids = tl.where(valid, ids, -1)
        weights = tl.where(valid, weights, 0.0)
    tl.store(ids_ptr + row * TOP_K + place, ids.to(tl.int64), mask=there)
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=there)


@triton.jit
def _route_backward(
    grad_ptr, ids_ptr, kept_ptr, out_ptr, tokens, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr,
    PADDED: tl.constexpr, PADDED_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    place = tl.arange(0, PADDED_K)[None, :]
    there = (row < tokens) & (place < TOP_K)
    ids = tl.load(ids_ptr + row * TOP_K + place, mask=there, other=-1)
    used = ids >= 0
    grad = tl.load(grad_ptr + row * TOP_K + place, mask=used, other=0.0) * scale
    if SCORE == _SOFTMAX:
        chosen = tl.load(kept_ptr + row * EXPERTS + ids, mask=used, other=0.0)
    else:
        chosen = tl.load(kept_ptr + row * TOP_K + place, mask=used, other=0.0)
    if SCORE == _AFTER_TOP_K:
        weights = _score(chosen, place < TOP_K, _SOFTMAX)
        grad = weights * (grad - tl.sum(weights * grad, axis=1)[:, None])
    elif NORMALISE:
        total = tl.broadcast_to(tl.sum(chosen, axis=1)[:, None] + 1e-20, chosen.shape)
        share = tl.div_rn(chosen, total)
        grad = tl.div_rn(grad - tl.sum(grad * share, axis=1)[:, None], total)
    if SCORE == _SIGMOID or SCORE == _SQRT_SOFTPLUS:
        grad = grad * _slope(chosen, SCORE)
    grad = tl.where(used, grad, 0.0)
    expert = tl.arange(0, PADDED)[None, :]
    known = (row < tokens) & (expert < EXPERTS)
    dense = tl.zeros([ROWS, PADDED], tl.float32)
    for k in range(TOP_K):
        # Unchosen places have grad zero, so that an id of -1, which no column has, may be summed with them.
        id_k = tl.sum(tl.where(place == k, ids, 0), axis=1)[:, None]
        grad_k = tl.sum(tl.where(place == k, grad, 0.0), axis=1)[:, None]
        dense = tl.where(expert == id_k, grad_k, dense)
    if SCORE == _SOFTMAX:
        scores = tl.load(kept_ptr + row * EXPERTS + expert, mask=known, other=0.0)
        dense = scores * (dense - tl.sum(grad * chosen, axis=1)[:, None])
    tl.store(out_ptr + row * EXPERTS + expert, dense, mask=known)


@triton.jit
def _balance_forward(
    logits_ptr, valid_ptr, scores_ptr, chosen_ptr, total_ptr, tokens,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, PADDED)[None, :]
    known = (row < tokens) & (expert < EXPERTS)
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=known, other=0.0)
    scores = _score(logits, expert < EXPERTS, SCORE)
    if SCORE != _SOFTMAX:
        total = tl.sum(scores, axis=1)[:, None]
        tl.store(total_ptr + row, total, mask=row < tokens)
        scores = tl.div_rn(scores, tl.broadcast_to(total, scores.shape))
    keys = tl.where(expert < EXPERTS, _key(scores, expert), _TAKEN)
    for _ in range(TOP_K):
        keys = tl.where(keys == tl.max(keys, axis=1)[:, None], _TAKEN, keys)
    chosen = tl.where(keys == _TAKEN, 1.0, 0.0)
    if MASKED:
        valid = tl.load(valid_ptr + row, mask=row < tokens, other=0) != 0
        scores = tl.where(valid, scores, 0.0)
        chosen = tl.where(valid, chosen, 0.0)
    tl.store(scores_ptr + row * EXPERTS + expert, scores, mask=known)
    tl.store(chosen_ptr + row * EXPERTS + expert, chosen, mask=known)


@triton.jit
def _balance_backward(
    grad_ptr, scores_ptr, total_ptr, out_ptr, tokens,
    EXPERTS: tl.constexpr, SCORE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, PADDED)[None, :]
    known = (row < tokens) & (expert < EXPERTS)
    grad = tl.load(grad_ptr + row * EXPERTS + expert, mask=known, other=0.0)
    scores = tl.load(scores_ptr + row * EXPERTS + expert, mask=known, other=0.0)
    centred = grad - tl.sum(grad * scores, axis=1)[:, None]
    if SCORE == _SOFTMAX:
        of_logits = scores * centred
    else:
        total = tl.broadcast_to(tl.load(total_ptr + row, mask=row < tokens, other=1.0), scores.shape)
        of_logits = tl.div_rn(centred, total) * _slope(scores * total, SCORE)
    tl.store(out_ptr + row * EXPERTS + expert, of_logits, mask=known)


@triton.jit
def _load_of(counts_ptr, factor_ptr, piece_ptr, row, tokens, expert, EXPERTS: tl.constexpr, PIECES: tl.constexpr):
    """factor * counts of the piece of every row of a tile [rows, columns]."""
    piece = row * 0
    if PIECES:
        piece = tl.load(piece_ptr + row, mask=row < tokens, other=0)
    counts = tl.load(counts_ptr + piece * EXPERTS + expert, mask=(row < tokens) & (expert < EXPERTS), other=0.0)
    return counts * tl.load(factor_ptr + piece, mask=row < tokens, other=0.0)


@triton.jit
def _auxiliary_forward(
    scores_ptr, counts_ptr, factor_ptr, piece_ptr, parts_ptr, tokens,
    EXPERTS: tl.constexpr, PIECES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, PADDED)[None, :]
    total = tl.zeros([ROWS, PADDED], tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]
        known = (row < tokens) & (expert < EXPERTS)
        scores = tl.load(scores_ptr + row * EXPERTS + expert, mask=known, other=0.0)
        total += scores * _load_of(counts_ptr, factor_ptr, piece_ptr, row, tokens, expert, EXPERTS, PIECES)
    tl.store(parts_ptr + tl.program_id(0), tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def _auxiliary_backward(
    grad_ptr, counts_ptr, factor_ptr, piece_ptr, out_ptr, tokens,
    EXPERTS: tl.constexpr, PIECES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, PADDED)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    load = _load_of(counts_ptr, factor_ptr, piece_ptr, row, tokens, expert, EXPERTS, PIECES)
    tl.store(out_ptr + row * EXPERTS + expert, load * tl.load(grad_ptr), mask=(row < tokens) & (expert < EXPERTS))
