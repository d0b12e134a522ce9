"""Faults injected into real, small Lightning runs on the CPU, against the cause that the alert names.

Each run trains a small language model with the monitor's callback. From a certain step on one thing gets slower (or
changes); the readings that the monitor wrote are replayed through the detector. Sleeping stands for slow work where it
can, so that the injected time does not depend on the machine.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mfu_monitor.alerts import Alert, AlertConfig
from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.cli.report.run_summary import replay_alerts
from mfu_monitor.hardware.nvml import NvmlReading
from mfu_monitor.sinks.jsonl import read_jsonl
from mfu_monitor.timing.probes import TrainingProbes
from mfu_monitor.utilization import UtilizationReading

VOCABULARY, BATCH, LENGTH = 64, 8, 32
STEPS_PER_WINDOW = 4
FAULT_WINDOW, WINDOWS = 50, 66
SLEEP_S = 0.08
"""What a slow part of a step takes: some times a whole healthy step, which a shared machine makes uneven."""
PEAK = 1e11
"""FLOP/s; some number that keeps the MFU of one busy core between 0 and 1."""


class Fault:
    """What a scenario does, and where. Every method is called all the time; ``on`` tells whether the fault acts."""

    kind = "drop"
    cause = ""
    first_step = FAULT_WINDOW * STEPS_PER_WINDOW
    windows = WINDOWS
    epochs = 1
    workers = 0
    drop = 0.4
    """Of the detector. Shared machines are noisy: most of the injected faults are larger than this by far."""
    width = 64
    """Of the model; wider where the products themselves must take the time."""
    monitor: ClassVar[dict[str, Any]] = {}
    trainer: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self._step = multiprocessing.Value("l", 0)  # seen by data workers and by forked ranks

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def on(self) -> bool:
        return bool(self._step.value >= self.first_step)

    def begin_step(self, step: int) -> None:
        self._step.value = step

    def length(self) -> int:
        return LENGTH

    def padding(self) -> float:
        return 0.1

    def fetch(self) -> None: ...

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def optimizer(self) -> None: ...

    def callback(self) -> None: ...

    def validation(self) -> None: ...

    @property
    def checkpointing(self) -> bool:
        return False

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """The environment of the whole run."""
        yield


class SlowDataset(Fault):
    cause = "data_loading"

    def fetch(self) -> None:
        if self.on:
            time.sleep(SLEEP_S / BATCH)


class SlowWorkerAtEpochStart(Fault):
    """From the seventh epoch on worker 0 takes long over its first sample of an epoch."""

    cause = "data_loading"
    workers = 1
    epochs, windows = 13, 10  # windows an epoch
    first_step = 60 * STEPS_PER_WINDOW - 1  # workers start before the epoch's first step

    def fetch(self) -> None:
        if self.on and get_worker_info() is not None and not self._started:
            time.sleep(20 * SLEEP_S)
        self._started = True

    _started = False  # set in each worker process anew


class LongerSequences(Fault):
    kind, cause = "change", "model_flops"

    def length(self) -> int:
        return 3 * LENGTH if self.on else LENGTH


class HeavierPadding(Fault):
    cause = "padding"
    drop = 0.25  # useful tokens fall from 0.9 to 0.4
    monitor: ClassVar[dict[str, Any]] = {"count_padding": True}

    def padding(self) -> float:
        return 0.6 if self.on else 0.1


class GcStorm(Fault):
    cause = "garbage_collection"

    def __init__(self) -> None:
        super().__init__()
        self._objects = [[i] for i in range(300_000)]

    def forward(self) -> None:
        if self.on:
            gc.collect()
            gc.collect()


class RecompilationStorm(Fault):
    """Every other step compiles a small function for a shape that it has not seen."""

    cause = "recompilation"

    def __init__(self) -> None:
        super().__init__()
        self._compiled = torch.compile(lambda x: (x * 2).sin().sum(), backend="eager", dynamic=False)
        self._width = 1

    def forward(self) -> None:
        if self.on and self._step.value % 2:
            for _ in range(4):
                self._width += 1
                self._compiled(torch.ones(self._width))

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000):
            yield


class CheckpointingSwitchedOn(Fault):
    """Checkpoints inside checkpoints, so that the loss stands out of a shared machine's noise."""

    cause = "recompute"
    drop, width = 0.25, 256  # a single level of checkpointing costs a third more work of the hardware, four levels 4/3
    monitor: ClassVar[dict[str, Any]] = {
        "count": "every_step"
    }  # a replayed count would not see it until the next random one

    @property
    def checkpointing(self) -> bool:
        return self.on

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with set_checkpoint_early_stop(False):  # or it would leave out what is needed only for the block's end
            yield


def _spin() -> None:
    while True:
        pass


