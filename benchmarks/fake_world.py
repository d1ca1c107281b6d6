"""Every rank of the report's nine published mappings, checked on one core without any GPU: do their pieces cover the model?

For each mapping on its own model, and each Qwen3 mapping on DeepSeek-V3 too: ranks, seconds, different sets of pieces among the
ranks, parameters of the rank that holds most, what it keeps of the optimizer (its 1 / copies of each piece), and faults. The model
is covered where every tensor is tiled once and every piece lies on as many ranks as it has copies. --every builds the stage of each
rank that differs from others, instead of one layer of each kind for it and one stage for each place along pp.

    python -m benchmarks.fake_world [--every] [--only h100]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from benchmarks.published_mappings import NINE, PublishedMapping, on_deepseek
from core.state.cover import cover_faults
from core.state.sharded import ShardedTensor
from core.transformer.fake import FakeStages, canonical_shapes

COLUMNS = "{:<45} {:>6} {:>8} {:>9} {:>15} {:>15} {:>7}"


def main() -> None:
    """Check and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", action="store_true", help="build the stage of every rank that differs from others")
    parser.add_argument("--only", default="", help="mappings whose name holds this text")
    asked = parser.parse_args()
    print(COLUMNS.format("mapping", "ranks", "seconds", "different", "most parameters", "its optimizer's", "faults"))
    for mapping in dict.fromkeys((*NINE, *map(on_deepseek, NINE))):
        if asked.only in mapping.name:
            _check(mapping, asked.every)


def _check(mapping: PublishedMapping, every: bool) -> None:
    start = time.perf_counter()
    stages = FakeStages(mapping.model, mapping.parallel, mapping.ranks, every_stage=every)
    shares: list[tuple[int, int]] = []
    faults = cover_faults(canonical_shapes(mapping.model), _all_pieces(stages, mapping.ranks, shares))
    seconds = time.perf_counter() - start
    most, kept = max(shares)
    row = (mapping.name, mapping.ranks, f"{seconds:.1f}", stages.distinct, f"{most:,}", f"{kept:,}", len(faults))
    print(COLUMNS.format(*row), flush=True)
    for fault in faults[:20]:
        print(f"    {fault}")


def _all_pieces(stages: FakeStages, ranks: int, shares: list[tuple[int, int]]) -> Iterator[tuple[int, ShardedTensor]]:
    """Every rank's pieces; appends to `shares` how many elements each rank holds, and its part of them among all copies."""
    for rank in range(ranks):
        pieces = stages.pieces(rank)
        held = sum(piece.box.elements for piece in pieces.values())
        shares.append((held, sum(piece.box.elements // piece.copies for piece in pieces.values())))
        yield from ((rank, piece) for piece in pieces.values())


if __name__ == "__main__":
    main()
