"""The Fabric callback: steps by context or by hooks, loggers and device from ``fabric.setup``."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.csv_logs import CSVLogger
from torch import nn

from mfu_monitor.callbacks import FabricMFUMonitor
from mfu_monitor.errors import ConfigurationError, StageDisabledWarning


def setup(monitor: FabricMFUMonitor, **options: Any) -> tuple[Fabric, Any, Any]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[monitor], **options)
    return (fabric, *fabric.setup(model, optimizer))


def test_setup_gives_the_bare_model_the_device_and_the_loggers(recorded: list[Any], tmp_path: Any) -> None:
    monitor = FabricMFUMonitor(log_every_n_steps=3)
    setup(monitor, loggers=[CSVLogger(tmp_path), CSVLogger(tmp_path, name="b")])
    (made,) = recorded
    assert isinstance(made.model, nn.Linear)
    assert made.config.device == torch.device("cpu")
    assert made.config.log_every_n_steps == 3
    assert len(made.sinks) == 2


def test_each_with_block_is_one_step(recorded: list[Any]) -> None:
    monitor = FabricMFUMonitor()
    fabric, model, optimizer = setup(monitor)
    for _ in range(2):
        with monitor.step(torch.ones(3, 4)):
            fabric.backward(model(torch.ones(3, 4)).sum())
            optimizer.step()
    monitor.close()
    assert [call[0] for call in recorded[0].calls] == ["begin_step", "end_step"] * 2 + ["close"]


def test_the_same_steps_by_fabric_call(recorded: list[Any]) -> None:
    monitor = FabricMFUMonitor()
    fabric, model, _ = setup(monitor)
    batch = torch.ones(3, 4)
    fabric.call("on_train_batch_start", batch, 0)
    loss = model(batch).sum()
    fabric.call("on_before_backward", loss)
    fabric.backward(loss)
    fabric.call("on_after_backward")
    fabric.call("on_train_batch_end", None, batch, 0)
    fabric.call("on_validation_start")
    fabric.call("on_validation_end")
    fabric.call("on_train_epoch_end")
    fabric.call("on_train_end")
    assert recorded[0].names() == [
        "begin_step",
        "mark_phase backward",
        "mark_phase other",
        "end_step None",
        "pause validation",
        "resume validation",
        "end_window",
        "close",
    ]


def test_an_exception_in_a_step_passes_and_the_step_is_forgotten(recorded: list[Any]) -> None:
    monitor = FabricMFUMonitor()
    setup(monitor)
    with pytest.raises(RuntimeError, match="diverged"), monitor.step(torch.ones(3, 4)):
        raise RuntimeError("diverged")
    assert [call[0] for call in recorded[0].calls] == ["begin_step", "abort_step"]


def test_after_an_exception_in_a_step_nothing_of_ours_listens_to_the_garbage_collector() -> None:
    before = list(gc.callbacks)
    monitor = FabricMFUMonitor()
    setup(monitor)
    step = monitor.step(torch.ones(3, 4))
    step.__enter__()
    assert gc.callbacks != before
    is_swallowed = step.__exit__(RuntimeError, RuntimeError("diverged"), None)
    assert not is_swallowed
    assert gc.callbacks == before


def test_saving_can_be_left_out_of_the_window(recorded: list[Any]) -> None:
    monitor = FabricMFUMonitor()
    setup(monitor)
    with monitor.paused("checkpoint"):
        pass
    assert recorded[0].names() == ["pause checkpoint", "resume checkpoint"]


def test_a_step_before_setup_is_refused_with_what_to_do(recorded: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"call fabric\.setup"), FabricMFUMonitor().step(torch.ones(1)):
        pass


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="log_every_n_steps"):
        FabricMFUMonitor(log_every_n_step=3)


def test_a_failure_of_ours_lets_the_loop_go_on(recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = FabricMFUMonitor()
    setup(monitor)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr(recorded[0], "begin_step", broken)
    ran = 0
    with pytest.warns(StageDisabledWarning, match="a bug of ours"), monitor.step(torch.ones(3, 4)):
        ran += 1
    with monitor.step(torch.ones(3, 4)):
        ran += 1
    assert ran == 2


def test_state_travels_as_plain_types(recorded: list[Any]) -> None:
    monitor = FabricMFUMonitor()
    assert monitor.state_dict() == {}
    setup(monitor)
    with monitor.step(torch.ones(3, 4)):
        pass
    again = FabricMFUMonitor()
    setup(again)
    again.load_state_dict(monitor.state_dict())
    assert again.state_dict() == {"total_steps": 1}


def test_a_real_loop_counts_every_product_by_the_models_own_names() -> None:
    monitor = FabricMFUMonitor(peak=1e12, log_every_n_steps=2)
    fabric, model, optimizer = setup(monitor)
    for _ in range(6):
        batch = torch.ones(3, 4)
        with monitor.step(batch):
            fabric.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    assert monitor.monitor is not None
    (record,) = monitor.monitor.records.values()
    # Forward and weight gradient of Linear(4, 2) on 3 rows; the input needs no gradient.
    assert record.model_flops == 2 * (2 * 3 * 4 * 2)
    assert monitor.reading is not None
    assert monitor.reading.mfu == pytest.approx(
        record.model_flops * monitor.reading.window.steps / (monitor.reading.elapsed_s * 1e12), rel=1e-9
    )