class BusyNeighbour(Fault):
    """Three processes a core that do nothing but run."""

    cause = "cpu_contention"

    def __init__(self) -> None:
        super().__init__()
        self._neighbours: list[Any] = []

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.on and not self._neighbours:
            processes = multiprocessing.get_context("fork")
            count = 3 * len(os.sched_getaffinity(0))
            self._neighbours = [processes.Process(target=_spin, daemon=True) for _ in range(count)]
            for neighbour in self._neighbours:
                neighbour.start()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        try:
            yield
        finally:
            for neighbour in self._neighbours:
                neighbour.kill()


class SlowOptimizer(Fault):
    cause = "optimizer"

    def optimizer(self) -> None:
        if self.on:
            time.sleep(SLEEP_S)


class SlowCallback(Fault):
    cause = "between_steps"

    def callback(self) -> None:
        if self.on:
            time.sleep(SLEEP_S)


class SlowForward(Fault):
    cause = "forward"

    def forward(self) -> None:
        if self.on:
            time.sleep(SLEEP_S)


class SlowBackward(Fault):
    cause = "backward"

    def backward(self) -> None:
        if self.on:
            time.sleep(SLEEP_S)


class LongerValidation(Fault):
    kind = ""
    trainer: ClassVar[dict[str, Any]] = {"val_check_interval": 40, "limit_val_batches": 1}

    def validation(self) -> None:
        time.sleep(0.5 if self.on else 0.01)


class Straggler(Fault):
    """Two gloo ranks; rank 1 gets slow."""

    cause = "straggler"
    trainer: ClassVar[dict[str, Any]] = {"strategy": "ddp_fork", "devices": 2}

    def forward(self) -> None:
        if self.on and torch.distributed.get_rank() == 1:
            time.sleep(4 * SLEEP_S)


class _SlowCompute(Fault):
    compute_s = SLEEP_S

    def forward(self) -> None:
        if self.on:
            time.sleep(self.compute_s / 3)

    def backward(self) -> None:
        if self.on:
            time.sleep(2 * self.compute_s / 3)


class ThrottledClocks(_SlowCompute):
    """The computing gets slow, and a driver that is made up says that the clock did."""

    cause = "clock_throttling"
    compute_s = 0.012  # a step of 5 to 10 ms gets two to three times longer, about as the clock says

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        def read(device: torch.device) -> NvmlReading:
            if self.on:
                return NvmlReading(sm_clock_mhz=600.0, temperature_c=91.0, clock_reasons=("hw_thermal_slowdown",))
            return NvmlReading(sm_clock_mhz=1980.0, temperature_c=60.0, clock_reasons=())

        def probes(**_: Any) -> TrainingProbes:
            return TrainingProbes(device=torch.device("cuda"), read_device=read, device_interval_s=0.0)

        with mock.patch("mfu_monitor.monitor.TrainingProbes", probes):
            yield


class AllocatorRetries(_SlowCompute):
    cause = "allocator_retries"

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        def retries(device: Any) -> int:
            return int(max(0, self._step.value - self.first_step))

        with mock.patch("mfu_monitor.timing.probes.allocation_retries", retries):
            yield


FAULTS: tuple[type[Fault], ...] = (
    SlowDataset,
    SlowWorkerAtEpochStart,
    LongerSequences,
    HeavierPadding,
    GcStorm,
    RecompilationStorm,
    CheckpointingSwitchedOn,
    BusyNeighbour,
    SlowOptimizer,
    SlowCallback,
    SlowForward,
    SlowBackward,
    LongerValidation,
    Straggler,
    ThrottledClocks,
    AllocatorRetries,
)


