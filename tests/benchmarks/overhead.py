"""What watching costs: ratios against the bare loop and against torch's own counter, measured side by side.

    make bench-overhead

Each figure is the median over interleaved rounds, so that a machine that speeds up or slows down meets all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mfu_monitor as mm
from mfu_monitor.counting import self_check

ROUNDS = 15


def mlp(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())])


def medians_s(variants: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of one call of each variant, rounds interleaved."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            began_s = time.perf_counter()
            for _ in range(repeats):
                run()
            times[name].append((time.perf_counter() - began_s) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def counted(model: nn.Module, step: Callable[[], object]) -> dict[str, Callable[[], object]]:
    def ours() -> None:
        with mm.FlopCounter(model):
            step()

    def torchs() -> None:
        with FlopCounterMode(display=False):
            step()

    return {"bare": step, "counted by mfu_monitor": ours, "counted by torch's FlopCounterMode": torchs}


def replayed(model: nn.Module, batch: torch.Tensor, step: Callable[[], object]) -> dict[str, Callable[[], object]]:
    monitor = mm.Monitor(model, log_every_n_steps=50, max_overhead=0.0, peak=1e12, alerts=False)
    bare_then_counted = [monitor.step(batch) for _ in range(2)]
    for scope in bare_then_counted:  # the first is counted, the second replays it
        with scope:
            step()

    def watched() -> None:
        with monitor.step(batch):
            step()

    def nothing() -> None:
        with monitor.step(batch):
            pass

    return {"bare": step, "watched, replayed step": watched, "begin and end alone": nothing}


def self_check_s() -> float:
    """Median seconds of the counter's proof of itself, which runs once a process."""
    with mm.FlopCounter():
        pass  # what is imported at the first count is no part of it
    times = []
    for _ in range(ROUNDS):
        self_check._found.clear()
        began_s = time.perf_counter()
        assert self_check.failed_capabilities() == ()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    proof_s = self_check_s()
    for title, width, depth, rows in (("50 tiny Linears", 16, 50, 8), ("8 Linears of 512", 512, 8, 128)):
        model, batch = mlp(width, depth), torch.randn(rows, width)

        def step(model: nn.Module = model, batch: torch.Tensor = batch) -> None:
            model(batch).sum().backward()

        table = Table("variant", "ms a step", "times bare", title=title, title_justify="left")
        for variants, repeats in ((counted(model, step), 3), (replayed(model, batch, step), 20)):
            found = medians_s(variants, repeats=repeats)
            for name, seconds in found.items():
                table.add_row(name, f"{seconds * 1e3:.4f}", f"{seconds / found['bare']:.4f}")
            bare_s = found["bare"]
        table.add_row("self-check, once a process", f"{proof_s * 1e3:.4f}", f"{proof_s / bare_s:.4f}")
        console.print(table)


if __name__ == "__main__":
    main()
