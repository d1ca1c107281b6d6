"""The benchmark of recipes: which runs are done again, and what its table says of those that differ, diverged, or never ran."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import convergence
from benchmarks.convergence import (
    BASELINE,
    BEGIN,
    END,
    command,
    compared,
    is_complete,
    markdown,
    table_rows,
    write_docs,
)
from core.errors import RequestError
from launch.folder import RunFile, write_json, write_run
from launch.request import Request, new_run
from tests.launch.families import FAMILY

RUN = new_run(Request(), FAMILY).run


def a_run(out: Path, name: str, losses: list[float | None], ended: str = "finished") -> Path:
    folder = out / name
    folder.mkdir(parents=True)
    typed = ("launch", *command(name, folder, len(losses)))
    write_run(folder, RunFile(run=RUN, prepared="/p", identity="i", command=typed, versions={}))
    lines = [{"step": step, "loss": loss, "tokens": 7 * step} for step, loss in enumerate(losses, start=1)]
    lines[-1]["validation_loss"] = losses[-1]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder / "summary.json", {"ended": ended, "seconds": 61.4})
    return folder


def test_the_table_says_who_is_within_the_limit_and_who_did_not_run(tmp_path: Path) -> None:
    names = {BASELINE: [3.0] * 20, "fp8_current": [9.0] * 18 + [3.015] * 2, "mxfp8": [3.0] * 19 + [None]}
    names["float32"] = [3.5] * 20
    names["fp8_blockwise"] = [3.0] * 18 + [2.97] * 2
    folders = {name: a_run(tmp_path, name, losses) for name, losses in names.items()}
    _, comparison = compared(list(folders.values()))
    text = markdown(table_rows(comparison, {**folders, "nvfp4": tmp_path / "nvfp4"}), 20)
    assert text.splitlines()[0].startswith("| recipe | loss after 20 steps | to bfloat16 |")
    assert text.splitlines()[2:] == [
        "| bfloat16 | 3.0000 |  | 3.0000 |  |  | 61 |",
        "| fp8_current | 3.0150 | +0.0150 | 3.0150 | +0.0150 | yes | 61 |",
        "| mxfp8 | nan | +nan | nan | +nan | no | 61 |",
        "| float32 | 3.5000 | +0.5000 | 3.5000 | +0.5000 |  | 61 |",
        "| fp8_blockwise | 2.9700 | -0.0300 | 2.9700 | -0.0300 | no | 61 |",
        "| nvfp4 | did not run | | | | no | |",
    ]


def test_a_run_is_complete_that_finished_the_very_same_command(tmp_path: Path) -> None:
    folder = a_run(tmp_path, "mxfp8", [3.0] * 5)
    assert is_complete("mxfp8", folder, 5)
    assert not is_complete("mxfp8", folder, 6)
    assert not is_complete("nvfp4", folder, 5)
    assert not is_complete("mxfp8", tmp_path / "none", 5)
    assert not is_complete("mxfp8", a_run(tmp_path / "2", "mxfp8", [3.0] * 5, ended="failed"), 5)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert not is_complete("mxfp8", folder, 5)


def test_the_baseline_alone_is_beside_itself(tmp_path: Path) -> None:
    folder = a_run(tmp_path, BASELINE, [3.0] * 2)
    runs, comparison = compared([folder])
    assert len(runs) == 1
    assert [row.within for row in table_rows(comparison, {BASELINE: folder})] == [True]


def test_the_table_replaces_what_is_between_the_markers_and_nothing_else(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    picture.write_bytes(b"png")
    page = tmp_path / "docs" / "convergence.md"
    page.parent.mkdir()
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter {END[:4]}\n")
    write_docs(page.parent, r"new \1", picture)
    assert page.read_text().startswith(f"before\n{BEGIN}\nnew \\1\n\n![")
    assert page.read_text().endswith(f"(convergence.png)\n{END}\nafter {END[:4]}\n")
    assert (page.parent / "convergence.png").read_bytes() == b"png"
    page.write_text("no markers")
    with pytest.raises(RequestError, match="between which the table belongs"):
        write_docs(page.parent, "new", picture)


def test_the_page_of_the_repository_has_the_markers(tmp_path: Path) -> None:
    (tmp_path / "convergence.md").write_text((convergence.REPOSITORY / "docs" / "convergence.md").read_text())
    write_docs(tmp_path, "new", tmp_path / "none.png")
    assert f"{BEGIN}\nnew\n{END}" in (tmp_path / "convergence.md").read_text()


def test_every_recipe_is_a_legal_request_of_the_tiny_model() -> None:
    from core.check.precision import check_precision
    from core.config.family import find_family
    from core.config.override import override, parse_assignment

    run = new_run(Request(), find_family("mixtral")).run
    for name in ("fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"):
        typed = command(name, Path("out"), 300)
        settings = [parse_assignment(text) for before, text in pairwise(typed) if before == "--set"]
        wanted, faults = override(run, settings)
        assert not faults and not list(check_precision(wanted))
        assert wanted.precision.recipe is not None and wanted.precision.recipe.name == name
