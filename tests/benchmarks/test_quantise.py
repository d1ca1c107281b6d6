"""The script that times rounding a matrix and back, on a small one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import quantise


def test_every_format_has_a_line_and_a_missing_peer_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "find_spec", lambda _: None)
    table = quantise.lines(torch.ones(128, 256), 2)
    assert "torchao: not installed" in table
    assert [line.split("\t")[0] for line in table[3:]] == list(quantise.FORMATS)
    assert all(line.split("\t")[2] == "-" for line in table[3:])


def test_a_peer_is_timed_in_turn_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def peer(x: torch.Tensor) -> torch.Tensor:
        turns.append("peer")
        return x + 0.5

    monkeypatch.setattr(quantise, "torchao_casts", lambda: ({"MXFP8": peer}, None))
    table = quantise.lines(torch.ones(128, 256), 3)
    line = next(line for line in table if line.startswith("MXFP8")).split("\t")
    assert len(turns) == 3 and line[3].endswith("x") and line[4] == "0.5"
