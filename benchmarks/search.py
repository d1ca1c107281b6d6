"""What a search finds for every published row: `python benchmarks/search.py [MODEL …]` prints a table for docs/throughput.md.

Each row is a set-up with a published figure (models/*/presets.py). The search keeps its batch, its sequences and its recipe. Tokens a
second are of one GPU: published, predicted of the published mapping as it stands, and predicted of what the search finds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from core.config.family import Family, Preset, all_families, find_family
from core.config.run import RunConfig
from launch.plan.search import search
from launch.request import Request, new_run

GIB = 2**30
# What changes how exactly a model is trained: the figure is of this recipe.
FIXED = frozenset({"precision.recipe"})


def rows(families: tuple[Family, ...]) -> Iterator[tuple[Family, Preset, RunConfig]]:
    """Every set-up with a figure, as a run on its own number of GPUs."""
    for family in families:
        for preset in family.presets:
            if preset.figure is not None and preset.figure.tokens_per_second is not None:
                asked = Request(size=preset.size, hardware=preset.hardware, preset=preset.name)
                yield family, preset, new_run(asked, family).run


def main() -> None:
    """Print a line for each row."""
    families = tuple(map(find_family, sys.argv[1:])) or all_families()
    print(
        f"{'set-up':<58} {'published':>9} {'planned':>9} {'free GiB':>8} {'found':>9} {'free GiB':>8} {'seconds':>7}  mapping"
    )
    for family, preset, run in rows(families):
        begun = time.perf_counter()
        result = search(run, run.ranks, fixed=FIXED)
        seconds = time.perf_counter() - begun
        name = f"{family.name} {preset.size} {preset.ranks} {preset.hardware} {preset.name}"
        assert preset.figure is not None and preset.figure.tokens_per_second is not None
        own, best = result.begun, result.found[0] if result.found else None
        planned = ("-", "-") if own is None else (f"{own.tokens_per_second:,.0f}", f"{own.headroom / GIB:,.1f}")
        found = ("-", "-") if best is None else (f"{best.tokens_per_second:,.0f}", f"{best.headroom / GIB:,.1f}")
        mapping = "nothing fits" if best is None else best.setup.mapping
        numbers = (
            f"{preset.figure.tokens_per_second:>9,.0f} {planned[0]:>9} {planned[1]:>8} {found[0]:>9} {found[1]:>8}"
        )
        print(f"{name:<58} {numbers} {seconds:>7.1f}  {mapping}", flush=True)


if __name__ == "__main__":
    main()
