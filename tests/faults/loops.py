"""Small training runs that a fault is put into: a loop of one's own, Lightning, Hugging Face, and compiled code.

Each trains the same two layers, one of which has a module formula, and gives back what a user could notice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import mfu_monitor as mm
from mfu_monitor.callbacks import MFUCallback, MFUMonitor
from mfu_monitor.errors import MFUMonitorWarning

ROWS, WIDE, HIDDEN = 4, 8, 16
STEPS, WINDOW = 8, 3
PRODUCT = 2 * ROWS * WIDE * HIDDEN
STEP_FLOPS = 5 * PRODUCT
"""Two forwards, the gradients of two weights and of the second layer's input."""
TOKENS = 24
LOG = "a.jsonl"


class Opaque(nn.Linear):
    """A layer with a formula of its own: its products are priced as a whole."""


class Layers(nn.Module):
    """Two products around what draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Opaque(WIDE, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDE))

    def forward(self, x: Tensor, input_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:
        return {"loss": self.layers(x).square().mean()}


@dataclass
class Ran:
    """What a run leaves to see."""

    weights: list[Tensor] = field(default_factory=list)
    random_states: tuple[Any, ...] = ()
    raised: BaseException | None = None
    warned: list[str] = field(default_factory=list)
    readings: list[dict[str, Any]] = field(default_factory=list)
    wrapped: list[str] = field(default_factory=list)
    """Attributes of the trainer that are ours after training."""


Loop = Callable[[Path, "contextlib.AbstractContextManager[Any] | None", Ran], nn.Module]
"""Trains, watched inside the block that is given, unwatched without; fills in what it leaves and gives the model."""


def run(loop: Loop, folder: Path, injection: contextlib.AbstractContextManager[Any] | None) -> Ran:
    """One run from the same start."""
    ran = Ran()
    (folder / LOG).unlink(missing_ok=True)
    torch.manual_seed(0)
    random.seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = loop(folder, injection, ran)
    ran.weights = [p.detach().clone() for p in model.parameters()]
    ran.random_states = (torch.get_rng_state(), random.getstate())
    ran.warned = [str(w.message) for w in caught if issubclass(w.category, MFUMonitorWarning)]
    lines = (folder / LOG).read_text().splitlines() if (folder / LOG).exists() else []
    ran.readings = [event["payload"] for event in map(json.loads, lines) if event["kind"] == "reading"]
    return ran


def _batch() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(0, 9, (ROWS, TOKENS // ROWS)),
        "x": torch.randn(ROWS, WIDE),
        "attention_mask": torch.ones(ROWS, TOKENS // ROWS, dtype=torch.long),
    }


@contextlib.contextmanager
def _kept(ran: Ran) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is looked at
        ran.raised = error


def plain(folder: Path, injection: Any, ran: Ran, model: nn.Module | None = None) -> nn.Module:
    """``with monitor.step(batch):``, with phases and a pause."""
    model = Layers() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = None
    if injection is not None:
        monitor = mm.Monitor(
            model, log_every_n_steps=WINDOW, peak=1e12, jsonl=folder / LOG, count_padding=True, total_steps=STEPS
        )

    def inside(part: Any) -> Any:
        return contextlib.nullcontext() if monitor is None else part(monitor)

    def train() -> None:
        for step in range(STEPS):
            batch = _batch()
            with inside(lambda m, batch=batch: m.step(batch)):
                with inside(lambda m: m.phase("forward")):
                    loss = model(**batch)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == STEPS // 2:
                with inside(lambda m: m.paused("validation")):
                    model(**batch)
        if monitor is not None:
            monitor.close()
            monitor.state_dict()

    with _kept(ran), injection or contextlib.nullcontext():
        train()
    if monitor is not None:
        monitor.close()
    return model


@functools.cache
def _compiled() -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDE))
    return model, torch.compile(model), {name: t.clone() for name, t in model.state_dict().items()}


class _Called(nn.Module):
    def __init__(self, model: nn.Module, call: Any) -> None:
        super().__init__()
        self.model, self._call = model, [call]

    def forward(self, x: Tensor, **_: Tensor) -> Any:
        return {"loss": self._call[0](x).square().mean()}


def compiled(folder: Path, injection: Any, ran: Ran) -> nn.Module:
    """The loop around compiled code, which is compiled once for all runs."""
    model, call, start = _compiled()
    model.load_state_dict(start)
    model.zero_grad()
    torch.manual_seed(0)
    return plain(folder, injection, ran, _Called(model, call))


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS * STEPS, WIDE, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "input_ids": torch.ones(TOKENS // ROWS, dtype=torch.long)}


class _Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Layers()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.model(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def lightning(folder: Path, injection: Any, ran: Ran) -> nn.Module:
    """A Lightning Trainer that validates and saves in between."""
    module = _Module()
    data = torch.utils.data.DataLoader(_Rows(), batch_size=ROWS)
    callback = MFUMonitor(peak=1e12, jsonl=str(folder / LOG), log_every_n_steps=WINDOW, total_steps=STEPS)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[callback] if injection is not None else [], val_check_interval=4,
        default_root_dir=folder, limit_val_batches=1, num_sanity_val_steps=0,
    )  # fmt: skip
    owners = (trainer, trainer.strategy, trainer.fit_loop.epoch_loop)
    with _kept(ran), injection or contextlib.nullcontext():
        trainer.fit(module, train_dataloaders=data, val_dataloaders=data)
        trainer.save_checkpoint(folder / "a.ckpt")
    ran.wrapped = [name for owner in owners for name in _wrapped(owner)]
    return module


def hugging_face(folder: Path, injection: Any, ran: Ran) -> nn.Module:
    """A Hugging Face Trainer."""
    model = Layers()
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=ROWS, num_train_epochs=1, logging_steps=WINDOW,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.1, eval_strategy="steps",
        eval_steps=4, log_level="error",
    )  # fmt: skip
    callback = MFUCallback(peak=1e12, jsonl=str(folder / LOG), console=False)
    rows = _Rows()
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=[rows[0], rows[1]],
        callbacks=[callback] if injection is not None else [],
    )  # fmt: skip
    owners = (trainer, trainer.accelerator, trainer.callback_handler)
    with _kept(ran), contextlib.redirect_stdout(None), injection or contextlib.nullcontext():
        trainer.train()
    ran.wrapped = [name for owner in owners for name in _wrapped(owner)]
    return model


def _wrapped(owner: Any) -> list[str]:
    """Attributes of an object that are ours."""
    return [
        name for name, value in vars(owner).items() if str(type(value).__module__).startswith("mfu_monitor.internals")
    ]


LOOPS: dict[str, Loop] = {
    "plain": plain, "compiled": compiled, "lightning": lightning, "hugging_face": hugging_face
}  # fmt: skip
