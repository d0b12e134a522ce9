"""Other callbacks that monitor our metrics: a reading that is not there never ends a run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.errors import MFUMonitorWarning

NAMES = ["mfu", "hfu", "utilization/mfu", "utilization/hfu", "throughput/tokens_per_s", "step_time/total_s"]


def fit(run: Any, *callbacks: Any, **options: Any) -> tuple[Any, list[str]]:
    """The trainer after training, and the warnings of ours."""
    trainer = run.trainer(*callbacks, **{"max_epochs": 6, "enable_checkpointing": True, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(run.module(), run.loader())
    return trainer, [str(w.message) for w in caught if issubclass(w.category, MFUMonitorWarning)]


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("name", NAMES)
def test_without_a_peak_no_patience_is_used_up(lightning_run: Any, name: str, mode: str) -> None:
    """The batches are no tokens and this CPU has no peak, so most of the names never get a value."""
    stopping = lightning_run.pl.callbacks.EarlyStopping(monitor=name, mode=mode, patience=2, min_delta=0.01)
    keeper = lightning_run.pl.callbacks.ModelCheckpoint(dirpath=lightning_run.folder, monitor=name, mode=mode)
    monitor = MFUMonitor(log_every_n_steps=1000) if name == "step_time/total_s" else MFUMonitor()
    trainer, _ = fit(lightning_run, stopping, monitor, keeper)
    assert name in trainer.callback_metrics
    if name.endswith(("mfu", "hfu")):
        assert trainer.current_epoch == 6


def test_both_packages_are_told_once_why_there_is_no_value(run: Any) -> None:
    keeper = run.pl.callbacks.ModelCheckpoint(dirpath=run.folder, monitor="utilization/mfu", mode="max")
    _, messages = fit(run, MFUMonitor(), keeper)
    told = [message for message in messages if "A callback monitors" in message]
    assert len(told) == 1
    assert "'utilization/mfu'" in told[0]
    assert 'peak="measure"' in told[0]


def test_the_newest_checkpoint_is_kept_while_nothing_is_known(lightning_run: Any) -> None:
    keeper = lightning_run.pl.callbacks.ModelCheckpoint(
        dirpath=lightning_run.folder, monitor="mfu", mode="max", save_top_k=1, filename="{epoch}"
    )
    fit(lightning_run, MFUMonitor(), keeper)
    assert "epoch=5" in keeper.best_model_path


def test_a_scheduler_may_monitor_it_too(lightning_run: Any) -> None:
    def configure_optimizers(self: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mfu"}}

    trainer = lightning_run.trainer(MFUMonitor(), max_epochs=3)
    trainer.fit(lightning_run.module(configure_optimizers=configure_optimizers), lightning_run.loader())
    assert trainer.current_epoch == 3


def test_a_resumed_run_with_checks_in_its_validation_goes_on(lightning_run: Any) -> None:
    def validation_step(self: nn.Module, batch: torch.Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def train(epochs: int, **options: Any) -> Any:
        stopping = lightning_run.pl.callbacks.EarlyStopping(monitor="utilization/mfu", mode="max", patience=1)
        trainer = lightning_run.trainer(stopping, MFUMonitor(), max_epochs=epochs, val_check_interval=2)
        module = lightning_run.module(validation_step=validation_step)
        trainer.fit(module, lightning_run.loader(), lightning_run.loader(), **options)
        return trainer

    first = train(2)
    assert first.current_epoch == 2
    first.save_checkpoint(lightning_run.folder / "last.ckpt")
    assert train(4, ckpt_path=lightning_run.folder / "last.ckpt").current_epoch == 4
