"""An operator without a formula cannot hide: it is in the record, in the reading and on the TensorBoard card."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import mfu_monitor as mm
from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.formulas.registry import unregister_flop_formula


def hidden_product() -> Any:
    """A custom operator of a new name that multiplies 8x8 matrices where the dispatcher cannot see it."""
    name = f"hidden_{uuid.uuid4().hex[:8]}::multiply"

    @torch.library.custom_op(name, mutates_args=())
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    multiply.register_autograd(
        lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return multiply


class Mixer(nn.Module):
    def __init__(self, multiply: Any) -> None:
        super().__init__()
        self.multiply = multiply
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight)


class Module(L.LightningModule):
    def __init__(self, multiply: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8, bias=False), Mixer(multiply))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(module: Module, folder: Path) -> tuple[MFUMonitor, str]:
    watch = MFUMonitor(peak=1e12, log_every_n_steps=2)
    trainer = L.Trainer(
        max_epochs=1, limit_train_batches=6, logger=TensorBoardLogger(folder, name=None), callbacks=[watch],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(48, 8), batch_size=8))
    read = EventAccumulator(str(folder / "version_0"), size_guidance={"tensors": 0}).Reload()
    card = read.Tensors("mfu_monitor/card/end/text_summary")[-1].tensor_proto.string_val[0].decode()
    return watch, card


def test_it_is_named_with_its_module_and_the_reading_is_a_lower_bound(tmp_path: Path) -> None:
    multiply = hidden_product()
    watch, card = train(Module(multiply), tmp_path)
    assert watch.monitor is not None
    record = next(iter(watch.monitor.records.values()))
    assert (multiply._qualname, "layers.1") in {(u.op, u.module_fqn) for u in record.unsupported_ops}
    assert watch.reading is not None
    assert watch.reading.exactness == "lower_bound"
    assert multiply._qualname in card
    assert "layers.1" in card
    assert "lower bound" in card


def test_with_a_formula_it_is_counted_and_the_reading_is_no_bound(tmp_path: Path) -> None:
    multiply = hidden_product()
    mm.register_flop_formula(multiply)(lambda a, b: 2 * a[0] * a[1] * b[1])
    try:
        watch, card = train(Module(multiply), tmp_path)
    finally:
        unregister_flop_formula(multiply)
    assert watch.monitor is not None
    record = next(iter(watch.monitor.records.values()))
    # Linear: forward and weight gradient; the operator: forward, and its backward's two visible products.
    assert record.model_flops == 2 * (2 * 8 * 8 * 8) + 3 * (2 * 8 * 8 * 8)
    assert watch.reading is not None
    assert watch.reading.exactness in ("presumed", "exact")  # six steps may hold three counts or two
    assert multiply._qualname not in card
