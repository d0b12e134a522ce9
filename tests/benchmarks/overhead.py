"""What watching costs, in one table: the bare loop, this monitor, Lightning's own, and counters on each step.

    make bench

Times are the process's own on one core, so that what else runs on the machine disturbs little. Rounds of all tools are
interleaved, and the least of each is taken: noise only adds. The result is kept in docs/overhead.json, and
docs/overhead.md is made of it. DeepSpeed's profiler has a row where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import os
import platform
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import mfu_monitor as mm
from mfu_monitor.counting import self_check

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "overhead.json"
PAGE = ROOT / "docs" / "overhead.md"

WINDOW_STEPS = 50
"""Lightning's own ``log_every_n_steps``."""

Step = Callable[[], None]
Watch = Callable[[nn.Module, Any], AbstractContextManager[Callable[[Step], None]]]
"""Gives a block in which a step is run watched."""


# --- what is trained --------------------------------------------------------------------------------------------------


class Tiny(nn.Sequential):
    """50 tiny Linears: a step of launches."""

    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(50) for layer in (nn.Linear(16, 16), nn.GELU())])


class GPT(nn.Module):
    """Four causal blocks of width 128 over 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding, self.head = nn.Embedding(512, 128), nn.Linear(128, 512, bias=False)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(tokens), self.mask, is_causal=True))
        return logits.flatten(0, 1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.layers(x))


class ResNet(nn.Sequential):
    """A small residual network on 32 x 32 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1), Residual(32), Residual(32), nn.Conv2d(32, 64, 3, 2, 1), Residual(64),
            Residual(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A model and its batch; the step is forward, loss, backward and AdamW."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


WORKLOADS = (
    Workload("50 tiny Linears", Tiny, lambda: (torch.randn(8, 16), torch.randint(0, 16, (8,)))),
    Workload("GPT", GPT, lambda: (tokens := torch.randint(0, 512, (4, 64)), tokens.flatten())),
    Workload("ResNet", ResNet, lambda: (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))),
)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


# --- who watches ------------------------------------------------------------------------------------------------------


@contextmanager
def bare(model: nn.Module, batch: Any) -> Iterator[Callable[[Step], None]]:
    yield lambda step: step()


@contextmanager
def monitored(model: nn.Module, batch: Any) -> Iterator[Callable[[Step], None]]:
    monitor = mm.Monitor(model, log_every_n_steps=WINDOW_STEPS, console=False)

    def watched(step: Step) -> None:
        with monitor.step(batch):
            step()

    yield watched
    monitor.close()


@contextmanager
def counted(model: nn.Module, batch: Any) -> Iterator[Callable[[Step], None]]:
    def watched(step: Step) -> None:
        with mm.FlopCounter(model):
            step()

    yield watched


@contextmanager
def counted_by_torch(model: nn.Module, batch: Any) -> Iterator[Callable[[Step], None]]:
    def watched(step: Step) -> None:
        with FlopCounterMode(display=False):
            step()

    yield watched


@contextmanager
def profiled_by_deepspeed(model: nn.Module, batch: Any) -> Iterator[Callable[[Step], None]]:
    profiler = importlib.import_module("deepspeed.profiling.flops_profiler").FlopsProfiler(model)

    def watched(step: Step) -> None:
        profiler.start_profile()
        step()
        profiler.stop_profile()
        profiler.end_profile()

    yield watched


LOOP_TOOLS: dict[str, Watch] = {
    "bare": bare,
    "mfu_monitor: Monitor, defaults": monitored,
    "mfu_monitor: FlopCounter each step": counted,
    "torch: FlopCounterMode each step": counted_by_torch,
    "DeepSpeed: FlopsProfiler each step": profiled_by_deepspeed,
}
"""In a loop of one's own; the first is what the others are held against."""
WINDOWED = ("bare", "mfu_monitor: Monitor, defaults")
"""Whose runs are measured as a whole: their first steps cost more. The others cost every step the same."""


