"""How much room experts have, as a word on a command line."""

from __future__ import annotations

import pytest

from core.config.architecture import Capacity
from core.config.capacity_text import capacity_text, parse_capacity
from core.config.router_text import TextError


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("none", None),
        ("1.25", Capacity(factor=1.25)),
        ("1e-1:pad", Capacity(factor=0.1, pad=True)),
        ("2:position", Capacity(factor=2.0, drop="position")),
        ("2:weight", Capacity(factor=2.0)),
        ("0.7:position:pad", Capacity(factor=0.7, drop="position", pad=True)),
    ],
)
def test_a_word_says_a_capacity_and_a_capacity_its_word(text: str, capacity: Capacity | None) -> None:
    assert parse_capacity(text) == capacity
    assert parse_capacity(capacity_text(capacity)) == capacity


@pytest.mark.parametrize(
    "text", ["", "pad", "nan", "inf:pad", "1:", "1:first", "1:pad:weight", "1:weight:position", "1:pad:pad"]
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(TextError):
        parse_capacity(text)
