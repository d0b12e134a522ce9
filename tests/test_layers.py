"""Imports run one way, and frameworks stay in their adapters: read from the source."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    ("errors", "metric_names"),
    ("internals", "hardware", "formulas"),
    ("counting",),
    ("steps", "timing"),
    ("utilization",),
    ("insights", "checks", "alerts"),
    ("sinks", "logs"),
    ("config",),
    ("readings",),
    ("monitor", "mfu_monitor"),  # "mfu_monitor": the public names
    ("callbacks", "cli"),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
OPTIONAL = {"lightning", "pytorch_lightning", "transformers", "matplotlib", "fvcore", "tensorboard", "pynvml", "scipy"}


@dataclass(frozen=True)
class Import:
    """One imported module; ``deferred`` where it runs inside a function."""

    target: str
    deferred: bool = False


def imports(source: str, *, package: str) -> Iterator[Import]:
    """Every absolute name that a module of ``package`` imports, wherever in the file."""
    yield from _walk(ast.parse(source), package, deferred=False)


def _walk(node: ast.AST, package: str, *, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, deferred) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, package)
            yield from (Import(f"{base}.{alias.name}", deferred) for alias in child.names)
        elif not _is_type_checking(child):
            inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, package, deferred=inside)


def _is_type_checking(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:`` runs nothing: a name in an annotation is no edge."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def part_of(name: str) -> str | None:
    """``"mfu_monitor.timing.clock"`` to ``"timing"``; a name of the package itself to ``"mfu_monitor"``."""
    first, *rest = name.split(".")
    if first != "mfu_monitor":
        return None
    is_module = rest and ((ROOT / first / rest[0]).is_dir() or (ROOT / first / f"{rest[0]}.py").exists())
    return rest[0] if rest and (is_module or rest[0] == "callbacks") else "mfu_monitor"


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module that ships."""
    for folder, prefix in ((ROOT / "mfu_monitor", "mfu_monitor"), (ROOT / "callbacks", "mfu_monitor.callbacks")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([prefix, *(p for p in parts if p != "__init__")]), path


def backward_edges(name: str, found: list[Import]) -> list[str]:
    """The imports of module ``name`` that go against the direction."""
    own = part_of(name) or ""
    targets = {part for i in found if (part := part_of(i.target)) is not None}
    return [f"{name} ({own}) imports {part}" for part in sorted(targets) if RANK.get(part, -1) > RANK.get(own, 99)]


def misplaced_frameworks(name: str, found: list[Import]) -> list[str]:
    """Imports of optional packages where they do not belong."""
    own = part_of(name)
    wrong = []
    for i in found:
        top = i.target.split(".")[0]
        is_trainer = top in ("lightning", "pytorch_lightning")
        if top in OPTIONAL and own != "callbacks" and (is_trainer or not i.deferred):
            wrong.append(f"{name} imports {top}{' inside a function' if i.deferred else ''}")
    return wrong


def load(name: str, path: Path) -> list[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imports(path.read_text(encoding="utf-8"), package=package))


MODULES = dict(modules())


def upward_closures(name: str, source: str) -> list[str]:
    """Lambdas and own methods that a module hands to what it imports from a lower room: they would call upwards.

    A guard (``errors``) runs what its caller gives it, at once and for the caller: that is no call upwards.
    """
    tree = ast.parse(source)
    package = name.rpartition(".")[0]
    own = RANK[part_of(name) or ""]
    lower = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            part = part_of(f"{_absolute(node, package)}.x")
            if part is not None and RANK.get(part, 99) < own and part != "errors":
                lower |= {alias.asname or alias.name for alias in node.names}
    made = {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Name) and node.value.func.id in lower
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return [
        f"{name}, line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _goes_down(node.func, lower, made)
        for given in (*node.args, *(keyword.value for keyword in node.keywords))
        if isinstance(given, ast.Lambda) or (_is_of_self(given) and given.attr in methods - _properties(tree))
    ]


def _goes_down(function: ast.expr, lower: set[str], made: set[str]) -> bool:
    if isinstance(function, ast.Name):
        return function.id in lower
    return isinstance(function, ast.Attribute) and _is_of_self(function.value) and function.value.attr in made


def _is_of_self(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _properties(tree: ast.AST) -> set[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any(isinstance(d, ast.Name) and d.id == "property" for d in f.decorator_list)}


@pytest.mark.parametrize("name", ["mfu_monitor.monitor", "mfu_monitor.readings", "mfu_monitor.steps.step_counter"])
def test_no_closure_carries_a_call_upwards(name: str) -> None:
    assert upward_closures(name, MODULES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("given", ["lambda: 1", "self.paused"])
def test_a_closure_handed_down_is_found(given: str) -> None:
    source = (
        "from mfu_monitor.timing.pipeline import WindowPipeline\n"
        f"class M:\n def f(self):\n  self.w = WindowPipeline()\n  self.w.close({given})\n def paused(self): pass\n"
    )
    assert len(upward_closures("mfu_monitor.monitor", source)) == 1


@pytest.mark.parametrize("name", MODULES)
def test_every_part_has_its_layer(name: str) -> None:
    assert part_of(name) in RANK, f"{name}: give its part a place in LAYERS of this test"


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_one_way(name: str) -> None:
    assert backward_edges(name, load(name, MODULES[name])) == []


def test_at_most_eighteen_rooms_and_none_is_private() -> None:
    rooms = {part for name in MODULES if (part := part_of(name)) not in (None, "mfu_monitor", "callbacks")}
    assert len(rooms) <= 18
    assert not [room for room in rooms if str(room).startswith("_")]


def test_no_function_is_longer_than_sixty_lines() -> None:
    long = [
        f"{name}.{node.name}: {lines} lines"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > 60
    ]
    assert long == []


def test_no_two_files_have_one_name() -> None:
    files = Counter(path.name for path in MODULES.values() if path.name != "__init__.py")
    assert [name for name, count in files.items() if count > 1] == []


@pytest.mark.parametrize("name", MODULES)
def test_frameworks_are_imported_in_the_adapters_alone(name: str) -> None:
    assert misplaced_frameworks(name, load(name, MODULES[name])) == []


def test_parts_of_one_layer_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        own = part_of(name) or ""
        found = {p for i in load(name, path) if (p := part_of(i.target)) not in (None, own, "mfu_monitor")}
        graph.setdefault(own, set()).update(found)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {error.args[1]}")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("mfu_monitor.formulas.matmul", "from mfu_monitor.counting.step_record import StepRecord"),
        ("mfu_monitor.counting.module_names", "def f():\n    import mfu_monitor.monitor"),
        ("mfu_monitor.timing.window", "from ..sinks import Event"),
        ("mfu_monitor.hardware.table", "import mfu_monitor as mm"),
        ("mfu_monitor.monitor", "from mfu_monitor import callbacks"),
        ("mfu_monitor.sinks.card", "from mfu_monitor import Monitor"),
    ],
)
def test_a_backward_edge_is_found(name: str, source: str) -> None:
    assert len(backward_edges(name, list(imports(source, package=name.rpartition(".")[0])))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "mfu_monitor.counting.module_names",
            "from mfu_monitor.formulas.registry import formula\nfrom . import records",
        ),
        ("mfu_monitor.callbacks.fabric", "import mfu_monitor as mm\nfrom .common import x\nimport lightning"),
        ("mfu_monitor.cli.count_command", "def f():\n    import transformers"),
    ],
)
def test_a_forward_edge_and_an_adapters_framework_are_let_through(name: str, source: str) -> None:
    found = list(imports(source, package=name.rpartition(".")[0]))
    assert backward_edges(name, found) == []
    assert misplaced_frameworks(name, found) == []


@pytest.mark.parametrize(
    "source",
    [
        "import lightning.pytorch as pl",
        "def f():\n    import lightning",
        "try:\n    import transformers\nexcept E: pass",
    ],
)
def test_a_framework_in_the_library_is_found(source: str) -> None:
    assert len(misplaced_frameworks("mfu_monitor.monitor", list(imports(source, package="mfu_monitor")))) == 1
