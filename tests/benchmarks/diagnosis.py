"""Injected against named causes: prints the confusion matrix (``make bench-diagnosis``); exit code 1 below its goals.

Goals: the injected cause in the first place in 90% of all runs, and not one alarm over 1,000 healthy runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from mfu_monitor.checks import CAUSE_CODES, Diagnosis, check

GOAL_FIRST_PLACE = 0.90


def load_runs() -> ModuleType:
    """The synthetic runs beside this file; tests load this file by path, so there is no package to import from."""
    path = Path(__file__).with_name("diagnosis_runs.py")
    if "diagnosis_runs" not in sys.modules:
        spec = importlib.util.spec_from_file_location("diagnosis_runs", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["diagnosis_runs"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules["diagnosis_runs"]


def first_cause(diagnoses: tuple[Diagnosis, ...]) -> str:
    """The cause in the first place; checks are not causes."""
    return next((d.code for d in diagnoses if d.code in CAUSE_CODES), "(none)")


def also_named(diagnoses: tuple[Diagnosis, ...]) -> set[str]:
    """Causes named (not only consistent with the figures) behind the first."""
    named = [d.code for d in diagnoses if d.code in CAUSE_CODES and d.severity != "note"]
    return set(named[1:])


def confusion(
    runs_per_fault: int, seed: int = 0, behind: dict[str, Counter[str]] | None = None
) -> dict[str, Counter[str]]:
    """Named in the first place, by injected fault; ``behind`` is filled with what else was named."""
    runs = load_runs()
    matrix: dict[str, Counter[str]] = {}
    for name, inject in runs.FAULTS.items():
        rng = random.Random(f"{seed}/{name}")
        named = Counter[str]()
        for _ in range(runs_per_fault):
            run = inject(rng)
            diagnoses = check(run.reading, run.record, run.peak, evidence=run.evidence)
            named[first_cause(diagnoses)] += 1
            if behind is not None:
                behind.setdefault(name, Counter()).update(also_named(diagnoses))
        matrix[name] = named
    return matrix


def false_alarms(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """(code, message) of every alarm over healthy runs: any warning, any error, any cause at all."""
    runs = load_runs()
    rng = random.Random(f"{seed}/healthy")
    alarms: list[tuple[str, str]] = []
    for _ in range(count):
        run = runs.healthy(runs.random_truth(rng), rng)
        diagnoses = check(run.reading, run.record, run.peak, evidence=run.evidence)
        alarms += [(d.code, d.message) for d in diagnoses if d.severity != "note" or d.code in CAUSE_CODES]
    return alarms


def _print(console: Console, matrix: dict[str, Counter[str]], behind: dict[str, Counter[str]]) -> None:
    table = Table(title="Injected fault (rows) and the cause named first (columns)", show_lines=False)
    table.add_column("injected", no_wrap=True)
    table.add_column("right", justify="right", no_wrap=True)
    table.add_column("named instead", overflow="fold")
    table.add_column("named as well, behind it", overflow="fold")
    for name, named in matrix.items():
        total = sum(named.values())
        wrong = ", ".join(f"{code} {n}" for code, n in named.most_common() if code != name)
        more = ", ".join(f"{code} {n}" for code, n in behind[name].most_common())
        table.add_row(name, f"{named[name]}/{total}", wrong or "-", more or "-")
    console.print(table)


def main() -> int:
    """Print the matrix and judge it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="runs of each fault")
    parser.add_argument("--healthy", type=int, default=1000, help="healthy runs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console()
    behind: dict[str, Counter[str]] = {}
    matrix = confusion(arguments.runs, arguments.seed, behind)
    _print(console, matrix, behind)
    right = sum(named[name] for name, named in matrix.items())
    total = sum(sum(named.values()) for named in matrix.values())
    alarms = false_alarms(arguments.healthy, arguments.seed)
    console.print(
        f"right in the first place: {right} of {total} ({100 * right / total:.1f}%; goal {GOAL_FIRST_PLACE:.0%})"
    )
    console.print(f"alarms over {arguments.healthy} healthy runs: {len(alarms)} (goal 0)")
    for code, message in alarms[:5]:
        console.print(f"  {code}: {message}")
    return 0 if right >= GOAL_FIRST_PLACE * total and not alarms else 1


if __name__ == "__main__":
    raise SystemExit(main())
