"""The page of a plan: whole without a network, and in a browser it counts memory as the plan does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from core.config.mapping import ParallelConfig
from core.config.memory import MemoryConfig
from core.config.override import settings
from core.config.run import RunConfig
from core.errors import RequestError
from launch.plan.make import make_plan
from launch.plan.memory import MemoryPlanner
from launch.plan.page import write_page
from launch.plan.result import MemoryParts, Plan
from tests.launch.plan.test_search import a_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VOID = {"meta", "input", "br", "img", "rect", "link"}
RUN = replace(
    a_run("deepseek_v3", "16b", "h100", 16, ParallelConfig(tp=2, pp=4, vpp=3, ep=4, layout=None)),
    memory=MemoryConfig(recompute=("layernorm", "moe_act")),
)


@pytest.fixture(scope="module")
def planner() -> MemoryPlanner:
    return MemoryPlanner()


@pytest.fixture(scope="module")
def plan(planner: MemoryPlanner) -> Plan:
    return make_plan(RUN, planner)


@pytest.fixture(scope="module")
def page(planner: MemoryPlanner, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    origins = {key: "preset" for key in settings(RUN)} | {"parallel.tp": "--set", "ranks": "--ranks <script>"}
    write_page(RUN, origins, plan, path, planner)
    return path


class Elements(HTMLParser):
    """Every element with its attributes, and whether what was opened was closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def elements(page: Path) -> list[tuple[str, dict[str, str | None]]]:
    """Of the page, which has to be well formed."""
    parser = Elements()
    parser.feed(page.read_text(encoding="utf-8"))
    assert parser.open == []
    return parser.found


