"""Buckets: every parameter in one, values and identity kept; aligned, bounded, in the order of backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from core.optim.buckets import ALIGNMENT_BYTES, BUCKET_BYTES, Bucket, main_dtype, pack
from core.optim.distributed import take, zero_unreached
from core.parallel.groups import Group, Groups, one_rank
from core.state.inventory import Entry
from tests.core.optim.trees import SMALL_BUCKET, Tree, trained

MIXED = {"": torch.float32, "matrix": torch.bfloat16, "whole": torch.float64, "norm": torch.bfloat16}


def of(position: int, size: int, first: int = 0) -> Group:
    return Group(ranks=tuple(range(first, first + size)), position=position, handle=None)


def spread(position: int, size: int, expert_size: int = 1) -> Groups:
    """The groups of a rank whose dense parameters have `size` copies, without anyone to talk to."""
    copies = of(position, size)
    return replace(one_rank(), adjacent={1: copies}, replicas=copies, embedding=copies, edp=of(0, expert_size, 7))


def names(bucket: Bucket) -> list[str]:
    return [slot.name for slot in bucket.slots]


@pytest.mark.parametrize("bucket_bytes", [1, SMALL_BUCKET, BUCKET_BYTES])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parameters_keep_identity_and_values_and_live_in_the_buckets(bucket_bytes: int, size: int) -> None:
    model = Tree(dtypes=MIXED)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    buckets = pack(trained(model), spread(size - 1, size), bucket_bytes)
    found = [name for bucket in buckets for name in names(bucket)]
    assert sorted(found) == sorted(before)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and isinstance(parameter, nn.Parameter)
        assert torch.equal(parameter, before[name][1])
    for bucket in buckets:
        bucket.parameters.fill_(5.0)
    assert all(bool((parameter == 5.0).all()) for parameter in model.parameters())
    assert not bool((model.get_buffer("layers.0.bias") == 5.0).any())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_parameter_and_every_part_begins_on_a_boundary_and_the_rest_is_zero(size: int) -> None:
    model = Tree(dtypes=MIXED)
    for bucket in pack(trained(model), spread(0, size), SMALL_BUCKET):
        width = bucket.parameters.dtype.itemsize
        assert bucket.parameters.numel() == bucket.gradients.numel()
        assert bucket.parameters.numel() * width % (bucket.group.size * ALIGNMENT_BYTES) == 0
        used = torch.zeros(bucket.parameters.numel(), dtype=torch.bool)
        for slot in bucket.slots:
            assert slot.start * width % ALIGNMENT_BYTES == 0
            assert not bool(used[slot.start : slot.stop].any())
            used[slot.start : slot.stop] = True
        assert not bool(bucket.parameters[~used].any()) and not bool(bucket.gradients.any())


def test_a_bucket_holds_one_kind_and_no_more_bytes_of_gradients_than_allowed() -> None:
    entries = trained(Tree(dtypes=MIXED))
    for bucket in pack(entries, spread(0, 2), SMALL_BUCKET):
        kinds = {(entries[n].spec.decay, entries[n].tensor.dtype, "experts" in n) for n in names(bucket)}
        assert len(kinds) == 1
        total = sum(slot.gradient.nbytes for slot in bucket.slots)
        assert total <= SMALL_BUCKET or len(bucket.slots) == 1
        assert all(slot.gradient.shape == slot.entry.tensor.shape for slot in bucket.slots)


def test_buckets_are_in_the_order_in_which_backward_completes_them() -> None:
    dense = pack(trained(Tree()), one_rank(), BUCKET_BYTES)
    # norm and scale do not decay; embedding and experts have copies along axes of their own.
    assert [names(bucket) for bucket in dense] == [
        ["layers.0.experts"],
        ["layers.0.matrix", "layers.0.whole"],
        ["layers.0.norm", "layers.0.scale"],
        ["embedding.weight"],
    ]
    small = pack(trained(Tree()), spread(0, 2), SMALL_BUCKET)
    assert [names(bucket) for bucket in small] == [
        ["layers.0.experts"],  # larger than a bucket
        ["layers.0.whole"],
        ["layers.0.norm", "layers.0.scale"],
        ["embedding.weight", "layers.0.matrix"],
    ]


def test_ranks_of_one_group_come_to_the_same_buckets_whatever_else_they_hold() -> None:
    """As on two pipeline ranks, of which one also holds the embedding, with copies of it elsewhere."""
    found = []
    for position, stages in ((0, (0,)), (1, ())):
        groups = replace(spread(position, 2, expert_size=2), embedding=of(0, 2, 9))
        buckets = pack(trained(Tree(embedding_stages=stages)), groups, SMALL_BUCKET)
        found.append([names(bucket) for bucket in buckets if bucket.group.ranks == (0, 1)])
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_gradients_are_summed_in_float32_at_least_and_the_master_is_a_copy_only_where_it_has_to_be(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    (bucket,) = pack({"layers.0.whole": trained(Tree(dtypes={"": dtype}))["layers.0.whole"]}, spread(1, 2), 1)
    assert main_dtype(dtype) == bucket.gradients.dtype == bucket.master.dtype == bucket.own_gradients.dtype == wide
    half = bucket.parameters.numel() // 2
    assert torch.equal(bucket.master, bucket.parameters[half:].to(wide)) and bool(bucket.master.any())
    bucket.master.fill_(7.0)
    assert bool((bucket.parameters[half:] == 7.0).all()) == (dtype == wide)
    bucket.publish()
    assert bool((bucket.parameters[half:] == 7.0).all()) and not bool((bucket.parameters[:half] == 7.0).any())


def test_a_first_gradient_replaces_what_is_left_from_the_step_before_and_others_add_up_in_float32() -> None:
    entry = trained(Tree(dtypes={"": torch.bfloat16}))["layers.0.norm"]
    (bucket,) = pack({"gain": entry}, one_rank(), BUCKET_BYTES)
    (slot,) = bucket.slots
    slot.gradient.fill_(99.0)
    for number in (256.0, 1.0, 1.0, 1.0):
        entry.tensor.grad = torch.full_like(entry.tensor, number)
        take(slot)
        assert entry.tensor.grad is None
    assert slot.gradient.tolist() == [259.0] * 7 and slot.filled
    zero_unreached(bucket)
    assert slot.gradient.tolist() == [259.0] * 7
    slot.filled = False
    zero_unreached(bucket)
    assert slot.gradient.tolist() == [0.0] * 7


def test_a_gradient_in_another_layout_arrives_in_the_parameters_order() -> None:
    entry = trained(Tree())["layers.0.matrix"]
    (bucket,) = pack({"matrix": entry}, one_rank(), BUCKET_BYTES)
    fresh = torch.arange(91.0).view(7, 13).T
    entry.tensor.grad = fresh
    take(bucket.slots[0])
    assert torch.equal(bucket.gradients[:91], fresh.reshape(-1))


def test_no_parameters_and_empty_parameters_are_no_error() -> None:
    assert pack({}, one_rank(), BUCKET_BYTES) == ()
    spec = replace(trained(Tree())["layers.0.norm"].spec, shape=(0,))
    (bucket,) = pack({"none": Entry(spec=spec, tensor=nn.Parameter(torch.zeros(0)))}, spread(0, 3), BUCKET_BYTES)
    assert bucket.parameters.numel() == bucket.master.numel() == 0
