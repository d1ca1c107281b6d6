"""Stand-ins for the packages behind `deepep` and `hybridep`: the calls of their published interface, computed over torch.distributed as
their documentation says, for tokens of any dtype."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _everyone(value: Any, group: Any) -> list[Any]:
    """What every rank of the group says, in order."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, value, group=group)
    return told


class Config:
    """The package's settings: how large its buffers have to be."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """As deep_ep.Buffer: sends a token once to each rank that holds some of its experts."""

    num_sms = 20

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False
    ) -> None:
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.group = group

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, previous_event: Any = None) -> tuple:
        assert topk_idx.dtype == torch.int64
        of_rank = num_experts // self.group.size()
        needed = torch.zeros(topk_idx.shape[0], self.group.size(), dtype=torch.bool)
        per_expert = torch.zeros(num_experts, dtype=torch.int)
        for token, chosen in enumerate(topk_idx.tolist()):
            for expert in chosen:
                if expert >= 0:
                    needed[token, expert // of_rank] = True
                    per_expert[expert] += 1
        return needed.sum(0).to(torch.int), None, per_expert, needed, object()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
    ) -> tuple:
        me = self.group.rank()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            parts = [sent[needed[:, me]] for sent, needed in zip(_everyone(x, self.group), handle, strict=True)]
            return torch.cat(parts), None, None, None, None, object()
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        of_rank = num_tokens_per_expert.numel() // self.group.size()
        told = _everyone((x, topk_idx, topk_weights, is_token_in_rank), self.group)
        x, index, weights = (torch.cat([rank[i][rank[3][:, me]] for rank in told]) for i in range(3))
        mine = (index >= 0) & (index // of_rank == me)
        local = torch.where(mine, index - me * of_rank, -1)
        counts = [int((local == e).sum()) for e in range(of_rank)]
        return x, local, torch.where(mine, weights, 0.0), counts, [rank[3] for rank in told], object()

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, bias: Any = None) -> tuple:
        def summed(parts: list[Tensor]) -> Tensor:
            """For each of my tokens the sum of its rows from all ranks; a rank's rows lie by source, then token."""
            me, total = self.group.rank(), parts[0].new_zeros(handle[self.group.rank()].shape[0], parts[0].shape[1])
            for rank, rows in enumerate(parts):
                first = sum(int(handle[source][:, rank].sum()) for source in range(me))
                tokens = handle[me][:, rank].nonzero()[:, 0]
                total[tokens] += rows[first : first + len(tokens)]
            return total

        out = summed(_everyone(x, self.group))
        weights = None if topk_weights is None else summed(_everyone(topk_weights, self.group))
        return out, weights, object()


class HybridEPBuffer:
    """As deep_ep.HybridEPBuffer: sends tokens and permutes them for the experts where they arrive."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int = 32,
        num_sms_combine_api: int = 32,
    ) -> None:
        self.group, self.local = group, num_local_experts
        self.num_sms = num_sms_dispatch_api, num_sms_combine_api

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_of_experts_per_rank: int | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: Any = None,
    ) -> tuple:
        told = _everyone(hidden, self.group)
        assert len({x.shape for x in told}) == 1, "every rank brings equally many tokens"
        if handle is None:
            assert routing_map is not None and routing_map.dtype == torch.bool and num_of_experts_per_rank == self.local
            handle = (_everyone(routing_map, self.group), len(hidden))
        rows, counts = self._rows(handle, pad_multiple)
        everyone = torch.cat([*told, hidden.new_zeros(1, hidden.shape[1])])
        weights = None
        if probs is not None:
            assert probs.dtype == torch.float32
            of_all = torch.cat([*_everyone(probs, self.group), probs.new_zeros(1, probs.shape[1])])
            weights = torch.stack([of_all[token, expert] for token, expert in rows]) if rows else probs.new_zeros(0)
        assert num_permuted_tokens in (None, len(rows))
        out = everyone[torch.tensor([token for token, _ in rows], dtype=torch.int64)]
        return out, weights, None, torch.tensor(counts), handle

    def _rows(self, handle: Any, multiple: int | None) -> tuple[list[tuple[int, int]], list[int]]:
        """(token of all ranks, expert) of every row; rows that fill an expert up are those of the token behind the last."""
        wanted, rows, counts = torch.cat(handle[0]), [], []
        for expert in range(self.group.rank() * self.local, (self.group.rank() + 1) * self.local):
            tokens = wanted[:, expert].nonzero()[:, 0].tolist()
            tokens += [len(wanted)] * (-len(tokens) % (multiple or 1))
            rows += [(token, expert) for token in tokens]
            counts.append(len(tokens))
        return rows, counts

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Any = None, pad_multiple: int | None = None
    ) -> tuple:
        rows, _ = self._rows(handle, pad_multiple)
        tokens, me = handle[1], self.group.rank()
        total = hidden.new_zeros(tokens * self.group.size() + 1, hidden.shape[1])
        of_probs = None if probs is None else probs.new_zeros(len(total), handle[0][0].shape[1])
        for at, (token, expert) in enumerate(rows):
            total[token] += hidden[at]
            if of_probs is not None:
                of_probs[token, expert] += probs[at]
        mine = slice(me * tokens, (me + 1) * tokens)
        out = torch.stack(_everyone(total, self.group)).sum(0)[mine]
        return out, None if of_probs is None else torch.stack(_everyone(of_probs, self.group)).sum(0)[mine]


@contextmanager
def installed(**held: Any) -> Iterator[ModuleType]:
    """A package deep_ep that has these, or what both published ones have."""
    package = ModuleType("deep_ep")
    for name, value in (held or {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer}).items():
        setattr(package, name, value)
    sys.modules["deep_ep"] = package
    try:
        yield package
    finally:
        del sys.modules["deep_ep"]
