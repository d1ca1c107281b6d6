"""Windows of the token stream as packed microbatches: attention and labels stay inside documents (contract 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.config.run import IGNORE
from core.data.storage import TokenSplit
from core.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """What one forward pass reads.

    tokens: [T] int64. labels: [T] int64, the next token of the same document, IGNORE where nothing is predicted.
    cu_seqlens: [sequences + 1] int64 from 0 to T, increasing: attention stays between neighbours. first: place of its first token
    in the global batch.
    """

    tokens: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray
    first: int = 0


def count_windows(split: TokenSplit, sequence_tokens: int) -> int:
    """Windows of `sequence_tokens` in the stream; the rest at its end, shorter than one, is not used."""
    return len(split.tokens) // sequence_tokens


def pack(split: TokenSplit, windows: np.ndarray, sequence_tokens: int) -> Microbatch:
    """The windows of the stream one after the other: window w is its tokens [w * S, (w + 1) * S), S = sequence_tokens.

    windows: [windows] int64, each in [0, count_windows). Sequences are cut where a window or a document begins. The last token
    of a document predicts its end-of-text; that predicts nothing. A window's last label is the token behind it in the
    stream. Raises DataError if an id is not below the vocabulary (a damaged file).
    """
    num_tokens = len(windows) * sequence_tokens
    starts = windows * sequence_tokens
    # one token more than the stream has is never needed: behind its last token nothing is predicted
    reach = np.minimum(starts[:, None] + np.arange(sequence_tokens + 1), len(split.tokens) - 1)
    stretches = split.tokens[reach].astype(np.int64)
    if num_tokens and int(stretches.max()) >= split.vocab:
        raise DataError(
            f"{split.folder}: {split.name} holds token id {stretches.max()}, not below the vocabulary of {split.vocab}. "
            "The file is damaged: delete the folder and prepare it again."
        )
    labels = stretches[:, 1:].copy()
    cuts = [np.arange(0, num_tokens + 1, sequence_tokens)]
    first, last = (np.searchsorted(split.offsets, place, side="right") for place in (starts, starts + sequence_tokens))
    for row in np.flatnonzero(last > first):
        borders = (
            split.offsets[first[row] : last[row]] - starts[row]
        )  # in (0, S]: where documents begin, S is the window's end
        labels[row, borders - 1] = IGNORE
        cuts.append(row * sequence_tokens + borders)
    return Microbatch(
        tokens=stretches[:, :-1].reshape(-1), labels=labels.reshape(-1), cu_seqlens=np.unique(np.concatenate(cuts))
    )


def count_valid(split: TokenSplit, windows: np.ndarray, sequence_tokens: int) -> int:
    """Labels that are not IGNORE in these windows together, from the offsets alone: no token is read."""
    starts = windows * sequence_tokens
    first, last = (np.searchsorted(split.offsets, place, side="right") for place in (starts, starts + sequence_tokens))
    return int(len(windows) * sequence_tokens - (last - first).sum())


def silent(microbatch: Microbatch) -> Microbatch:
    """The same tokens with nothing to predict: what a rank runs to stay in step with those that have more to do."""
    labels = np.full_like(microbatch.labels, IGNORE)
    return Microbatch(tokens=microbatch.tokens, labels=labels, cu_seqlens=microbatch.cu_seqlens)
