"""Mutation testing: small faults planted one at a time, sampled by seed, and whether a test notices.

    make mutants MUTANTS_ARGS="--sample 60 --seed 7 --groups formulas checks alerts utilization"

Each mutant is one changed node of one function: another comparison, another operator, another number, a negated
condition, a result or an argument left out. It lives in a forked child only, where an import hook gives the changed
source, so no file is touched. The child runs the tests of the group until the first failure; a mutant that none notices
survives, and is listed in docs/proof.md with the reason in ``EXPLAINED`` where it changes no behaviour.

The kept libraries were looked at: mutmut 3 and cosmic-ray 8 mutate a copy of the tree, start a new interpreter with
torch for each mutant, and take no sample by seed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "proof.md"

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "formulas": (("mfu_monitor/formulas",), ("tests/formulas",)),
    "checks": (("mfu_monitor/checks",), ("tests/checks", "tests/goldens")),
    "alerts": (("mfu_monitor/alerts",), ("tests/alerts", "tests/goldens")),
    "utilization": (("mfu_monitor/utilization.py",), ("tests/test_utilization.py", "tests/checks", "tests/goldens")),
    "hardware": (("mfu_monitor/hardware",), ("tests/hardware",)),
    "steps": (("mfu_monitor/steps",), ("tests/steps", "tests/test_monitor.py")),
    "timing": (("mfu_monitor/timing",), ("tests/timing", "tests/test_monitor.py")),
    "compiled": (("mfu_monitor/counting/compiled",), ("tests/counting/compiled",)),
    "roofline": (("mfu_monitor/insights/roofline.py",), ("tests/insights/test_roofline.py",)),
    "planning": (("mfu_monitor/insights/planning.py", "mfu_monitor/layouts"), ("tests/insights/test_planning.py",)),
    "waterfall": (("mfu_monitor/insights/waterfall.py",), ("tests/insights/test_waterfall.py",)),
}
"""What is mutated, and the tests that should notice."""

EXPLAINED: dict[str, str] = {}
"""Survivors that change no behaviour, by ``Mutant.key``, and why."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed piece of one file."""

    group: str
    path: str
    function: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.path}:{self.function}: {self.before} -> {self.after}"

    def source(self) -> str:
        """The file's text with the change in it; positions are bytes, as ``ast`` gives them."""
        text = (ROOT / self.path).read_bytes()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


# --- which mutants there are ------------------------------------------------------------------------------------------


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes in the place of this one; none where it is no piece of behaviour."""
    if isinstance(node, ast.Compare):
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        yield node.values[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else node.value * 1.5)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        yield ast.Call(ast.Name("max" if node.func.id == "min" else "min"), node.args, node.keywords)


def _behaviour(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node below that runs, with its function; annotations, docstrings, messages and decorators are left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Raise)):
                continue
            is_scope = isinstance(child, (ast.FunctionDef, ast.ClassDef))
            inner = f"{function}.{child.name}".lstrip(".") if is_scope else function  # type: ignore[attr-defined]
            yield inner, child
            yield from _behaviour(child, inner)


def mutants_of(group: str, path: Path) -> list[Mutant]:
    """Every mutant of one file, in order."""
    text = path.read_bytes()
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for function, node in _behaviour(ast.parse(text)):
        for other in changed(node):
            start = lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            before, after = ast.unparse(node), ast.unparse(ast.fix_missing_locations(other))
            relative = str(path.relative_to(ROOT))
            line = node.lineno  # type: ignore[attr-defined]
            found.append(Mutant(group, relative, function, line, start, end, before, f"({after})"))
    return found


def all_mutants(groups: Sequence[str]) -> list[Mutant]:
    """Every mutant of the groups' files."""
    files = []
    for group in groups:
        for place in GROUPS[group][0]:
            given = ROOT / place
            files += [(group, path) for path in ([given] if given.is_file() else sorted(given.glob("*.py")))]
    return [mutant for group, path in files for mutant in mutants_of(group, path)]


# --- one mutant in a child --------------------------------------------------------------------------------------------


class MutatedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module with the change in it."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, ROOT / self.mutant.path, loader=self)

    def exec_module(self, module: Any) -> None:
        exec(compile(self.mutant.source(), str(ROOT / self.mutant.path), "exec"), module.__dict__)