def book_of(page: Path) -> dict[str, Any]:
    """The numbers that the page counts with."""
    found = re.search(r'id="book">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    book: dict[str, Any] = json.loads(found[1])
    return book


def test_the_page_is_one_file_that_asks_for_nothing_else(page: Path) -> None:
    found = elements(page)
    assert not any({"src", "href"} & attributes.keys() for _, attributes in found)
    text = page.read_text(encoding="utf-8")
    assert "{{" not in text and not re.search(r"https?://|@import|url\(", text)


def test_every_setting_stands_in_the_page_with_where_it_comes_from(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for key in settings(RUN):
        assert f"<td><code>{key}</code></td>" in text
    assert '<code>parallel.tp</code></td><td><code>2</code></td><td class="origin set">--set</td>' in text
    assert "--ranks &lt;script&gt;" in text and "--ranks <script>" not in text


def test_what_can_be_moved_has_a_name_for_those_who_cannot_see_it(page: Path) -> None:
    found = elements(page)
    labelled = {attributes["for"] for tag, attributes in found if tag == "label" and "for" in attributes}
    sliders = {a["id"] for tag, a in found if tag == "input" and a.get("type") == "range"}
    names = ("tp", "cp", "pp", "vpp", "ep", "microbatch", "batch")
    assert sliders == {f"slide-{name}" for name in names} and sliders <= labelled
    assert all(a.get("aria-label") for tag, a in found if a.get("role") == "img")


def test_the_timeline_has_a_lane_for_each_rank_and_a_box_for_each_action(page: Path) -> None:
    found = elements(page)
    lanes = [a for tag, a in found if tag == "rect" and a.get("class") == "lane"]
    boxes = [a for tag, a in found if tag == "rect" and a.get("class") != "lane"]
    # 256 sequences over 2 replicas: 128 microbatches through 3 chunks on 4 ranks are too many, so both ends are shown.
    assert len(lanes) == 2 * 4 and 1000 <= len(boxes) <= 1600
    for box in boxes:
        assert box["x"] and float(box["x"]) >= 0 and float(box["x"]) + float(box["width"] or 0) <= 1181


def test_the_book_of_numbers_offers_only_what_divides(page: Path) -> None:
    book = book_of(page)
    assert book["planned"] == {
        **{"tp": 2, "cp": 1, "pp": 4, "vpp": 3, "ep": 4, "dp": 2, "microbatch": 1, "batch": 256},
        "recompute": ["layernorm", "moe_act"],
    }
    assert book["options"]["tp"] == [1, 2, 4, 8] and book["options"]["ep"] == [1, 2, 4, 8, 16]
    for pp, chunks in book["layouts"].items():
        for vpp, layout in chunks.items():
            assert len(layout["stages"]) == int(pp) * int(vpp)
            assert [i for stage in layout["stages"] for i in stage["layers"]] == list(range(len(RUN.model.layers)))


def test_a_page_that_cannot_be_written_is_said_so(planner: MemoryPlanner, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written"):
        write_page(RUN, {}, plan, tmp_path / "no" / "plan.html", planner)


def browser() -> str:
    """A Chromium to drive, or a reason to skip."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("needs Chromium or Chrome on the PATH (Debian: apt-get install chromium)")
    return found


def shown(page: Path, place: str, folder: Path) -> tuple[str, list[dict[str, int]]]:
    """The verdict and the bytes of every part that a browser shows with the sliders at `place`."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    done = subprocess.run(
        [*command, f"{page.as_uri()}#{place}"], capture_output=True, text=True, timeout=50, check=True
    )
    verdict = re.search(r'id="verdict"[^>]*>([^<]*)<', done.stdout)
    assert verdict is not None
    rows = re.findall(r"<tr><td>\d+</td>(.*?)</tr>", done.stdout)
    cells = [re.findall(r'data-part="(\w+)" data-bytes="(\d+)"', row) for row in rows]
    return verdict[1], [{part: int(count) for part, count in row} for row in cells if row]


def moved(page: Path, parallel: dict[str, int]) -> RunConfig:
    """The run with another mapping, in the layout that the page has for it."""
    text = book_of(page)["layouts"][str(parallel.get("pp", 4))][str(parallel.get("vpp", 3))]["text"]
    return replace(RUN, parallel=replace(RUN.parallel, **parallel, layout=text))  # type: ignore[arg-type]


def test_a_browser_shows_the_plan_s_own_memory_part_by_part(page: Path, plan: Plan, tmp_path: Path) -> None:
    verdict, rows = shown(page, "", tmp_path)
    assert verdict.startswith("Fits: ") and len(rows) == len(plan.memory) == 4
    for row, memory in zip(rows, plan.memory, strict=True):
        balanced = memory.balanced
        for part in MemoryParts.__dataclass_fields__:
            assert row[part] == pytest.approx(vars(balanced)[part], abs=0.01 * balanced.total)
        assert row["total"] == pytest.approx(balanced.total, rel=0.01)


@pytest.mark.parametrize(
    ("place", "parallel", "microbatch", "recompute"),
    [
        ("tp=4&pp=2&vpp=4&ep=8", {"tp": 4, "pp": 2, "vpp": 4, "ep": 8}, 1, ("layernorm", "moe_act")),
        ("tp=1&microbatch=2&recompute=mlp,mla_up_proj,core_attn", {"tp": 1}, 2, ("core_attn", "mla_up_proj", "mlp")),
        ("ep=2&recompute=full", {"ep": 2}, 1, ("full",)),
    ],
)
def test_a_browser_counts_other_mappings_as_the_plan_does(
    page: Path,
    planner: MemoryPlanner,
    tmp_path: Path,
    place: str,
    parallel: dict[str, int],
    microbatch: int,
    recompute: tuple[str, ...],
) -> None:
    run = replace(
        moved(page, parallel),
        train=replace(RUN.train, microbatch=microbatch),
        memory=MemoryConfig(recompute=recompute),  # type: ignore[arg-type]
    )
    _, rows = shown(page, place, tmp_path)
    for row, memory in zip(rows, planner.of(run), strict=True):
        assert row["total"] == pytest.approx(memory.balanced.total, rel=0.02)


def test_a_browser_says_which_mapping_cannot_run(page: Path, tmp_path: Path) -> None:
    verdict, rows = shown(page, "tp=8&pp=8", tmp_path)
    assert verdict == "Cannot run: tp × cp × pp = 64 does not divide 16 ranks." and rows == []
