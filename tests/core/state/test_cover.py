"""Whether pieces cover tensors once per set of copies: each way in which they can fail to, said with tensor and ranks."""

from __future__ import annotations

import pytest
import torch

from core.state.box import Box
from core.state.cover import cover_faults
from core.state.sharded import ShardedTensor

NAME = "layers.10.attention.key.weight"
SHAPES = {NAME: (6, 5)}
Held = tuple[int, ShardedTensor]


def rows(rank: int, first: int, count: int, copy: int = 0, copies: int = 1) -> Held:
    """Some rows of the one tensor, on a rank."""
    data = torch.empty(count, 5, device="meta")
    box = Box(offset=(first, 0), shape=(count, 5))
    return rank, ShardedTensor(name=NAME, shape=(6, 5), box=box, data=data, copy=copy, copies=copies)


def test_a_tensor_cut_unevenly_in_copies_of_different_numbers_is_covered() -> None:
    held = [rows(0, 0, 4, 0, 2), rows(1, 4, 2), rows(7, 0, 4, 1, 2)]
    assert cover_faults(SHAPES, held) == ()
    assert cover_faults(SHAPES, reversed(held)) == ()


def test_no_tensors_and_tensors_without_elements_need_no_pieces() -> None:
    assert cover_faults({}, []) == ()
    assert cover_faults({"head.weight": (0, 5)}, []) == ()


def test_pieces_without_elements_count_for_nothing() -> None:
    assert cover_faults(SHAPES, [rows(0, 0, 0), rows(1, 0, 6), rows(2, 0, 0), rows(3, 6, 0)]) == ()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([], "lies on no rank"),
        ([rows(3, 0, 4)], "the element at (4, 0) is held by no piece, and its pieces lie on rank 3"),
        ([rows(3, 0, 4), rows(1, 3, 3)], "the element at (3, 0) is held 2 times, and its pieces lie on ranks 1, 3"),
        (
            [rows(3, 0, 7)],
            "offset (0, 0) shape (7, 5) reaches outside offset (0, 0) shape (6, 5), and its pieces lie on rank 3",
        ),
        (
            [rows(3, 0, 6), rows(4, 0, 6)],
            "the piece at (0, 0) of shape (6, 5) lies on ranks 3, 4 as copy 0, 0 of 1, where every copy from 0 has to be on one rank",
        ),
        (
            [rows(3, 0, 6, 0, 2)],
            "the piece at (0, 0) of shape (6, 5) lies on rank 3 as copy 0 of 2, where every copy from 0 has to be on one rank",
        ),
        (
            [rows(3, 0, 6, 0, 2), rows(4, 0, 6, 1, 3)],
            "the piece at (0, 0) of shape (6, 5) lies on ranks 3, 4 as copy 0, 1 of 2 or 3, where every copy from 0 has to be on one rank",
        ),
        (
            [rows(r, 0, 6, max(r, 1), 10) for r in range(10)],
            "the piece at (0, 0) of shape (6, 5) lies on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more as copy 1, 1, 2, 3, 4, 5, 6, 7 "
            "and 2 more of 10, where every copy from 0 has to be on one rank",
        ),
    ],
)
def test_a_fault_names_the_tensor_and_the_ranks(held: list[Held], said: str) -> None:
    assert cover_faults(SHAPES, held) == (f"{NAME}: {said}",)


def test_strange_tensors_and_shapes_are_faults_of_the_rank_that_holds_them() -> None:
    rank, piece = rows(5, 0, 6)
    assert cover_faults({}, [(rank, piece)]) == (f"{NAME}: rank 5 holds it, and there is no such tensor",)
    taken, missing = cover_faults({NAME: (5, 6)}, [(rank, piece)])
    assert taken == f"{NAME}: rank 5 takes it for (6, 5), and it is (5, 6)"
    assert missing == f"{NAME}: lies on no rank"


def test_every_broken_tensor_is_named() -> None:
    faults = cover_faults(SHAPES | {"a": (1,), "b": ()}, [rows(0, 0, 5)])
    assert [fault.split(":")[0] for fault in faults] == [NAME, "a", "b"]
