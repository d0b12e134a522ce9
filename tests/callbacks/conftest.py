"""Small Lightning runs, by either package name, and a monitor that writes down how it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BATCHES, ROWS, WIDTH = 6, 4, 8


class RecordingMonitor:
    """Stands in for ``Monitor``: remembers every call and gives a reading when told to."""

    made: list[RecordingMonitor] = []  # noqa: RUF012  # emptied by the fixture

    def __init__(self, model: Any = None, *, config: Any = None, sinks: Sequence[Any] = ()) -> None:
        self.model, self.config, self.sinks = model, config, tuple(sinks)
        self.calls: list[tuple[Any, ...]] = []
        self.reading: Any = None
        self.should_stop = False
        self.state: dict[str, Any] = {"total_steps": 0}
        RecordingMonitor.made.append(self)

    def begin_step(self, batch: Any, *, step: int | None = None, signature_extra: tuple[Any, ...] = ()) -> None:
        self.calls.append(("begin_step", step, signature_extra))

    def end_step(self, *, optimizer_step: bool | None = None) -> None:
        self.calls.append(("end_step", optimizer_step))
        self.state["total_steps"] += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)

    def names_in_steps(self) -> list[str]:
        """As ``names``, without the marks between steps."""
        found, inside = [], True
        for name in self.names():
            inside = inside or name == "begin_step"
            if inside or not name.startswith("mark_phase"):
                found.append(name)
            inside = inside and not name.startswith("end_step")
        return found

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("abort_step", "mark_phase", "pause", "resume", "end_window", "close", "add_sink"):
            raise AttributeError(name)
        return lambda *args: self.calls.append((name, *args))

    def names(self) -> list[str]:
        return [" ".join(str(part) for part in call[:2]) if len(call) == 2 else call[0] for call in self.calls]


@dataclass
class Run:
    """What a test of one Lightning package needs."""

    pl: Any
    folder: Path
    batches: int = BATCHES
    options: dict[str, Any] = field(default_factory=dict)

    def module(self, **overrides: Any) -> Any:
        """A two-layer perceptron; ``overrides`` replace methods of the LightningModule."""
        pl = self.pl

        class Perceptron(pl.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                loss: Tensor = self.layers(batch).pow(2).mean()
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        for name, method in overrides.items():
            setattr(Perceptron, name, method)
        return Perceptron()

    def loader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        rows: Any = torch.randn(self.batches * ROWS, WIDTH, generator=generator)
        return torch.utils.data.DataLoader(rows, batch_size=ROWS)

    def trainer(self, *callbacks: Any, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "log_every_n_steps": 2,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        return self.pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """A run by each of the two packages that Lightning is published as."""
    return Run(importlib.import_module(request.param), tmp_path)


@pytest.fixture
def lightning_run(tmp_path: Path) -> Run:
    """A run by ``lightning`` alone, where the package name makes no difference."""
    return Run(importlib.import_module("lightning.pytorch"), tmp_path)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordingMonitor]:
    """The monitors that adapters make, each of them a ``RecordingMonitor``."""
    monkeypatch.setattr(RecordingMonitor, "made", [])
    for name in ("lightning_callback", "fabric", "transformers_callback"):
        module = importlib.import_module(f"mfu_monitor.callbacks.{name}")
        monkeypatch.setattr(module, "Monitor", RecordingMonitor)
    return RecordingMonitor.made
