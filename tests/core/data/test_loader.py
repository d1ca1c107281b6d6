"""The order of training: a pure function of the step, the same windows for every mapping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config.run import IGNORE
from core.data.loader import Loader
from core.errors import ConfigError, DataError
from tests.core.data.streams import documents_strategy, naive_window, random_split, split_of


def loader(split, *, sequence=4, batch=6, microbatch=1, seed=3, replica=0, replicas=1) -> Loader:
    return Loader(
        split,
        sequence_tokens=sequence,
        global_batch=batch,
        microbatch=microbatch,
        seed=seed,
        replica=replica,
        replicas=replicas,
    )


def mappings(batch: int) -> list[tuple[int, int]]:
    """Every (replicas, microbatch) that divides `batch`."""
    sizes = range(1, batch + 1)
    return [(replicas, micro) for replicas in sizes for micro in sizes if batch % (replicas * micro) == 0]


def joined(split, step: int, *, replicas: int, microbatch: int, **sizes) -> tuple[list[int], list[int]]:
    """Tokens and labels of a step: every replica's first microbatch, then every replica's second, …"""
    tokens, labels = [], []
    loaders = (loader(split, replicas=replicas, replica=r, microbatch=microbatch, **sizes) for r in range(replicas))
    for together in zip(*(of_replica.batches(step) for of_replica in loaders), strict=True):
        for batch in together:
            assert len(batch.tokens) == microbatch * sizes["sequence"]
            tokens += batch.tokens.tolist()
            labels += batch.labels.tolist()
    return tokens, labels


@pytest.mark.parametrize(("replicas", "microbatch"), mappings(12))
def test_a_global_batch_is_the_same_for_every_mapping(replicas: int, microbatch: int) -> None:
    split = random_split([5, 31, 1, 2, 17, 40, 3, 3, 29])
    for step in range(4):  # 32 windows of 4: batches of 12 cross the end of an epoch
        whole = joined(split, step, replicas=1, microbatch=12, sequence=4, batch=12)
        assert joined(split, step, replicas=replicas, microbatch=microbatch, sequence=4, batch=12) == whole


@pytest.mark.parametrize(("replicas", "microbatch"), mappings(12))
def test_a_microbatch_knows_where_its_first_token_lies_in_the_global_batch(replicas: int, microbatch: int) -> None:
    split = random_split([5, 31, 1, 2, 17, 40, 3, 3, 29])
    [whole] = loader(split, sequence=4, batch=12, microbatch=12).batches(3)
    for replica in range(replicas):
        mine = loader(split, sequence=4, batch=12, microbatch=microbatch, replica=replica, replicas=replicas).batches(3)
        for batch in mine:
            end = batch.first + len(batch.tokens)
            assert batch.tokens.tolist() == whole.tokens[batch.first : end].tolist()


@given(documents=documents_strategy(), size=st.integers(1, 9), batch=st.integers(1, 7), seed=st.integers(0, 2**40))
def test_every_epoch_has_every_window_once_whatever_the_batch(documents, size, batch, seed) -> None:
    windows = sum(len(document) for document in documents) // size
    if windows == 0:
        return
    source = loader(split_of(documents), sequence=size, batch=batch, seed=seed)
    steps = -(-3 * windows // batch)
    order = np.concatenate([source.windows(step) for step in range(steps)])
    for epoch in range(3):
        assert sorted(order[epoch * windows : (epoch + 1) * windows].tolist()) == list(range(windows))


@given(documents=documents_strategy(), size=st.integers(1, 9), step=st.integers(0, 50))
def test_batches_hold_the_windows_of_the_definition_and_valid_tokens_counts_their_labels(documents, size, step) -> None:
    if sum(len(document) for document in documents) < size:
        return
    source = loader(split_of(documents), sequence=size, batch=6, microbatch=3)
    naive = [naive_window(documents, int(window), size) for window in source.windows(step)]
    batches = source.batches(step)
    assert [t for batch in batches for t in batch.tokens.tolist()] == [t for tokens, _, _ in naive for t in tokens]
    labels = [label for _, labels, _ in naive for label in labels]
    assert [label for batch in batches for label in batch.labels.tolist()] == labels
    assert source.valid_tokens(step) == sum(label != -100 for label in labels)


def test_valid_tokens_is_the_whole_batch_on_every_replica() -> None:
    split = random_split([5, 31, 1, 2, 17, 40, 3, 3, 29])
    counts = {loader(split, batch=12, replicas=3, replica=r, microbatch=2).valid_tokens(5) for r in range(3)}
    _, labels = joined(split, 5, replicas=3, microbatch=2, sequence=4, batch=12)
    assert counts == {sum(label != IGNORE for label in labels)}


def test_a_new_loader_continues_where_any_step_left_off() -> None:
    split = random_split([23] * 40)
    first = loader(split)
    for step in range(30):
        first.batches(step)
    again = loader(split)
    for a, b in zip(first.batches(30), again.batches(30), strict=True):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.labels, b.labels)


def test_epochs_and_seeds_have_orders_of_their_own_and_none_is_sorted() -> None:
    split = random_split([1000])
    orders = [loader(split, batch=250, seed=seed).windows(step).tolist() for seed in (0, 1, 2**40) for step in (0, 1)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert list(range(250)) not in orders


def test_the_order_looks_random() -> None:
    # over many epochs of 6 windows every (place, window) pair is equally likely: chi-square with 25 degrees of freedom
    split = random_split([24])
    order = loader(split, batch=6 * 3000, seed=5).windows(0).reshape(3000, 6)
    counts = np.stack([np.bincount(order[:, place], minlength=6) for place in range(6)])
    assert ((counts - 500) ** 2 / 500).sum() < 60
    # and of all 720 orders most are met
    assert len({tuple(row) for row in order.tolist()}) > 650


def test_the_order_never_changes_between_versions() -> None:
    # frozen: a run must resume in the order it began with, whatever numpy or this code has become
    assert loader(random_split([28]), batch=7, seed=0).windows(0).tolist() == [5, 2, 1, 6, 0, 4, 3]


def test_a_corpus_smaller_than_a_batch_goes_round() -> None:
    split = random_split([9])
    source = loader(split, sequence=4, batch=5)
    assert source.num_windows == 2
    assert sorted(np.concatenate([source.windows(0), source.windows(1)]).tolist()) == [0] * 5 + [1] * 5
    single = loader(split, sequence=9, batch=4, microbatch=2, replicas=2, replica=1)
    assert single.windows(7).tolist() == [0, 0, 0, 0]
    assert [len(batch.tokens) for batch in single.batches(7)] == [18]


def test_less_than_one_window_is_too_short() -> None:
    with pytest.raises(DataError, match=r"too short: 8 tokens, but train\.sequence_tokens=9.*at most 8"):
        loader(random_split([8]), sequence=9)


def test_a_batch_that_does_not_divide_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch=7: .*Works: 6 or 12"):
        loader(random_split([80]), batch=7, microbatch=3, replicas=2)
    with pytest.raises(ConfigError, match=r"train\.global_batch=5: .*Works: 6\."):
        loader(random_split([80]), batch=5, microbatch=3, replicas=2)
    with pytest.raises(ConfigError, match="2 settings cannot run") as caught:
        loader(random_split([80]), sequence=0, batch=0)
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(("count", "replicas", "microbatch"), [(8, 2, 2), (5, 2, 2), (1, 3, 2), (7, 1, 3), (100, 4, 1)])
def test_validation_is_fixed_spread_out_and_equal_in_length_on_every_replica(count, replicas, microbatch) -> None:
    documents = [[*range(1, 20), 0] for _ in range(13)]  # 65 windows of 4
    split = split_of(documents)
    sources = [
        loader(split, replicas=replicas, replica=r, microbatch=microbatch, batch=replicas * microbatch)
        for r in range(replicas)
    ]
    chosen = sources[0].validation_windows(count).tolist()
    assert chosen == [k * 65 // min(count, 65) for k in range(min(count, 65))]
    parts = [source.validation(count) for source in sources]
    assert len({len(part) for part in parts}) == 1
    batches = [batch for together in zip(*parts, strict=True) for batch in together]
    assert {len(batch.tokens) for batch in batches} == {4 * microbatch}
    labels = [label for batch in batches for label in batch.labels.tolist()]
    expected = [label for window in chosen for label in naive_window(documents, window, 4)[1]]
    assert labels[: len(expected)] == expected
    assert set(labels[len(expected) :]) <= {IGNORE}
    assert {source.validation_tokens(count) for source in sources} == {sum(label != IGNORE for label in expected)}
    for batch in batches:
        assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == len(batch.tokens)
        assert (np.diff(batch.cu_seqlens) > 0).all()


def test_validation_of_nothing_is_nothing() -> None:
    source = loader(random_split([80]))
    assert source.validation(0) == () and source.validation_tokens(0) == 0


def test_huge_streams_are_shuffled_without_a_table() -> None:
    from core.data.loader import _shuffle

    size = 10**12  # a table of it would fit nowhere
    places = _shuffle(np.arange(size - 1000, size + 1000), size, seed=1)
    assert len(set(places[:1000].tolist())) == len(set(places[1000:].tolist())) == 1000
    assert places.min() >= 0 and places.max() < size