def callbacks_by_tool() -> dict[str, Callable[[], list[Any]]]:
    """In a Lightning trainer; the first is what the others are held against."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ThroughputMonitor

    from mfu_monitor.callbacks import MFUMonitor

    names = [name for name in vars(MFUMonitor) if hasattr(Callback, name) and name.startswith("on_")]
    empty: Any = type("Empty", (Callback,), {name: lambda self, *args, **kwargs: None for name in names})
    return {
        "Trainer without callback": list,
        "an empty callback with MFUMonitor's hooks": lambda: [empty()],
        "mfu_monitor: MFUMonitor, defaults": lambda: [MFUMonitor()],
        "Lightning: ThroughputMonitor": lambda: [ThroughputMonitor(lambda batch: len(batch[0]), window_size=10)],
    }


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One tool beside the bare loop, or beside a trainer without callback."""

    workload: str
    mode: str
    loop: str
    tool: str
    step_s: float | None = None
    """A settled step; None where the tool is not installed."""
    times_bare: float | None = None
    beyond_bare_s: float | None = None
    run_share: float | None = None
    """What a whole run of ``run_steps`` takes longer, as a share of it; counted steps and start included."""
    fixed_s: float | None = None
    """What the first steps take longer: imports, the counter's proof of itself, counts, the end."""


