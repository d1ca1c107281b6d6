"""The design, proved from the sources; and every rule shown able to fail on a small bad example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import architecture as rules
from tests.architecture import Rule, Sources, loads_without_torch, parse, read_repository

ROOT = Path(__file__).resolve().parent.parent

RULES: tuple[Rule, ...] = (
    rules.imports_point_down,
    rules.imports_form_no_circle,
    rules.imports_are_static,
    rules.light_modules_do_not_name_torch,
    rules.nothing_is_global,
    rules.declarations_are_frozen,
    rules.modules_hold_no_state,
    rules.nothing_asks_for_attributes,
    rules.environment_is_read_at_the_edge,
    rules.no_model_is_named,
    rules.files_are_short,
    rules.functions_are_short,
)

FROZEN = "@dataclass(frozen=True, kw_only=True)\nclass A:\n"

# Each breaks the rule exactly once; the second text is what the message must say.
BAD: list[tuple[Rule, dict[str, str], str]] = [
    (rules.imports_point_down, {"core/moe/a.py": "import launch.cli"}, "core/moe/a.py:1: layer moe imports launch.cli"),
    (
        rules.imports_point_down,
        {"core/config/a.py": "def f():\n    from core.moe import b"},
        "a.py:2: layer config imports",
    ),
    (
        rules.imports_point_down,
        {"core/state/a.py": "from ..moe.b import c"},
        "imports core.moe.b of the higher layer moe",
    ),
    (
        rules.imports_point_down,
        {"core/state/a.py": "from core import moe", "core/moe/__init__.py": ""},
        "imports core.moe",
    ),
    (
        rules.imports_point_down,
        {"ckpt/a.py": "if TYPE_CHECKING:\n    import models.x"},
        "a.py:2: layer ckpt imports models.x",
    ),
    (
        rules.imports_point_down,
        {"core/errors.py": "from core.config.run import X"},
        "layer errors imports core.config.run",
    ),
    (rules.imports_point_down, {"core/helpers/a.py": ""}, "core/helpers/a.py: lies in no layer"),
    (rules.imports_point_down, {"launch/a.py": "from tests.ranks import Ranks"}, "imports tests.ranks"),
    (rules.imports_form_no_circle, {"core/moe/a.py": "from core.moe.a import x"}, "core.moe.a → core.moe.a"),
    (
        rules.imports_form_no_circle,
        {
            "core/moe/a.py": "from core.moe import b",
            "core/moe/b.py": "def f():\n    import core.moe.c",
            "core/moe/c.py": "from .a import x",
            "core/moe/__init__.py": "",
        },
        "core.moe.a → core.moe.b → core.moe.c → core.moe.a",
    ),
    (rules.imports_are_static, {"launch/a.py": "importlib.import_module(name)"}, "launch/a.py:1"),
    (rules.imports_are_static, {"core/moe/a.py": "x = __import__('y')"}, "core/moe/a.py:1"),
    (rules.light_modules_do_not_name_torch, {"core/check/a.py": "from torch.nn import Linear"}, "core/check/a.py:1"),
    (rules.light_modules_do_not_name_torch, {"models/x/a.py": "def f():\n    import torch"}, "models/x/a.py:2"),
    (
        rules.light_modules_do_not_name_torch,
        {"launch/backends/local.py": "try:\n    import torch\nexcept: 0"},
        "local.py:2",
    ),
    (rules.nothing_is_global, {"benchmarks/a.py": "def f():\n    global x\n    x = 1"}, "benchmarks/a.py:2: global x"),
    (
        rules.declarations_are_frozen,
        {"core/config/a.py": "@dataclass(frozen=True)\nclass A: pass"},
        "A without kw_only=True",
    ),
    (
        rules.declarations_are_frozen,
        {"models/x/a.py": "@dataclass(kw_only=True)\nclass A: pass"},
        "A without frozen=True",
    ),
    (
        rules.declarations_are_frozen,
        {"core/config/a.py": FROZEN + "    x: tuple[list[int], ...]"},
        "a.py:3: field of A is a list",
    ),
    (
        rules.declarations_are_frozen,
        {"models/x/a.py": FROZEN + "    x: 'dict[str, int] | None'"},
        "field of A is a dict",
    ),
    (rules.declarations_are_frozen, {"models/x/a.py": FROZEN + "    x: typing.Set[int]"}, "field of A is a Set"),
    (rules.modules_hold_no_state, {"core/moe/a.py": "cache = {}"}, "core/moe/a.py:1: cache is mutable"),
    (
        rules.modules_hold_no_state,
        {"core/moe/a.py": "if True:\n    seen: set[int] = set()"},
        "core/moe/a.py:2: seen is mutable",
    ),
    (
        rules.modules_hold_no_state,
        {"ckpt/a.py": "class A:\n    found = [x for x in y]"},
        "ckpt/a.py:2: found is mutable",
    ),
    (
        rules.modules_hold_no_state,
        {"ckpt/a.py": "X = {}\ndef f():\n    X['a'] = 1"},
        "ckpt/a.py:3: f changes the constant X",
    ),
    (
        rules.modules_hold_no_state,
        {"ckpt/a.py": "X = []\ndef f():\n    X.append(1)"},
        "ckpt/a.py:3: f changes the constant X",
    ),
    (rules.nothing_asks_for_attributes, {"launch/a.py": "hasattr(x, 'y')"}, "launch/a.py:1"),
    (rules.environment_is_read_at_the_edge, {"core/moe/a.py": "os.environ['X']"}, "core/moe/a.py:1"),
    (rules.environment_is_read_at_the_edge, {"benchmarks/a.py": "from os import getenv"}, "benchmarks/a.py:1"),
    (rules.environment_is_read_at_the_edge, {"core/kernels/permute.py": "os.getenv('X')"}, "core/kernels/permute.py:1"),
    (rules.no_model_is_named, {"core/moe/a.py": "if model == 'Mixtral': pass"}, "names a model: 'Mixtral'"),
    (rules.no_model_is_named, {"ckpt/a.py": "def f():\n    return f'{x}-deepseek_v3'"}, "ckpt/a.py:2"),
    (rules.files_are_short, {"tests/a.py": "\n" * 501}, "tests/a.py: 501 lines"),
    (rules.functions_are_short, {"models/x/a.py": "def f():" + "\n    x = 1" * 60}, "models/x/a.py:1: f has 61 lines"),
    (
        rules.functions_are_short,
        {"ckpt/a.py": "class A:\n  async def f():" + "\n    x = 1" * 60},
        "ckpt/a.py:2: f has 61",
    ),
]

# What looks alike and is right.
GOOD: list[tuple[Rule, dict[str, str]]] = [
    (rules.imports_point_down, {"core/moe/a.py": "import torch\nfrom core.moe.dispatch import x\nimport core.errors"}),
    (
        rules.imports_point_down,
        {"launch/a.py": "import ckpt.save, models.x, core.training.loop", "core/__init__.py": ""},
    ),
    (
        rules.imports_form_no_circle,
        {"core/moe/a.py": "import core.moe.b, core.moe.c", "core/moe/b.py": "import core.moe.c"},
    ),
    (rules.imports_are_static, {"core/config/family.py": "importlib.import_module(name)"}),
    (rules.light_modules_do_not_name_torch, {"core/moe/a.py": "import torch", "core/check/a.py": "import torchless"}),
    (rules.light_modules_do_not_name_torch, {"launch/backends/local.py": "def f():\n    import torch"}),
    (
        rules.declarations_are_frozen,
        {"core/config/a.py": FROZEN + "    x: tuple[Literal['list'], ...]\n    y: Mapping[str, int]"},
    ),
    (rules.declarations_are_frozen, {"core/moe/a.py": "@dataclass\nclass A:\n    x: list[int]"}),
    (
        rules.modules_hold_no_state,
        {"core/moe/a.py": "_X = {}\n__all__ = ['f']\ndef f():\n    x = []\n    x.append(_X['a'])"},
    ),
    (
        rules.modules_hold_no_state,
        {"core/moe/a.py": "x = (1, 2)\nX = {}\nX |= {1: 2}\nclass A:\n    y: dict = field()"},
    ),
    (
        rules.environment_is_read_at_the_edge,
        {"launch/plan/a.py": "os.environ", "core/kernels/backend.py": "os.environ"},
    ),
    (rules.environment_is_read_at_the_edge, {"tests/a.py": "os.environ", "core/moe/a.py": "self.environ"}),
    (rules.no_model_is_named, {"core/moe/a.py": "'''As in DeepSeek-V3.'''\nx = 1  # Qwen\n'''Mixtral, too.'''"}),
    (rules.no_model_is_named, {"models/mixtral/a.py": "NAME = 'mixtral'"}),
    (rules.files_are_short, {"core/moe/a.py": "\n" * 500}),
    (rules.functions_are_short, {"core/moe/a.py": "def f():" + "\n    x = 1" * 59}),
]


def _named(case: tuple[object, ...]) -> str:
    return getattr(case[0], "__name__", "")


@pytest.fixture(scope="module")
def repository() -> Sources:
    return read_repository(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps(rule: Rule, repository: Sources) -> None:
    assert not (broken := rule(repository)), "\n" + "\n".join(broken)


@pytest.mark.parametrize(("rule", "files", "said"), BAD, ids=map(_named, BAD))
def test_a_bad_example_breaks(rule: Rule, files: dict[str, str], said: str) -> None:
    (message,) = rule(parse(files))
    assert said in message


@pytest.mark.parametrize(("rule", "files"), GOOD, ids=map(_named, GOOD))
def test_a_good_example_keeps(rule: Rule, files: dict[str, str]) -> None:
    assert rule(parse(files)) == []


def test_every_rule_is_shown_able_to_fail() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_the_sources_that_are_checked_are_the_repository(repository: Sources) -> None:
    paths = {source.path for source in repository}
    assert {"core/errors.py", "core/parallel/mesh.py", "tests/test_architecture.py", "launch/__init__.py"} <= paths


def _loaded(modules: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that imports `modules` of `folder` in turn, until one of them has loaded torch."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch')\n"
    )
    command = [sys.executable, "-c", program, *modules]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_light_modules_load_without_torch(repository: Sources) -> None:
    light = [source.module for source in repository if loads_without_torch(source)]
    assert {"core.errors", "core.config.run", "core.parallel.mesh", "core.state.box"} <= set(light)
    answer = _loaded(light, ROOT)
    assert answer.returncode == 0, answer.stderr


def test_a_module_that_loads_torch_is_found_out(tmp_path: Path) -> None:
    for name, text in (("torch", ""), ("light", ""), ("middle", "import light"), ("heavy", "import middle, torch")):
        (tmp_path / f"{name}.py").write_text(text)
    answer = _loaded(["light", "middle", "heavy"], tmp_path)
    assert (answer.returncode, answer.stderr.strip()) == (1, "heavy loads torch")
