"""Token streams made by hand, and what the definition says of them, written as plainly as can be."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from core.data.storage import TokenSplit

END = 0


def split_of(documents: list[list[int]], vocab: int = 100) -> TokenSplit:
    """A split that holds these documents; each ends with END already."""
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    offsets = np.array([0, *accumulate(len(document) for document in documents)], dtype=np.int64)
    return TokenSplit(name="train", folder=Path("made-by-hand"), vocab=vocab, tokens=tokens, offsets=offsets)


def random_split(lengths: list[int], seed: int = 0) -> TokenSplit:
    """Documents of these lengths, END included."""
    generator = np.random.default_rng(seed)
    return split_of([[*generator.integers(1, 100, length - 1).tolist(), END] for length in lengths])


def documents_strategy(longest: int = 12) -> st.SearchStrategy[list[list[int]]]:
    """Between 1 and 12 documents of 1 to `longest` + 1 tokens."""
    body = st.lists(st.integers(1, 99), max_size=longest)
    return st.lists(body.map(lambda tokens: [*tokens, END]), min_size=1, max_size=12)


def naive_window(documents: list[list[int]], window: int, size: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, labels and sequence lengths of one window, from the definition, token by token."""
    stream = [(d, token) for d, document in enumerate(documents) for token in document]
    tokens, labels, lengths = [], [], []
    for place in range(window * size, (window + 1) * size):
        document, token = stream[place]
        tokens.append(token)
        same = place + 1 < len(stream) and stream[place + 1][0] == document
        labels.append(stream[place + 1][1] if same else -100)
        begins = place == window * size or stream[place - 1][0] != document
        if begins:
            lengths.append(0)
        lengths[-1] += 1
    return tokens, labels, lengths
