"""Packed windows against the definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config.run import IGNORE
from core.data.packing import count_valid, count_windows, pack, silent
from core.errors import DataError
from tests.core.data.streams import END, documents_strategy, naive_window, random_split, split_of


@given(documents=documents_strategy(), size=st.integers(1, 17), data=st.data())
def test_packed_windows_are_what_the_definition_says(documents, size, data) -> None:
    split = split_of(documents)
    total = sum(len(document) for document in documents)
    assert count_windows(split, size) == total // size
    if total < size:
        return
    windows = data.draw(st.lists(st.integers(0, total // size - 1), max_size=5))
    packed = pack(split, np.array(windows, dtype=np.int64), size)
    naive = [naive_window(documents, window, size) for window in windows]
    assert packed.tokens.tolist() == [token for tokens, _, _ in naive for token in tokens]
    assert packed.labels.tolist() == [label for _, labels, _ in naive for label in labels]
    lengths = [length for _, _, lengths in naive for length in lengths]
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum(lengths, dtype=int).tolist()]
    assert {array.dtype for array in (packed.tokens, packed.labels, packed.cu_seqlens)} == {np.dtype(np.int64)}
    assert count_valid(split, np.array(windows, dtype=np.int64), size) == sum(
        label != IGNORE for _, labels, _ in naive for label in labels
    )


def test_end_of_text_is_predicted_by_the_last_token_and_predicts_nothing() -> None:
    packed = pack(split_of([[5, 6, END], [7, END], [END]]), np.array([0]), 6)
    assert packed.tokens.tolist() == [5, 6, END, 7, END, END]
    assert packed.labels.tolist() == [6, END, IGNORE, END, IGNORE, IGNORE]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 6]


def test_the_last_label_of_a_window_is_the_token_behind_it_if_the_document_goes_on() -> None:
    split = split_of([[1, 2, 3, 4, 5, END], [6, 7, END]])
    assert pack(split, np.array([0]), 3).labels.tolist() == [2, 3, 4]
    assert pack(split, np.array([1]), 3).labels.tolist() == [5, END, IGNORE]


def test_windows_beside_each_other_do_not_see_each_other_even_in_one_document() -> None:
    split = split_of([[*range(1, 12), END]])
    assert pack(split, np.array([0, 1]), 4).cu_seqlens.tolist() == [0, 4, 8]
    assert pack(split, np.array([1, 1]), 4).labels.tolist() == [6, 7, 8, 9, 6, 7, 8, 9]


def test_no_windows_make_an_empty_microbatch() -> None:
    packed = pack(random_split([7]), np.array([], dtype=np.int64), 3)
    assert packed.tokens.shape == packed.labels.shape == (0,)
    assert packed.cu_seqlens.tolist() == [0]


def test_a_silent_microbatch_has_the_same_tokens_and_nothing_to_predict() -> None:
    packed = pack(random_split([7, 5]), np.array([0, 1]), 5)
    quiet = silent(packed)
    assert np.array_equal(quiet.tokens, packed.tokens) and np.array_equal(quiet.cu_seqlens, packed.cu_seqlens)
    assert (quiet.labels == IGNORE).all() and not (packed.labels == IGNORE).all()


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read() -> None:
    split = replace(random_split([50]), vocab=60)
    with pytest.raises(DataError, match=r"train holds token id \d+, not below the vocabulary of 60"):
        pack(split, np.arange(10), 5)
