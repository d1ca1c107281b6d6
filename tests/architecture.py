"""The rules of the design as functions from sources to sentences about what breaks them; nothing checked is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

LAYERS = (
    *("errors", "config", "parallel", "pipeline", "check", "state", "kernels", "precision", "memory", "layers"),
    *("attention", "moe", "transformer", "optim", "data", "training", "ckpt", "models", "launch"),
)
PACKAGES = ("core", "ckpt", "models", "launch")
OUTSIDE = ("tests", "benchmarks")

# What answers `--help`, checks a request and plans a mapping: it loads without torch.
WITHOUT_TORCH = (
    *("core/errors.py", "core/config/*", "core/parallel/mesh.py", "core/check/*"),
    "core/parallel/traffic.py",
    *("core/pipeline/action.py", "core/pipeline/layout.py", "core/pipeline/schedule.py", "core/pipeline/interleave.py"),
    *("core/pipeline/transfers.py", "core/pipeline/prove.py", "core/pipeline/simulate.py"),
    *("core/state/box.py", "core/state/rules.py", "core/state/spec.py", "core/data/*", "core/training/metrics.py"),
    *("ckpt/manifest.py", "ckpt/store/protocol.py", "ckpt/cli.py", "models/*"),
    *("launch/profiles.py", "launch/request.py", "launch/cli.py", "launch/backends/*"),
    *("launch/describe.py", "launch/schedule.py", "launch/schedule_picture.py"),
)
TORCH_IN_FUNCTIONS = ("launch/backends/local.py",)  # it starts ranks when asked to, and only then
FINDS_MODELS = "core/config/family.py"  # the one dynamic import: a model package by its name
READS_ENVIRONMENT = ("launch/*", "core/kernels/backend.py")

LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MODEL_NAMES = re.compile("deepseek|qwen|mixtral", re.IGNORECASE)
CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*|__all__")
MUTABLE_TYPES = frozenset(["list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"])
MUTABLE_ANNOTATIONS = MUTABLE_TYPES | frozenset(
    ["List", "Dict", "Set", "MutableSequence", "MutableMapping", "MutableSet"]
)
MUTATING = frozenset(
    [
        "add",
        "append",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "reverse",
        "setdefault",
        "sort",
        "update",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One Python file of the repository; `path` is relative to its root, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The name under which it is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def top(self) -> str:
        """The folder of the root that it lies in."""
        return self.path.split("/")[0]


Sources = tuple[Source, ...]
Rule = Callable[[Sources], list[str]]
Node = TypeVar("Node", bound=ast.AST)


def parse(files: Mapping[str, str]) -> Sources:
    """Sources from path → text."""
    return tuple(Source(path=path, text=text, tree=ast.parse(text)) for path, text in sorted(files.items()))


def read_repository(root: Path) -> Sources:
    """Every Python file of the packages, the tests and the benchmarks under `root`."""
    folders = (root / folder for folder in (*PACKAGES, *OUTSIDE))
    paths = (path for folder in folders for path in folder.rglob("*.py"))
    return parse({path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def loads_without_torch(source: Source) -> bool:
    """Whether the design promises that this module loads without torch."""
    return any(fnmatch(source.path, pattern) for pattern in WITHOUT_TORCH)


def imports_point_down(sources: Sources) -> list[str]:
    """Every import, also inside functions, of the own layer or a lower one."""
    found = []
    for source in _packages(sources):
        layer = _layer(source.module)
        if layer is None:
            found.append(f"{source.path}: lies in no layer of the design")
            continue
        for line, target in _imports(source, {s.module for s in sources}):
            other = _layer(target)
            if target.split(".")[0] in OUTSIDE:
                found.append(f"{source.path}:{line}: imports {target}, which is no part of the product")
            elif target.split(".")[0] in PACKAGES and (other is None or LAYERS.index(other) > LAYERS.index(layer)):
                found.append(f"{source.path}:{line}: layer {layer} imports {target} of the higher layer {other}")
    return found


def imports_form_no_circle(sources: Sources) -> list[str]:
    """No module imports itself through others."""
    modules = {source.module for source in sources}
    graph = {s.module: sorted({t for _, t in _imports(s, modules) if t in modules}) for s in _packages(sources)}
    done: set[str] = set()
    found: list[str] = []

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            found.append("imports in a circle: " + " → ".join((*trail[trail.index(module) :], module)))
        elif module not in done:
            for target in graph.get(module, []):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    return found


def imports_are_static(sources: Sources) -> list[str]:
    """No import by a computed name, but for the search of a model package."""
    calls = (
        (source, node)
        for source, node in _nodes(_packages(sources), ast.Call)
        if _name(node.func) in ("import_module", "__import__") and source.path != FINDS_MODELS
    )
    return [f"{source.path}:{node.lineno}: imports by a computed name" for source, node in calls]


def light_modules_do_not_name_torch(sources: Sources) -> list[str]:
    """No import of torch, not even inside a function, in the modules that load without it."""
    found = []
    for source in filter(loads_without_torch, sources):
        top_level = {id(node) for node in _outside_functions(source.tree)}
        for node in _import_nodes(source.tree):
            if "torch" not in {name.split(".")[0] for name in _imported_names(source, node)}:
                continue
            if source.path not in TORCH_IN_FUNCTIONS or id(node) in top_level:
                found.append(f"{source.path}:{node.lineno}: imports torch in a module that is promised to need none")
    return found


def nothing_is_global(sources: Sources) -> list[str]:
    """No `global` statement."""
    return [f"{s.path}:{node.lineno}: global {', '.join(node.names)}" for s, node in _nodes(sources, ast.Global)]


def declarations_are_frozen(sources: Sources) -> list[str]:
    """Dataclasses of the configuration and the models: frozen, keyword-only, without fields that can be changed inside."""
    declared = [s for s in sources if fnmatch(s.path, "core/config/*") or s.top == "models"]
    found = []
    for source, node in _nodes(declared, ast.ClassDef):
        decorators = [d for d in node.decorator_list if _name(d.func if isinstance(d, ast.Call) else d) == "dataclass"]
        if not decorators:
            continue
        said = {k.arg: ast.unparse(k.value) for d in decorators if isinstance(d, ast.Call) for k in d.keywords}
        for option in ("frozen", "kw_only"):
            if said.get(option) != "True":
                found.append(f"{source.path}:{node.lineno}: dataclass {node.name} without {option}=True")
        for item in node.body:
            mutable = MUTABLE_ANNOTATIONS & _names_in(item.annotation) if isinstance(item, ast.AnnAssign) else ()
            found += [f"{source.path}:{item.lineno}: field of {node.name} is a {kind}; use a tuple" for kind in mutable]
    return found


def modules_hold_no_state(sources: Sources) -> list[str]:
    """No list, dict or set at the top of a module or a class but constants, and no function that changes a constant."""
    found = []
    for source in _packages(sources):
        constants = set()
        for target, line in _mutable_assignments(source.tree):
            if CONSTANT.fullmatch(target):
                constants.add(target)
            else:
                found.append(f"{source.path}:{line}: {target} is mutable and belongs to no object")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                changed = ((name, line) for name, line in _changes(node) if name in constants)
                found += [f"{source.path}:{line}: {node.name} changes the constant {name}" for name, line in changed]
    return found


def nothing_asks_for_attributes(sources: Sources) -> list[str]:
    """No `hasattr`."""
    calls = (pair for pair in _nodes(_packages(sources), ast.Call) if _name(pair[1].func) == "hasattr")
    return [f"{source.path}:{node.lineno}: hasattr" for source, node in calls]


def environment_is_read_at_the_edge(sources: Sources) -> list[str]:
    """No environment variable outside the launcher and the choice of kernels."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = []
    for source in sources:
        if source.top == "tests" or any(fnmatch(source.path, pattern) for pattern in READS_ENVIRONMENT):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute):
                used = node.attr in names and _name(node.value) == "os"
            else:
                used = isinstance(node, ast.ImportFrom) and node.module == "os" and not names.isdisjoint(_aliases(node))
            if used:
                assert isinstance(node, ast.expr | ast.stmt)
                found.append(f"{source.path}:{node.lineno}: uses the environment")
    return found


