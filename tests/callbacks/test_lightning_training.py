"""Real runs with the real monitor: what reaches the loggers, and that training is the same without us."""

from __future__ import annotations

import csv
import gc
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.errors import MFUMonitorWarning
from mfu_monitor.sinks import read_jsonl

B, S, C, VOCABULARY = 2, 8, 16, 32
PEAK = 1e12  # FLOP/s; any number does, as the tests compare and do not judge

# The tags of DESIGN.md that a CPU run with a known peak and tokens has.
TAGS = {
    "utilization/mfu",
    "utilization/hfu",
    "utilization/goodput_mfu",
    "throughput/tokens_per_s",
    "throughput/device/tokens_per_s",
    "throughput/samples_per_s",
    "throughput/device/model_flops_per_s",
    "throughput/device/hardware_flops_per_s",
    "step_time/total_s",
    "step_time/data_wait_s",
    "step_time/forward_s",
    "step_time/backward_s",
    "step_time/optimizer_s",
    "step_time/other_s",
    "flops_per_step/model",
    "flops_per_step/hardware",
    "flops_per_step/recompute",
}


class Model(nn.Module):
    """An embedding, a block with dropout that may be checkpointed, and a head."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.embedding = nn.Embedding(VOCABULARY, C)
        self.block = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * C, C))
        self.norm = nn.BatchNorm1d(C)  # has buffers that a step changes
        self.head = nn.Linear(C, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = checkpoint(self.block, x, use_reentrant=False) if self.is_checkpointed else self.block(x)
        logits: Tensor = self.head(self.norm(x.flatten(0, 1)))
        return logits


# Three Linears, each forward, weight gradient and input gradient (the embedding is trained).
MODEL_FLOPS = 3 * 2 * B * S * (C * 4 * C + 4 * C * C + C * VOCABULARY)


def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
    loss = nn.functional.cross_entropy(self.layers(batch["input_ids"]), batch["input_ids"].flatten())
    self.losses.append(loss.detach().clone())
    self.log("train_loss", loss)
    return loss


def language_module(run: Any, *, is_checkpointed: bool = False, **overrides: Any) -> Any:
    module = run.module(training_step=training_step, **overrides)
    torch.manual_seed(0)
    module.layers, module.losses = Model(is_checkpointed=is_checkpointed), []
    return module


def batches(count: int) -> Any:
    ids = torch.randint(0, VOCABULARY, (count * B, S), generator=torch.Generator().manual_seed(1))
    rows: Any = [{"input_ids": row} for row in ids]
    return torch.utils.data.DataLoader(rows, batch_size=B)


def tensorboard(run: Any) -> Any:
    return run.pl.loggers.TensorBoardLogger(run.folder, name="tb", version="0")


def events(run: Any) -> Any:
    return EventAccumulator(str(run.folder / "tb" / "0")).Reload()


def test_tensorboard_has_every_tag_and_mfu_follows_from_the_jsonl_file(run: Any) -> None:
    path = run.folder / "mfu.jsonl"
    module = language_module(run, is_checkpointed=True)
    monitor = MFUMonitor(peak=PEAK, jsonl=str(path), detail="full")
    run.trainer(monitor, logger=tensorboard(run), log_every_n_steps=4).fit(module, batches(12))
    read, kept = events(run), read_jsonl(path)
    assert set(read.Tags()["scalars"]) >= TAGS
    mfu = {s.step: s.value for s in read.Scalars("utilization/mfu")}
    hfu = {s.step: s.value for s in read.Scalars("utilization/hfu")}
    assert list(mfu) == [r.last_step for r in kept.readings]
    for reading in kept.readings:
        window = reading.window
        per_step = kept.records[0].model_flops
        assert per_step == MODEL_FLOPS
        expected = per_step * window.steps / (window.elapsed_s * PEAK)
        assert mfu[reading.last_step] == pytest.approx(expected, rel=1e-6)
        assert 0 < mfu[reading.last_step] < hfu[reading.last_step]


def test_tensorboard_has_the_layout_and_the_two_cards(run: Any) -> None:
    module = language_module(run)
    run.trainer(MFUMonitor(peak=PEAK), logger=tensorboard(run), log_every_n_steps=4).fit(module, batches(12))
    read = events(run)
    assert "custom_scalars__config__" in read.Tags()["tensors"]
    start, end = (read.Tensors(f"mfu_monitor/card/{when}/text_summary") for when in ("start", "end"))
    assert len(start) == len(end) == 1
    first, last = (t[0].tensor_proto.string_val[0].decode() for t in (start, end))
    assert f"| forward | {MODEL_FLOPS // 3:,} |" in first
    assert "1 TFLOP/s dense at fp32" in first
    assert "layers.block.0" in first
    assert "MFU: **" not in first
    assert "MFU: **" in last
    assert end[0].step == 11


def test_the_step_axis_is_that_of_the_trainers_own_logs(run: Any) -> None:
    module = language_module(run)
    options = {"log_every_n_steps": 2, "accumulate_grad_batches": 2, "max_epochs": 2}
    monitor = MFUMonitor(peak=PEAK, log_every_n_steps=4, max_overhead=0.0)  # no window of counted steps alone
    trainer = run.trainer(monitor, logger=tensorboard(run), **options)
    trainer.fit(module, batches(8))
    read = events(run)
    loss = [s.step for s in read.Scalars("train_loss")]
    mfu = [s.step for s in read.Scalars("utilization/mfu")]
    # Two batches an optimizer step: windows of four batches end with optimizer steps 1, 3, 5, 7 (counted from 0).
    assert loss == mfu == [1, 3, 5, 7]


def test_every_logger_gets_the_metrics(run: Any) -> None:
    loggers = [tensorboard(run), run.pl.loggers.CSVLogger(run.folder, name="csv", version="0")]
    module = language_module(run)
    run.trainer(MFUMonitor(peak=PEAK), logger=loggers, log_every_n_steps=4).fit(module, batches(8))
    with (run.folder / "csv" / "0" / "metrics.csv").open() as file:
        column = [float(row["utilization/mfu"]) for row in csv.DictReader(file) if row["utilization/mfu"]]
    assert column == pytest.approx([s.value for s in events(run).Scalars("utilization/mfu")], rel=1e-6)


def test_without_a_logger_there_is_one_line_a_window(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run.trainer(MFUMonitor(peak=PEAK), log_every_n_steps=4).fit(language_module(run), batches(12))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mfu-monitor steps")]
    assert len(lines) == 3
    assert all("MFU" in line and "tokens/s" in line for line in lines)


def test_a_partial_window_at_the_end_is_reported_with_its_own_steps(lightning_run: Any) -> None:
    path = lightning_run.folder / "mfu.jsonl"
    monitor = MFUMonitor(peak=PEAK, jsonl=str(path), log_every_n_steps=4)
    lightning_run.trainer(monitor).fit(language_module(lightning_run), batches(10))
    last = read_jsonl(path).readings[-1]
    assert (last.first_step, last.last_step) == (8, 9)
    assert last.window.tokens == last.window.steps * B * S


def test_accumulated_batches_are_summed_like_any_other(lightning_run: Any) -> None:
    path = lightning_run.folder / "mfu.jsonl"
    monitor = MFUMonitor(peak=PEAK, jsonl=str(path), log_every_n_steps=8)
    lightning_run.trainer(monitor, accumulate_grad_batches=4).fit(language_module(lightning_run), batches(24))
    window = read_jsonl(path).readings[-1].window
    assert window.steps + window.excluded_steps == 8
    assert window.model_flops == window.steps * MODEL_FLOPS
    assert window.tokens == window.steps * B * S


def test_validation_and_saving_are_in_no_window(lightning_run: Any) -> None:
    slow_s = 0.2

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(slow_s)

    class SlowSaver(lightning_run.pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(lightning_run.folder / "x.ckpt")

        def on_save_checkpoint(self, *args: Any) -> None:
            time.sleep(slow_s)

    path = lightning_run.folder / "mfu.jsonl"
    module = language_module(lightning_run, validation_step=validation_step)
    trainer = lightning_run.trainer(
        MFUMonitor(peak=PEAK, jsonl=str(path), log_every_n_steps=8),
        SlowSaver(),
        val_check_interval=4,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, batches(16), batches(1))
    windows = [r.window for r in read_jsonl(path).readings]
    excluded = {reason: sum(w.excluded_s.get(reason, 0.0) for w in windows) for reason in ("validation", "checkpoint")}
    # Validation after batches 4, 8 and 12 (the one after 16 comes when the last window is closed), one saving.
    assert excluded["validation"] >= 3 * slow_s
    assert excluded["checkpoint"] >= slow_s
    assert sum(w.wall_s for w in windows) >= 4 * slow_s
    assert sum(w.elapsed_s for w in windows) <= sum(w.wall_s for w in windows) - 4 * slow_s


def test_waiting_for_data_stays_in_the_window(lightning_run: Any) -> None:
    class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 6 * B

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            time.sleep(0.03 / B)
            return {"input_ids": torch.full((S,), index % VOCABULARY)}

    path = lightning_run.folder / "mfu.jsonl"
    loader = torch.utils.data.DataLoader(Slow(), batch_size=B)
    monitor = MFUMonitor(peak=PEAK, jsonl=str(path), log_every_n_steps=6)
    lightning_run.trainer(monitor).fit(language_module(lightning_run), loader)
    (reading,) = read_jsonl(path).readings
    window = reading.window
    assert window.data_wait_s is not None
    # The batch is fetched one ahead, so the last of the steps has none to wait for.
    assert window.data_wait_s >= 0.03 * (window.steps - 1)
    assert window.elapsed_s >= window.data_wait_s


def test_early_stopping_and_model_checkpoint_work_with_real_readings(run: Any) -> None:
    stopping = run.pl.callbacks.EarlyStopping(monitor="mfu", mode="min", patience=100)
    keeper = run.pl.callbacks.ModelCheckpoint(dirpath=run.folder, monitor="mfu", mode="max", save_top_k=1)
    trainer = run.trainer(MFUMonitor(peak=PEAK), stopping, keeper, max_epochs=3, enable_checkpointing=True)
    trainer.fit(language_module(run), batches(4))
    assert trainer.current_epoch == 3
    assert Path(keeper.best_model_path).exists()
    assert 0 < float(keeper.best_model_score) < 1


def test_totals_go_on_after_a_resume_and_the_time_between_is_in_no_window(run: Any) -> None:
    first = MFUMonitor(peak=PEAK)
    trainer = run.trainer(first)
    trainer.fit(language_module(run), batches(6))
    path = run.folder / "last.ckpt"
    trainer.save_checkpoint(path)
    time.sleep(0.5)
    second = MFUMonitor(peak=PEAK)
    trainer = run.trainer(second, max_epochs=2)
    began_s = time.perf_counter()
    trainer.fit(language_module(run), batches(6), ckpt_path=path)
    took_s = time.perf_counter() - began_s
    assert second.monitor is not None
    assert first.monitor is not None
    assert first.monitor.totals["tokens"] == 6 * B * S
    assert second.monitor.totals["tokens"] == 12 * B * S
    assert second.monitor.totals["steps"] == 12
    assert second.monitor.reading is not None
    assert second.monitor.reading.window.wall_s <= took_s  # the half second between the runs is not in it
    assert second.monitor.reading.last_step == 11


def train(run: Any, callbacks: list[Any], *, is_checkpointed: bool) -> tuple[list[Tensor], Any, tuple[Any, ...]]:
    """Losses, module and random-number state after 50 steps from the same start."""
    random.seed(0)
    np.random.seed(0)  # the global state is what is compared
    module = language_module(run, is_checkpointed=is_checkpointed)
    torch.manual_seed(7)
    run.trainer(*callbacks, log_every_n_steps=10).fit(module, batches(50))
    return (
        module.losses,
        module,
        (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()),
    )


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("count", ["auto", "every_step"])
def test_fifty_steps_are_the_same_bit_for_bit(lightning_run: Any, is_checkpointed: bool, count: str) -> None:
    losses, module, rng = train(lightning_run, [], is_checkpointed=is_checkpointed)
    monitor = MFUMonitor(peak=PEAK, count=count)
    our_losses, our_module, our_rng = train(lightning_run, [monitor], is_checkpointed=is_checkpointed)
    assert len(losses) == 50
    assert monitor.reading is not None
    assert all(torch.equal(a, b) for a, b in zip(losses, our_losses, strict=True))
    ours, theirs = our_module.state_dict(), module.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(rng[0], our_rng[0])
    assert rng[1:] == our_rng[1:]


GLOBAL_HOOKS = [name for name in vars(module_hooks) if name.startswith("_global_") and "hook" in name]
OPTIMIZER_HOOKS = [name for name in vars(optimizer_hooks) if name.startswith("_global_optimizer")]


def traces(module: nn.Module | None = None) -> dict[str, Any]:
    """Everything where a hook, a mode or a patch of ours could lie."""
    found: dict[str, Any] = {
        "modes": len(_get_current_dispatch_mode_stack()),
        "functions": torch._C._len_torch_function_stack(),
        "gc": len(gc.callbacks),
        **{name: len(getattr(module_hooks, name) or ()) for name in GLOBAL_HOOKS},
        **{name: len(getattr(optimizer_hooks, name)) for name in OPTIMIZER_HOOKS},
    }
    for name, part in module.named_modules() if module is not None else ():
        found[f"{name}.buffers"] = sorted(n for n, _ in part.named_buffers(recurse=False))
        hooks = [n for n in vars(part) if "hook" in n]
        found[f"{name}.hooks"] = {n: len(getattr(part, n) or ()) for n in hooks if hasattr(getattr(part, n), "__len__")}
        found[f"{name}.names"] = sorted(vars(part))
    return found


@pytest.mark.parametrize("fail_at", [0, 1, 5])
@pytest.mark.parametrize("error", [None, RuntimeError("diverged"), KeyboardInterrupt()])
def test_nothing_of_ours_is_left_after_training_an_exception_or_ctrl_c(
    lightning_run: Any, error: BaseException | None, fail_at: int
) -> None:
    def failing_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = training_step(self, batch, batch_idx)
        if error is not None and batch_idx == fail_at:
            raise error
        return loss

    def fit(callbacks: list[Any]) -> Any:
        module = language_module(lightning_run, is_checkpointed=True)
        type(module).training_step = failing_step
        trainer = lightning_run.trainer(*callbacks)
        handler = signal.getsignal(signal.SIGINT)
        if error is None:
            trainer.fit(module, batches(8))
        else:
            with pytest.raises((RuntimeError, SystemExit)):
                trainer.fit(module, batches(8))
        signal.signal(signal.SIGINT, handler)
        return module, sorted(vars(trainer)), sorted(vars(trainer.strategy)), sorted(vars(trainer.fit_loop.epoch_loop))

    plain = traces()
    module, *owners = fit([])
    expected = {**plain, **traces(module)}
    measured, *our_owners = fit([MFUMonitor(peak=PEAK)])
    assert traces(measured) == expected
    assert our_owners == owners
    assert list(measured.state_dict()) == list(module.state_dict())


def test_manual_optimization_with_two_optimizers_counts_what_each_batch_runs(lightning_run: Any) -> None:
    def alternating_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.layers(batch["input_ids"]), batch["input_ids"].flatten())
        self.manual_backward(loss)
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.step()
        optimizer.zero_grad()

    def two_optimizers(self: Any) -> list[torch.optim.Optimizer]:
        parts = (self.layers.block, self.layers.head)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    module = lightning_run.module(training_step=alternating_step, configure_optimizers=two_optimizers)
    module.automatic_optimization, module.layers = False, Model()
    path = lightning_run.folder / "mfu.jsonl"
    monitor = MFUMonitor(peak=PEAK, jsonl=str(path), log_every_n_steps=4)
    lightning_run.trainer(monitor).fit(module, batches(12))
    readings = read_jsonl(path).readings
    assert [r.last_step for r in readings] == [3, 7, 11]
    assert all(r.window.model_flops == r.window.steps * MODEL_FLOPS for r in readings)
    assert readings[-1].window.optimizer_s is not None


def test_a_gan_that_trains_its_generator_on_every_fifth_batch_is_counted_as_it_runs(lightning_run: Any) -> None:
    def gan_step(self: Any, batch: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.layers
        optimizers = self.optimizers()
        self.manual_backward(discriminator(generator(batch).detach()).sum())
        optimizers[1].step()
        if batch_idx % 5 == 0:
            self.manual_backward(-discriminator(generator(batch)).sum())
            optimizers[0].step()

    def two_optimizers(self: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.layers]

    module = lightning_run.module(training_step=gan_step, configure_optimizers=two_optimizers)
    module.automatic_optimization = False
    module.layers = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 1)])
    lightning_run.batches = 20
    monitor = MFUMonitor(peak=PEAK, log_every_n_steps=10)
    lightning_run.trainer(monitor).fit(module, lightning_run.loader())
    g, d = 2 * 4 * 8 * 6, 2 * 4 * 6 * 1  # forward products of 4 rows
    always = g + 2 * d  # the generator forward alone; the discriminator and its weights' gradient
    fifth = 2 * g + 3 * d  # both forward, both weights' gradients, and the gradient of what was generated
    assert monitor.monitor is not None
    assert monitor.monitor.totals["model_flops"] == 20 * always + 4 * fifth
    assert monitor.reading is not None
    assert monitor.reading.exactness in (
        "presumed",
        "exact",
    )  # the rare kind runs four times; each count of it is drawn


def test_layers_that_the_module_freezes_in_its_own_hook_are_counted_as_they_are_trained(lightning_run: Any) -> None:
    def freeze_first_half(self: Any, batch: Tensor, batch_idx: int) -> None:
        self.layers[0].requires_grad_(batch_idx >= 5)  # after the callbacks' hooks of the same name

    module = lightning_run.module(on_train_batch_start=freeze_first_half)
    lightning_run.batches = 20
    monitor = MFUMonitor(peak=PEAK, log_every_n_steps=5)
    lightning_run.trainer(monitor).fit(module, lightning_run.loader())
    first, second = 2 * 4 * 8 * 16, 2 * 4 * 16 * 1
    frozen, trained = first + 2 * second, 2 * first + 3 * second
    assert monitor.monitor is not None
    assert monitor.monitor.reading is not None
    assert monitor.monitor.reading.window.model_flops == monitor.monitor.reading.window.steps * trained
    assert {record.model_flops for record in monitor.monitor.records.values()} == {frozen, trained}


def test_lazy_modules_are_measured_like_any_other(lightning_run: Any) -> None:
    def no_dropout(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).pow(2).mean()
        return loss

    module = lightning_run.module(training_step=no_dropout)
    module.layers = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 1))
    monitor = MFUMonitor(peak=PEAK)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MFUMonitorWarning)
        lightning_run.trainer(monitor).fit(module, lightning_run.loader())
    rows, width = 4, 8  # of the loader; forward and weights' gradients, and the hidden layer's gradient
    step_flops = 2 * (2 * rows * width * 16) + 3 * (2 * rows * 16 * 1)
    assert monitor.monitor is not None
    assert monitor.monitor.totals["model_flops"] == lightning_run.batches * step_flops