def run_tests(mutant: Mutant | None, tests: Sequence[str], output: Path) -> int:
    """In the child: pytest's exit status with the mutant in place."""
    import pytest

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    if mutant is not None:
        sys.meta_path.insert(0, MutatedModule(mutant))
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not slow"]
    return int(pytest.main([*options, *tests]))


def in_child(mutant: Mutant | None, tests: Sequence[str], output: Path) -> int:
    """The process that runs the tests; it ends with pytest's status."""
    child = os.fork()
    if child:
        return child
    os.setsid()  # so that a mutant that never ends can be ended with all that it started
    status = 1
    try:
        status = run_tests(mutant, tests, output)
    finally:
        os._exit(status)


def outcomes(mutants: Sequence[Mutant], *, jobs: int, limit_s: float, folder: Path) -> Iterator[tuple[Mutant, str]]:
    """``killed``, ``timed out`` or ``survived`` for each, as they end."""
    waiting, running = list(reversed(mutants)), dict[int, tuple[Mutant, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            child = in_child(mutant, GROUPS[mutant.group][1], folder / f"{len(waiting)}.txt")
            running[child] = mutant, time.monotonic() + limit_s
        for child, (mutant, ends) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del running[child]
                yield mutant, "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
            elif time.monotonic() > ends:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                del running[child]
                yield mutant, "timed out"
        time.sleep(0.05)


# --- the report -------------------------------------------------------------------------------------------------------


def report(found: Sequence[tuple[Mutant, str]], *, total: int, seed: int) -> str:
    """docs/proof.md."""
    lines = [
        "# Proof that the tests would notice",
        "",
        "Written by `make mutants`; what a mutant is, is said in `tests/benchmarks/mutants.py`.",
        "",
        f"{len(found)} of {total} mutants, drawn with seed {seed}. A mutant whose tests did not end in time counts as "
        "noticed.",
        "",
        "| part | mutants | noticed | survived | of these without effect | noticed, of those with effect |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    groups = dict.fromkeys(mutant.group for mutant, _ in found)
    lines += [_row(group, [item for item in found if item[0].group == group]) for group in groups]
    lines.append(_row("all", found))
    survivors = [mutant for mutant, outcome in found if outcome == "survived"]
    lines += ["", "## Survivors", ""]
    lines += [
        f"- `{m.path}:{m.line}` `{m.function}`: `{m.before}` as `{m.after}`. "
        f"{EXPLAINED.get(m.key, 'No test notices yet.')}"
        for m in survivors
    ] or ["None."]
    return "\n".join(lines) + "\n"


def _row(name: str, found: Sequence[tuple[Mutant, str]]) -> str:
    survived = [mutant for mutant, outcome in found if outcome == "survived"]
    without_effect = sum(mutant.key in EXPLAINED for mutant in survived)
    noticed, with_effect = len(found) - len(survived), len(found) - without_effect
    share = f"{noticed / with_effect:.0%}" if with_effect else "-"
    return f"| {name} | {len(found)} | {noticed} | {len(survived)} | {without_effect} | {share} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant faults and see whether a test notices.")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--groups", nargs="+", choices=[*GROUPS], default=["formulas", "checks", "alerts", "utilization"]
    )
    parser.add_argument("--jobs", type=int, default=2, help="children at a time (default 2)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for one mutant (default 300)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="where the tests' output goes")
    parser.add_argument("--no-report", action="store_true", help="leave docs/proof.md as it is")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    import hypothesis  # noqa: F401  # what every child needs is imported once
    import pytest  # noqa: F401
    import torch  # noqa: F401

    for group in options.groups:
        child = in_child(None, GROUPS[group][1], options.folder / f"{group}.txt")
        if os.waitpid(child, 0)[1]:
            print(f"The tests of {group} fail without a mutant; see {options.folder / group}.txt", file=sys.stderr)
            return 1
    everything = all_mutants(options.groups)
    chosen = random.Random(options.seed).sample(everything, min(options.sample, len(everything)))
    found = []
    for mutant, outcome in outcomes(chosen, jobs=options.jobs, limit_s=options.limit_s, folder=options.folder):
        found.append((mutant, outcome))
        print(f"[{len(found)}/{len(chosen)}] {outcome:9} {mutant.path}:{mutant.line} {mutant.before} -> {mutant.after}",
              flush=True)  # fmt: skip
    order = {mutant: position for position, mutant in enumerate(everything)}
    text = report(sorted(found, key=lambda item: order[item[0]]), total=len(everything), seed=options.seed)
    if options.no_report:
        print(text)
    else:
        REPORT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