def no_model_is_named(sources: Sources) -> list[str]:
    """No name of a model in the core's and the checkpoints' strings, documentation excepted."""
    found = []
    for source in sources:
        if source.top not in ("core", "ckpt"):
            continue
        prose = {id(n.value) for n in ast.walk(source.tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in prose:
                continue
            if MODEL_NAMES.search(node.value):
                found.append(f"{source.path}:{node.lineno}: names a model: {node.value!r}")
    return found


def files_are_short(sources: Sources) -> list[str]:
    """No file of more than LONGEST_FILE lines."""
    long = ((source.path, len(source.text.splitlines())) for source in sources)
    return [f"{path}: {lines} lines are two ideas" for path, lines in long if lines > LONGEST_FILE]


def functions_are_short(sources: Sources) -> list[str]:
    """No function of more than LONGEST_FUNCTION lines."""
    found = []
    for source in _packages(sources):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    found.append(f"{source.path}:{node.lineno}: {node.name} has {lines} lines")
    return found


def _aliases(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def _packages(sources: Iterable[Source]) -> list[Source]:
    return [source for source in sources if source.top in PACKAGES]


def _nodes(sources: Iterable[Source], kind: type[Node]) -> Iterator[tuple[Source, Node]]:
    """Every node of a kind, with the file that it stands in."""
    return ((source, node) for source in sources for node in ast.walk(source.tree) if isinstance(node, kind))


def _name(node: ast.expr) -> str:
    """The last part of a dotted name: `a.b.c` → `c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _layer(module: str) -> str | None:
    """The layer that a module belongs to, or None where the design knows none. `core` itself is the lowest."""
    parts = module.split(".")
    if parts[0] == "core":
        layer = parts[1] if len(parts) > 1 else LAYERS[0]
        return layer if layer in LAYERS[: LAYERS.index("ckpt")] else None
    return parts[0] if parts[0] in PACKAGES else None


def _import_nodes(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _imported_names(source: Source, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names after resolving dots: `from a.b import c` → `a.b.c`, which may be a module or something in `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
        parts = package.split(".")
        parts = parts[: len(parts) - node.level + 1]
        base = ".".join([*parts, *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _imports(source: Source, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and module of every import; `from a import b` is `a.b` where that is a module, else `a`."""
    for node in _import_nodes(source.tree):
        for name in _imported_names(source, node):
            known = name in modules or isinstance(node, ast.Import)
            yield node.lineno, name if known else name.rpartition(".")[0]


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is loaded."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def _names_in(annotation: ast.expr) -> set[str]:
    """Every type named in an annotation, also in one that is written as a string; not the values of a Literal."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _names_in(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "Literal":
        return set()
    found = {_name(annotation)}
    for child in ast.iter_child_nodes(annotation):
        found |= _names_in(child) if isinstance(child, ast.expr) else set()
    return found


def _mutable_assignments(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and line of each list, dict or set that is made when the module is loaded."""
    for node in _outside_functions(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or not _is_mutable(node.value):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield (target.id if isinstance(target, ast.Name) else ast.unparse(target)), node.lineno


def _is_mutable(value: ast.expr) -> bool:
    literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
    return literal or (isinstance(value, ast.Call) and _name(value.func) in MUTABLE_TYPES)


def _changes(function: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and line of everything that a function changes in place."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield _name(node.value), node.lineno
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            yield _name(node.func.value), node.lineno