class Training:
    """A model with its optimizer, ready to step."""

    def __init__(self, workload: Workload, mode: str) -> None:
        torch.manual_seed(0)
        self.model, self.batch = workload.model(), workload.batch()
        self._run = torch.compile(self.model) if mode == "compiled" else self.model
        self._optimizer = torch.optim.AdamW(self.model.parameters())
        for _ in range(3):
            self.step()

    def step(self) -> None:
        loss_of(self._run, self.batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def seconds(run: Callable[[], object]) -> float:
    began_s = time.process_time()
    run()
    return time.process_time() - began_s


def quick_s(times_s: list[float]) -> float:
    """The tenth percentile: what else runs on the machine makes steps slower, never quicker."""
    return sorted(times_s)[len(times_s) // 10]


def whole_run_s(watch: Watch, training: Training, steps: int) -> float:
    def run() -> None:
        with watch(training.model, training.batch) as watched:
            for _ in range(steps):
                watched(training.step)

    self_check._found.clear()  # the proof is paid once a process: here once a run
    return seconds(run)


def loop_rows(workload: Workload, mode: str, *, rounds: int, run_steps: int) -> list[Row]:
    """All tools around one workload in a plain loop."""
    trainings = {name: Training(workload, mode) for name in LOOP_TOOLS}
    with contextlib.ExitStack() as stack:
        watching: dict[str, Callable[[Step], None]] = {}
        for name, watch in LOOP_TOOLS.items():
            with contextlib.suppress(ImportError):
                watching[name] = stack.enter_context(watch(trainings[name].model, trainings[name].batch))
        for name, watched in watching.items():
            for _ in range(5):
                watched(trainings[name].step)
        times_s: dict[str, list[float]] = {name: [] for name in watching}
        for _ in range(rounds):
            for name, watched in watching.items():
                training = trainings[name]
                for _ in range(WINDOW_STEPS if name in WINDOWED else 4):
                    times_s[name].append(seconds(partial(watched, training.step)))
        settled = {name: quick_s(found) for name, found in times_s.items()}
    first, whole = (dict.fromkeys(watching, float("inf")) for _ in range(2))
    for _ in range(max(2, rounds // 3)):
        for name in watching:
            first[name] = min(first[name], whole_run_s(LOOP_TOOLS[name], trainings[name], 3))
            long_s = whole_run_s(LOOP_TOOLS[name], trainings[name], run_steps) if name in WINDOWED else 0.0
            whole[name] = min(whole[name], long_s or first[name] + (run_steps - 3) * settled[name])
    return [
        _row(Row(workload.title, mode, "plain loop", name), name, "bare", settled, first, whole) for name in LOOP_TOOLS
    ]


def _row(row: Row, name: str, base: str, step: dict[str, float], first: dict[str, float], run: dict[str, float]) -> Row:
    if name not in step:
        return row
    return Row(
        **{
            **asdict(row),
            "step_s": step[name],
            "times_bare": step[name] / step[base],
            "beyond_bare_s": step[name] - step[base],
            "run_share": run[name] / run[base] - 1,
            "fixed_s": first[name] - first[base] if name != base else 0.0,
        }
    )


def trainer_rows(workload: Workload, *, rounds: int, run_steps: int) -> list[Row]:
    """The callbacks around one workload in a Lightning trainer."""
    tools = callbacks_by_tool()
    step, first, whole = (dict.fromkeys(tools, float("inf")) for _ in range(3))
    for _ in range(rounds):
        for name, callbacks in tools.items():
            run_s, began_s = fit_s(workload, callbacks(), run_steps)
            settled = [later - earlier for earlier, later in itertools.pairwise(began_s[10:])]
            step[name] = min(step[name], quick_s(settled))
            whole[name] = min(whole[name], run_s)
    for name in tools:
        first[name] = whole[name] - run_steps * step[name]
    base = next(iter(tools))
    rows = [Row(workload.title, "eager", "Lightning trainer", name) for name in tools]
    return [_row(row, row.tool, base, step, first, whole) for row in rows]


def fit_s(workload: Workload, callbacks: list[Any], steps: int) -> tuple[float, list[float]]:
    """Seconds of ``Trainer.fit`` over so many steps, with the TensorBoard logger, and when each step began."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(pl.LightningModule):
        flops_per_batch = 1_000_000

        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            began_s.append(time.process_time())
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    began_s: list[float] = []
    torch.manual_seed(0)
    batches = [workload.batch()] * steps
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, log_every_n_steps=WINDOW_STEPS, callbacks=callbacks,
            logger=TensorBoardLogger(folder), enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        return seconds(lambda: trainer.fit(module, loader)), began_s


def self_check_s() -> float:
    """Least seconds of the counter's proof of itself, which runs once a process."""
    times = []
    for _ in range(9):
        self_check._found.clear()
        times.append(seconds(self_check.failed_capabilities))
    return min(times)


# --- showing ----------------------------------------------------------------------------------------------------------

HEADINGS = ("tool", "ms a step", "times bare", "beyond bare, us", "whole run", "fixed, ms")


def cells(row: Row) -> tuple[str, ...]:
    if row.step_s is None:
        return row.tool, "not installed", "", "", "", ""
    shown = ((row.step_s, 1e3, ".3f"), (row.times_bare, 1, ".2f"), (row.beyond_bare_s, 1e6, ".0f"))
    ends = ((row.run_share, 1, "+.1%"), (row.fixed_s, 1e3, ".0f"))
    return (row.tool, *(format((value or 0.0) * factor, how) for value, factor, how in (*shown, *ends)))


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.workload}, {row.mode}, {row.loop}", []).append(row)
    return found


def page(result: dict[str, Any]) -> str:
    """docs/overhead.md, made of the kept result."""
    rows = [Row(**row) for row in result["rows"]]
    about = (
        "Made by `make bench` from what `docs/overhead.json` keeps, not edited by hand. Seconds are the process's own "
        f"on one core ({result['machine']}, torch {result['torch']}, {result['date']}), rounds of all tools "
        f"interleaved, at a load average of {result['load']:.1f} on {result['cores']} cores: where that is more than "
        "the cores, others shared the caches, and differences below a tenth of a step say nothing.",
        "A step is forward, loss, backward and AdamW; the tenth percentile of settled steps is shown. *Whole run*: "
        f"what {result['run_steps']} steps take longer with the tool, from start to end, counted steps included. "
        "*Fixed*: what the first three steps, or a run beside its settled steps, take longer. In a trainer each tool "
        "is held against the trainer without callback. A tool that is not installed has an empty row. Under "
        "`FlopCounterMode` "
        f"compiled code runs in eager. The counter's proof of itself takes {result['self_check_s'] * 1e3:.0f} ms, once "
        "a process.",
    )
    lines = ["# What watching costs"]
    for paragraph in about:
        lines += ["", textwrap.fill(paragraph, 118, break_on_hyphens=False, break_long_words=False)]
    for title, members in groups(rows).items():
        lines += ["", f"## {title}", "", f"| {' | '.join(HEADINGS)} |", "|---|---:|---:|---:|---:|---:|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in members]
    return "\n".join(lines) + "\n"


def show(rows: list[Row], console: Console) -> None:
    for title, members in groups(rows).items():
        table = Table(*HEADINGS, title=title, title_justify="left")
        for row in members:
            table.add_row(*cells(row))
        console.print(table)


def machine() -> str:
    """The processor's name, as the system gives it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching costs.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300, help="length of a whole run")
    parser.add_argument("--only", help="workloads whose title holds this; nothing is kept then")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled rows out; nothing is kept then")
    parser.add_argument("--show", action="store_true", help="make the page again from what is kept")
    options = parser.parse_args()
    if options.show:
        PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    console = Console()
    with mm.FlopCounter():
        pass  # what is imported at the first count is no part of any row
    rows: list[Row] = []
    for workload in WORKLOADS:
        if options.only and options.only not in workload.title:
            continue
        made: list[Row] = []
        for mode in ("eager",) if options.no_compile else ("eager", "compiled"):
            made += loop_rows(workload, mode, rounds=options.rounds, run_steps=options.steps)
            torch.compiler.reset()
        made += trainer_rows(workload, rounds=max(2, options.rounds // 2), run_steps=options.steps)
        show(made, console)
        rows += made
    if options.only or options.no_compile:
        return
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "torch": torch.__version__,
        "run_steps": options.steps,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "self_check_s": self_check_s(),
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