# The training run.


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; as many samples as the run has steps and ranks."""

    def __init__(self, fault: Fault, samples: int) -> None:
        self.fault, self.samples = fault, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.fault.fetch()
        length = self.fault.length()
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.long)
        mask[length - round(self.fault.padding() * length) :] = 0
        return {"input_ids": tokens, "attention_mask": mask}


class Model(L.LightningModule):
    """An embedding, four blocks of two products, and a head: some ten milliseconds a step."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        width = fault.width
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + _run(block, hidden, levels=4 if self.fault.checkpointing else 0)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.fault.backward())
        logits: torch.Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.fault.forward()
        logits = self(batch["input_ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.fault.validation()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fault = self.fault

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = super().step(closure)
                fault.optimizer()
                return loss

        return Optimizer(self.parameters(), lr=0.01)


def _run(block: nn.Module, hidden: torch.Tensor, levels: int) -> Any:
    """The block under so many levels of activation checkpointing: each runs its forward once more in backward."""
    return checkpoint(_run, block, hidden, levels - 1, use_reentrant=False) if levels else block(hidden)


class UserCallback(L.Callback):
    """What a user might have: something of his own after each batch. It also moves the fault's clock."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.fault.begin_step(trainer.fit_loop.total_batch_idx + 1)
        self.fault.callback()


def train(fault: Fault, folder: Path) -> tuple[UtilizationReading, ...]:
    """One run; its readings as the monitor wrote them."""
    log = folder / f"{fault.name}.jsonl"
    devices = fault.trainer.get("devices", 1)
    steps = fault.windows * STEPS_PER_WINDOW
    loader = DataLoader(Tokens(fault, steps * BATCH * devices), batch_size=BATCH, num_workers=fault.workers)
    options: dict[str, Any] = {"log_every_n_steps": STEPS_PER_WINDOW, "peak": PEAK, "jsonl": str(log)}
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0}
    with fault.around(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer = L.Trainer(
            **defaults | fault.trainer,
            max_epochs=fault.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[MFUMonitor(**options | fault.monitor), UserCallback(fault)],
            default_root_dir=folder,
        )
        trainer.fit(Model(fault), loader, DataLoader(Tokens(fault, BATCH), batch_size=BATCH))
    return read_jsonl(log).readings


# The matrix.


@dataclass(frozen=True)
class Outcome:
    """What was injected, and what the alerts said of it."""

    fault: Fault
    readings: Sequence[UtilizationReading]
    alerts: Sequence[Alert]
    attempt: int

    @property
    def cpu_wait(self) -> float:
        """Share of the time before the fault in which the process waited for a CPU: how disturbed the run was."""
        before = [r for r in self.readings if r.last_step < self.fault.first_step]
        waits = sum(r.window.cpu_wait_s or 0.0 for r in before)
        return waits / max(1e-9, sum(r.elapsed_s for r in before))

    @property
    def told(self) -> list[Alert]:
        """Notices of the fault: not recoveries, and not of windows before it."""
        return [a for a in self.alerts if a.kind != "recovery" and a.step > self.fault.first_step]

    @property
    def early(self) -> int:
        """Alerts before the fault. On a shared machine they may be true: somebody else took the CPU."""
        return sum(alert.step <= self.fault.first_step for alert in self.alerts)

    @property
    def is_right(self) -> bool:
        """One notice, of the kind and with the first cause that were injected."""
        if not self.fault.kind:
            return not self.told
        if len(self.told) != 1 or self.told[0].kind != self.fault.kind:
            return False
        return bool(self.told[0].causes) and self.told[0].causes[0].name == self.fault.cause


def inject(fault_type: type[Fault], folder: Path, attempts: int) -> Outcome:
    """Run one scenario; again where it was not named right, as a neighbour's load names itself."""
    outcomes: list[Outcome] = []
    while len(outcomes) < attempts and not (outcomes and outcomes[-1].is_right):
        fault = fault_type()
        readings = train(fault, folder / str(len(outcomes)))
        config = AlertConfig(drop=fault.drop, warmup=8, min_baseline=15, long_windows=25)
        outcomes.append(Outcome(fault, readings, replay_alerts(readings, config), len(outcomes) + 1))
    return outcomes[-1]


def report_injected(console: Console, only: Sequence[str] | None = None, attempts: int = 3) -> bool:
    """Run the scenarios and print the matrix; whether all were named right."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_utilities"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    chosen = [fault for fault in FAULTS if not only or fault.__name__ in only]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [inject(fault, Path(folder), attempts) for fault in chosen]
    _print_matrix(console, outcomes)
    return all(outcome.is_right for outcome in outcomes)


def _print_matrix(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table(title="Injected into real Lightning runs on the CPU")
    for column in (
        "injected",
        "expected",
        "told",
        "share of the loss",
        "MFU",
        "next causes",
        "attempt",
        "CPU wait",
        "",
    ):
        table.add_column(column)
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    console.print(table)
    console.print(f"Named right: {sum(outcome.is_right for outcome in outcomes)} of {len(outcomes)}")


def _row(outcome: Outcome) -> list[str]:
    fault = outcome.fault
    expected = f"{fault.kind}: {fault.cause}" if fault.kind else "no alert"
    mark = ("right" if outcome.is_right else "WRONG") + (f", {outcome.early} early" if outcome.early else "")
    run = [str(outcome.attempt), f"{outcome.cpu_wait:.0%}"]
    if not outcome.told:
        return [fault.name, expected, "no alert", "", _goodput(outcome), "", *run, mark]
    told = outcome.told[0]
    first, *others = told.causes or (None,)
    share = "" if first is None or first.share_of_loss is None else f"{first.share_of_loss:.0%}"
    name = "unknown" if first is None else first.name
    rest = ", ".join(c.name + (f" {c.share_of_loss:.0%}" if c.share_of_loss else "") for c in others if c is not None)
    more = f" (+{len(outcome.told) - 1})" if len(outcome.told) > 1 else ""
    levels = f"{told.baseline or 0:.1%} -> {told.mfu or 0:.1%}"
    return [fault.name, expected, f"{told.kind}: {name}{more}", share, levels, rest, *run, mark]


def _goodput(outcome: Outcome) -> str:
    """Goodput before and after the fault, where no alert is right: it is there that the loss shows."""
    halves = [
        [r for r in outcome.readings if (r.last_step < outcome.fault.first_step) is before] for before in (True, False)
    ]
    shares = [sum(r.elapsed_s for r in half) / max(1e-9, sum(r.window.wall_s for r in half)) for half in halves]
    return f"time in steps {shares[0]:.0%} -> {shares[1]:.0%}"
