"""What torch and the trainers keep private is read in `mfu_monitor/internals/` alone, and never while it is imported.

Every torch moves private names. Where one room holds them, a new version is one room's work, and each has its fallback.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INTERNALS = ROOT / "mfu_monitor" / "internals"

OTHERS = ("lightning", "pytorch_lightning", "transformers", "accelerate")


def sources() -> Iterator[tuple[str, Path]]:
    """(path from the root, file) of every module that ships."""
    for folder in ("mfu_monitor", "callbacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path


def dotted(node: ast.AST) -> str | None:
    """``torch.ops.aten`` of an attribute chain; None where its root is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def is_private(name: str) -> bool:
    """``_C`` and ``__wrapped__ish``; a dunder such as ``__name__`` is Python's own."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


OPERATORS = "torch.ops."
"""Below it stand operators, which are named by the dispatcher: ``torch.ops.aten._scaled_mm`` is one of them."""


def aliases(tree: ast.AST) -> dict[str, str]:
    """Local name to the full one, for everything imported of torch and the trainers."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                found[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {local: full for local, full in found.items() if full.split(".")[0] in ("torch", *OTHERS)}


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of torch or of a trainer that is named, imported or asked for by text."""
    tree = ast.parse(source)
    names = aliases(tree)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, full) for full in _imported(node) if any(map(is_private, full.split("."))))
        elif isinstance(node, ast.Attribute) and id(node) not in inner and (chain := dotted(node)):
            root, *rest = chain.split(".")
            # An imported name that is itself private was found at its import.
            full = ".".join([names.get(root, root), *rest])
            if root in names and any(map(is_private, rest)) and not full.startswith(OPERATORS):
                yield node.lineno, full
        elif isinstance(node, ast.Call) and (asked := _asked_for(node, names)):
            yield node.lineno, asked


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    if isinstance(node, ast.ImportFrom) and node.level:
        return []
    full = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
    return [name for name in full if name.split(".")[0] in ("torch", *OTHERS)]


def _asked_for(call: ast.Call, names: dict[str, str]) -> str | None:
    """``getattr(torch, "_C")``, ``import_module("torch._dynamo")`` and ``sys.modules.get("torch._dynamo")``."""
    if isinstance(call.func, ast.Name) and call.func.id == "fact":
        return None  # a name as text, read by nobody
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    for text in texts:
        if text.split(".")[0] in ("torch", *OTHERS) and " " not in text and any(map(is_private, text.split("."))):
            return text
    of = dotted(call.args[0]) if call.args else None
    is_getattr = isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr", "setattr")
    if is_getattr and of is not None and of.split(".")[0] in names and texts and is_private(texts[0]):
        return f"{of}.{texts[0]}"
    return None


def own_names() -> frozenset[str]:
    """The private names that this package gives to anything of its own."""
    found: set[str] = set()
    for _, path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                found.add(node.attr)
    return frozenset(filter(is_private, found))


def foreign_attributes(source: str, own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, attribute) of private attributes read of objects that are not ours: ``func._schema``, ``trainer._x``."""
    tree = ast.parse(source)
    names = {**aliases(tree), **dict.fromkeys(_operator_roots(tree), ""), "sys": "sys"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            root = (dotted(node.value) or "").split(".")[0]
            if root not in names and dotted(node.value) != "self":
                yield node.lineno, f"._{node.attr.lstrip('_')}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            asked = node.args[1] if len(node.args) > 1 else None
            is_foreign = isinstance(asked, ast.Constant) and is_private(str(asked.value)) and asked.value not in own
            if is_foreign and (dotted(node.args[0]) or "").split(".")[0] not in names:
                yield node.lineno, f".{ast.literal_eval(node.args[1])}"


def _operator_roots(tree: ast.AST) -> Iterator[str]:
    """``aten`` of ``aten = torch.ops.aten``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (dotted(node.value) or "").startswith(OPERATORS):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def import_time_uses(source: str) -> list[tuple[int, str]]:
    """The private names that are read while the module is imported: outside functions and type-checking blocks."""
    tree = ast.parse(source)
    deferred: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            deferred |= {inner.lineno for part in body for inner in ast.walk(part) if hasattr(inner, "lineno")}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            deferred |= {inner.lineno for part in node.body for inner in ast.walk(part) if hasattr(inner, "lineno")}
    return [(line, name) for line, name in private_uses(source) if line not in deferred]


OWN = own_names()
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in sources()}
FOUND = {name: [*private_uses(text), *foreign_attributes(text, OWN)] for name, text in TEXTS.items()}
OUTSIDE = {name: uses for name, uses in FOUND.items() if not name.startswith("mfu_monitor/internals/") and uses}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_private_names_are_read_in_internals_alone(name: str) -> None:
    seen = "; ".join(f"line {line}: {used}" for line, used in OUTSIDE.get(name, []))
    assert not seen, f"{name}: move to mfu_monitor/internals/: {seen}"


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_nothing_private_is_read_while_a_module_is_imported(name: str) -> None:
    assert import_time_uses(TEXTS[name]) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._x", "torch._C._x"),
        ("import torch\ndef f():\n    return torch.fx._pytree", "torch.fx._pytree"),
        ("from torch._dynamo import utils", "torch._dynamo.utils"),
        ("from torch.utils import _pytree as t\nt.tree_map", "torch.utils._pytree"),
        ("import torch._inductor.config as c", "torch._inductor.config"),
        ("from torch import nn\nnn._reduction", "torch.nn._reduction"),
        ("import torch\ngetattr(torch, '_x', None)", "torch._x"),
        ("import importlib\nimportlib.import_module('torch._dynamo')", "torch._dynamo"),
        ("import sys\nsys.modules.get('torch._dynamo.utils')", "torch._dynamo.utils"),
        ("from transformers.trainer import _x", "transformers.trainer._x"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert [used for _, used in private_uses(source)] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten.mm.default\ntorch.__version__",
        "from . import _loggers\nself._x = 1",
        "import torch\nt = torch.zeros(1)\nt._x_of_ours",
    ],
)
def test_a_public_name_is_let_through(source: str) -> None:
    assert list(private_uses(source)) == []


def test_a_use_in_a_function_is_not_one_at_import() -> None:
    assert import_time_uses("def f():\n    import torch._C\n    return torch._C") == []
    assert [name for _, name in import_time_uses("import torch\nX = torch._C")] == ["torch._C"]


@pytest.mark.parametrize(
    "source", ["func._schema", "trainer.fit_loop._x", "getattr(module, '_orig_mod', None)", "hasattr(t, '_values')"]
)
def test_a_private_attribute_of_an_object_that_is_not_ours_is_found(source: str) -> None:
    assert len(list(foreign_attributes(source, frozenset({"_ours"})))) == 1


@pytest.mark.parametrize(
    "source", ["self._x", "sink._ours", "aten = torch.ops.aten\naten._scaled_mm", "sys._getframe()"]
)
def test_a_private_attribute_of_our_own_is_let_through(source: str) -> None:
    assert list(foreign_attributes(source, frozenset({"_ours"}))) == []
