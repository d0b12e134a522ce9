"""The long runs that docs/reliability.md shows: soaking here, faults and fuzzing from the reports of their tests.

Soaking is a long run in short: replayed steps (the common case), counted steps, and batches of ever new shapes. After
a warm-up each is looked at twelve times; what grows goes on growing, so the last third is held against the first.
Needs ``/proc``.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn

import mfu_monitor as mm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
FUZZ_EXAMPLES = int(os.environ.get("MFU_MONITOR_FUZZ") or 100)
PARTS = 12
MOST_GROWTH_MIB = 4.0
"""Of the process, from the first third of the looks to the last: allocators round."""
RUNS = {"replayed": 200_000, "counted": 2_000, "shapes": 10_000}


@dataclass
class Soak:
    """What one run used."""

    name: str
    steps: int
    seconds: float
    memory_mib: list[float]
    descriptors: list[int]
    threads: list[int]

    @property
    def growth_mib(self) -> float:
        third = len(self.memory_mib) // 3
        return statistics.median(self.memory_mib[-third:]) - statistics.median(self.memory_mib[:third])

    @property
    def faults(self) -> list[str]:
        found = []
        if self.growth_mib > MOST_GROWTH_MIB:
            found.append(f"memory grew by {self.growth_mib:.1f} MiB")
        for what, counts in (("descriptors", self.descriptors), ("threads", self.threads)):
            if len(set(counts)) > 1:
                found.append(f"{what} went from {min(counts)} to {max(counts)}")
        return found


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def _memory_mib() -> float:
    """Resident, of this process: the second field of ``statm``, in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _looks(steps: int) -> Iterator[tuple[int, bool]]:
    """Step numbers, after a warm-up of a sixth, and whether to look after the step."""
    every = max(1, steps // PARTS)
    for step in range(-max(1, steps // 6), steps):
        yield step, step >= 0 and (step + 1) % every == 0


def soak(name: str, steps: int, folder: Path) -> Soak:
    """One run."""
    model = _model()
    options: dict[str, Any] = {"count": "every_step"} if name == "counted" else {}
    monitor = mm.Monitor(model, log_every_n_steps=50, peak=1e12, jsonl=folder / f"{name}.jsonl", **options)
    batch, result = torch.ones(4, 8), Soak(name, steps, 0.0, [], [], [])
    work: Callable[[torch.Tensor], Any] = lambda x: model(x).sum().backward()  # noqa: E731
    began_s = time.perf_counter()
    for step, is_look in _looks(steps):
        x = torch.ones(2 + (step % steps), 8) if name == "shapes" else batch
        with monitor.step(x):
            if name != "replayed" or step % 100 == 0:  # the monitor is what is soaked
                work(x)
        if is_look:
            gc.collect()
            result.memory_mib.append(_memory_mib())
            result.descriptors.append(len(os.listdir("/proc/self/fd")))
            result.threads.append(threading.active_count())
    result.seconds = time.perf_counter() - began_s
    monitor.close()
    return result


def _machine() -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores."


def page(results: list[Soak]) -> str:
    """The table for the page."""
    lines = [
        _machine(),
        "",
        "| run | steps | time (s) | memory, first to last third (MiB) | file descriptors | threads | verdict |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for run in results:
        fds, threads = sorted(set(run.descriptors)), sorted(set(run.threads))
        verdict = "; ".join(run.faults) or "flat"
        lines.append(
            f"| {run.name} | {run.steps:,} | {run.seconds:.0f} | {run.growth_mib:+.1f} | "
            f"{' to '.join(map(str, fds))} | {' to '.join(map(str, threads))} | {verdict} |"
        )
    return "\n".join(lines)


def of_report(report: Path) -> str:
    """A table of the points or tests in a JUnit report."""
    rows: dict[str, list[float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if not (name := case.get("name", "")):
            continue  # a test that an interrupt cut short
        loop = re.search(r"\[(\w+?)-(error|interrupt|signal)-", name)
        values = {p.get("name"): float(p.get("value") or 0) for p in case.iter("property")}
        is_broken = case.find("failure") is not None or case.find("error") is not None
        row = rows.setdefault(
            " ".join(loop.groups()) if loop else name.removeprefix("test_").replace("_", " "), [0] * 4
        )
        row[0] += values.get("points", FUZZ_EXAMPLES)
        row[1] += values.get("broken", is_broken)
        row[2] += float(case.get("time") or 0)
        row[3] += 1
    what = "points" if any(name.endswith(" error") for name in rows) else "examples, at most"
    lines = [_machine(), "", f"| | parts | {what} | broken | time of one process (s) |", "|---|---:|---:|---:|---:|"]
    lines += [f"| {name} | {n:.0f} | {p:,.0f} | {bad:.0f} | {t:,.0f} |" for name, (p, bad, t, n) in rows.items()]
    return "\n".join(lines)


def write_part(name: str, text: str) -> None:
    """Put a text between the two marks of its part of the page."""
    old = PAGE.read_text(encoding="utf-8")
    head, begin, rest = old.partition(f"<!-- {name}: written by make {name} -->\n")
    _, end, tail = rest.partition(f"<!-- end of {name} -->")
    PAGE.write_text(f"{head}{begin}{text}\n{end}{tail}", encoding="utf-8")


def _soak(share: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = [soak(name, max(PARTS, int(n * share)), Path(folder)) for name, n in RUNS.items()]
    print(page(results))
    if share == 1.0:
        write_part("soak", page(results))
    raise SystemExit(any(run.faults for run in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["soak", "faults", "fuzz"])
    parser.add_argument("report", type=Path, nargs="?", help="JUnit report of the tests, for faults and fuzz")
    parser.add_argument("--share", type=float, default=1.0, help="of the soaked steps; less does not write the page")
    given = parser.parse_args()
    if given.part == "soak":
        _soak(given.share)
    write_part(given.part, of_report(given.report))


if __name__ == "__main__":
    main()
