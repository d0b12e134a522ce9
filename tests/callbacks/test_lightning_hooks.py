"""How Lightning's hooks become calls of the monitor, by either package name."""

from __future__ import annotations

import copy
import inspect
import pickle
import signal
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch

from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.config import MonitorConfig
from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning, StageDisabledWarning
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

STEP = [
    "begin_step",
    "mark_phase forward",
    "mark_phase other",
    "mark_phase backward",
    "mark_phase other",
    "mark_phase optimizer",
    "end_step True",
]


def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
    self.layers(batch)


def steps_of(monitor: Any) -> list[Any]:
    return [call for call in monitor.calls if call[0] == "begin_step"]


def test_no_argument_is_required_and_it_is_a_callback_of_both_packages(run: Any) -> None:
    assert isinstance(MFUMonitor(), run.pl.Callback)


def test_a_single_callback_outside_a_list_is_taken(run: Any, recorded: list[Any]) -> None:
    trainer = run.pl.Trainer(callbacks=MFUMonitor(), logger=False, enable_checkpointing=False, accelerator="cpu")
    assert any(isinstance(callback, MFUMonitor) for callback in trainer.callbacks)


def test_its_arguments_are_the_options_of_the_monitor_with_the_same_defaults() -> None:
    parameters = inspect.signature(MFUMonitor).parameters
    assert all(p.kind is p.KEYWORD_ONLY and p.annotation is not p.empty for p in parameters.values())
    defaults = {name: p.default for name, p in parameters.items() if name != "tensorboard_layout"}
    assert defaults == {f.name: f.default for f in fields(MonitorConfig)}


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ({"peak": -1.0}, "peak"),
        ({"peak": 0}, "peak"),
        ({"count": "sometimes"}, "every_step"),
        ({"jsonl": "/"}, "jsonl"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(option: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        MFUMonitor(**option)


def test_each_batch_is_one_step_with_its_phases_in_order(run: Any, recorded: list[Any]) -> None:
    run.trainer(MFUMonitor()).fit(run.module(), run.loader())
    (monitor,) = recorded
    names = monitor.names()
    names = names[names.index("begin_step") :]
    between = ["mark_phase between", "mark_phase data_wait", "mark_phase between"]
    copy = ["mark_phase h2d_copy", "mark_phase between"]
    assert names[: 2 * len(STEP) + 5] == [*STEP, *between, *copy, *STEP]
    assert [step for _, step, _ in steps_of(monitor)] == list(range(run.batches))
    assert monitor.names_in_steps()[-3:] == ["end_window", "abort_step", "close"]


def test_an_accumulating_batch_is_told_from_one_that_steps_the_optimizer(run: Any, recorded: list[Any]) -> None:
    run.trainer(MFUMonitor(), accumulate_grad_batches=2).fit(run.module(), run.loader())
    (monitor,) = recorded
    assert [extra for _, _, extra in steps_of(monitor)] == [(False,), (True,)] * 3
    assert [call[1] for call in monitor.calls if call[0] == "end_step"] == [False, True] * 3


def test_steps_are_numbered_across_epochs_and_a_window_ends_with_each(run: Any, recorded: list[Any]) -> None:
    run.trainer(MFUMonitor(), max_epochs=2).fit(run.module(), run.loader())
    (monitor,) = recorded
    assert [step for _, step, _ in steps_of(monitor)] == list(range(2 * run.batches))
    assert monitor.names().count("end_window") == 2


def test_validation_is_paused_and_the_sanity_check_comes_before_anything(run: Any, recorded: list[Any]) -> None:
    trainer = run.trainer(MFUMonitor(), val_check_interval=3, num_sanity_val_steps=2)
    trainer.fit(run.module(validation_step=validation_step), run.loader(), run.loader())
    (monitor,) = recorded
    names = monitor.names_in_steps()
    assert next(name for name in names if not name.startswith("mark_phase")) == "begin_step"
    pauses = [name for name in names if name.startswith(("pause", "resume"))]
    assert pauses == ["pause validation", "resume validation"] * 2
    at = names.index("pause validation")
    assert names[at - 1].startswith("end_step")
    assert names[at + 1] == "resume validation"


def test_saving_a_checkpoint_is_paused_to_its_end(run: Any, recorded: list[Any]) -> None:
    checkpoint = run.pl.callbacks.ModelCheckpoint(dirpath=run.folder, every_n_train_steps=3)
    run.trainer(MFUMonitor(), checkpoint, enable_checkpointing=True).fit(run.module(), run.loader())
    names = recorded[0].names_in_steps()
    assert names.count("pause checkpoint") == names.count("resume checkpoint") >= 2
    at = names.index("pause checkpoint")
    assert names[at - 1].startswith("end_step")
    assert names[at + 1] == "resume checkpoint"


def test_saving_in_the_middle_of_validation_does_not_end_the_pause_for_validation(
    run: Any, recorded: list[Any]
) -> None:
    def saving_validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint(run.folder / "x.ckpt")

    module = run.module(validation_step=saving_validation_step)
    trainer = run.trainer(MFUMonitor(), num_sanity_val_steps=0, limit_val_batches=1)
    trainer.fit(module, run.loader(), run.loader())
    names = [name for name in recorded[0].names() if name.startswith(("pause", "resume"))]
    assert names == ["pause validation", "pause checkpoint", "resume checkpoint", "resume validation"]


def test_a_checkpoint_saved_by_another_way_is_paused_until_the_next_step(run: Any, recorded: list[Any]) -> None:
    class Saver(run.pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer._checkpoint_connector.dump_checkpoint()

    run.trainer(MFUMonitor(), Saver()).fit(run.module(), run.loader())
    names = recorded[0].names_in_steps()
    at = names.index("pause checkpoint")
    assert names[at + 1 : at + 3] == ["resume checkpoint", "begin_step"]


def test_the_window_is_the_trainers_and_can_be_given(run: Any, recorded: list[Any]) -> None:
    run.trainer(MFUMonitor(), log_every_n_steps=7).fit(run.module(), run.loader())
    run.trainer(MFUMonitor(log_every_n_steps=3)).fit(run.module(), run.loader())
    run.trainer(MFUMonitor(), log_every_n_steps=0).fit(run.module(), run.loader())
    assert [monitor.config.log_every_n_steps for monitor in recorded] == [7, 3, 50]


def test_the_device_is_the_trainers(run: Any, recorded: list[Any]) -> None:
    run.trainer(MFUMonitor()).fit(run.module(), run.loader())
    assert recorded[0].config.device == torch.device("cpu")


def test_a_step_that_the_module_skips_is_forgotten(run: Any, recorded: list[Any]) -> None:
    module = run.module(on_train_batch_start=lambda self, batch, batch_idx: -1 if batch_idx == 1 else None)
    run.trainer(MFUMonitor()).fit(module, run.loader())
    names = recorded[0].names()
    assert names.count("begin_step") == 2
    second = names.index("begin_step", names.index("begin_step") + 1)
    assert names[second + 1 : second + 3] == ["mark_phase forward", "abort_step"]


@pytest.mark.parametrize("error", [RuntimeError("diverged"), KeyboardInterrupt()])
def test_after_an_exception_and_ctrl_c_the_step_is_aborted_and_the_trainer_is_as_before(
    run: Any, recorded: list[Any], error: BaseException
) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise error
        return self.layers(batch).mean()

    trainer = run.trainer(MFUMonitor())
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((RuntimeError, SystemExit)):
        trainer.fit(run.module(training_step=training_step), run.loader())
    signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C from the first one on
    names = recorded[0].names()
    assert names[-2:] == ["abort_step", "close"]
    assert names.count("close") == 1
    assert "save_checkpoint" not in trainer.__dict__


def test_after_training_the_trainer_is_as_before(run: Any, recorded: list[Any]) -> None:
    trainer = run.trainer(MFUMonitor())
    trainer.fit(run.module(), run.loader())
    assert "save_checkpoint" not in trainer.__dict__
    assert recorded[0].names().count("close") == 1


def test_a_failure_of_ours_is_one_warning_and_training_goes_on(
    run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, **kwargs: Any) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr("mfu_monitor.callbacks.lightning_callback.Monitor.end_step", broken)
    trainer = run.trainer(MFUMonitor())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(run.module(), run.loader())
    ours = [w for w in caught if issubclass(w.category, StageDisabledWarning)]
    assert len(ours) == 1
    assert "a bug of ours" in str(ours[0].message)
    assert trainer.global_step == run.batches
    assert "save_checkpoint" not in trainer.__dict__


def test_a_monitor_that_cannot_be_made_is_one_warning_and_training_goes_on(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mfu_monitor.callbacks.lightning_callback.Monitor", None)
    trainer = run.trainer(MFUMonitor())
    with pytest.warns(StageDisabledWarning, match="on_train_start"):
        trainer.fit(run.module(), run.loader())
    assert trainer.global_step == run.batches


def test_state_goes_into_the_checkpoint_as_plain_types_and_comes_back(run: Any, recorded: list[Any]) -> None:
    monitor = MFUMonitor()
    trainer = run.trainer(monitor)
    trainer.fit(run.module(), run.loader())
    path = run.folder / "last.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["callbacks"]
    # Not always "MFUMonitor": monitors that wait elsewhere for their run have keys of their own.
    assert saved[monitor.state_key] == {"total_steps": run.batches}
    run.trainer(MFUMonitor(), max_epochs=2).fit(run.module(), run.loader(), ckpt_path=path)
    assert recorded[1].state == {"total_steps": 2 * run.batches}


def test_a_state_of_another_kind_is_no_state(run: Any, recorded: list[Any]) -> None:
    monitor = MFUMonitor()
    monitor.load_state_dict([1, 2])
    run.trainer(monitor).fit(run.module(), run.loader())
    assert recorded[0].state == {"total_steps": run.batches}


def test_the_same_callback_goes_on_in_the_same_trainer_and_starts_afresh_in_another(
    run: Any, recorded: list[Any]
) -> None:
    monitor = MFUMonitor()
    trainer = run.trainer(monitor)
    trainer.fit(run.module(), run.loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(run.module(), run.loader())
    run.trainer(monitor).fit(run.module(), run.loader())
    assert [made.state["total_steps"] for made in recorded] == [run.batches, 2 * run.batches, run.batches]


def test_a_copy_made_while_it_measures_has_the_options_and_the_totals_and_measures_nothing(run: Any) -> None:
    class Copier(run.pl.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.trainer: Any = None

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                self.trainer = copy.deepcopy(trainer)

    copier = Copier()
    original = MFUMonitor(peak=1e12, log_every_n_steps=3)
    run.trainer(original, copier).fit(run.module(), run.loader())
    monitor = copier.trainer.callbacks[0]
    assert copier.trainer.save_checkpoint.__self__ is copier.trainer
    assert (monitor.config, monitor.monitor) == (original.config, None)
    assert monitor.state_dict()["totals"]["steps"] == 2
    assert original.monitor is not None
    assert original.monitor.totals["steps"] == run.batches


def test_a_callback_that_was_used_before_can_be_sent_to_a_spawned_process(run: Any) -> None:
    monitor = MFUMonitor(peak=1e12)
    run.trainer(monitor).fit(run.module(), run.loader())
    assert monitor.reading is not None
    # Lightning itself hangs the module's `log` and `log_dict` on every callback; the module is the user's to pickle.
    ours = {name: value for name, value in monitor.__getstate__().items() if name not in ("log", "log_dict")}
    assert pickle.loads(pickle.dumps(ours))["config"] == monitor.config


def test_a_file_that_can_no_longer_be_written_is_one_warning_and_the_rest_goes_on(
    run: Any, recorded: list[Any]
) -> None:
    path = run.folder / "mfu.jsonl"
    monitor = MFUMonitor(jsonl=str(path))
    path.mkdir()  # after the constructor has found nothing wrong
    with pytest.warns(StageDisabledWarning, match=r"mfu.jsonl.* cannot be written .*No file is written in this run"):
        run.trainer(monitor).fit(run.module(), run.loader())
    assert len(steps_of(recorded[0])) == run.batches
    assert recorded[0].config.jsonl is None


def test_validate_and_test_alone_measure_nothing(run: Any, recorded: list[Any]) -> None:
    trainer = run.trainer(MFUMonitor())
    trainer.validate(run.module(validation_step=validation_step), run.loader(), verbose=False)
    assert recorded == []


def a_reading(**values: Any) -> UtilizationReading:
    window = StepWindow(first_step=0, last_step=0, steps=1, elapsed_s=1.0, wall_s=1.0)
    return UtilizationReading(window=window, **values)


def give_readings(monkeypatch: pytest.MonkeyPatch, readings: list[Any]) -> None:
    """Let the recording monitor have one reading after another, one a step."""
    cls: Any = __import__("mfu_monitor.callbacks.lightning_callback", fromlist=["Monitor"]).Monitor

    def end_step(self: Any, **kwargs: Any) -> None:
        self.reading = readings.pop(0) if readings else self.reading

    monkeypatch.setattr(cls, "end_step", end_step)


def test_readings_are_in_callback_metrics_and_in_the_progress_bar(
    run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_readings(monkeypatch, [None, a_reading(mfu=0.25, hfu=0.5, tokens_per_s=1234.0)])
    trainer = run.trainer(MFUMonitor())
    trainer.fit(run.module(), run.loader())
    expected = {"mfu": 0.25, "hfu": 0.5, "tokens_per_s": 1234.0}
    assert {name: float(trainer.callback_metrics[name]) for name in expected} == expected
    assert {name: float(trainer.progress_bar_metrics[name]) for name in expected} == expected


def test_what_is_unknown_is_in_neither(run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    give_readings(monkeypatch, [a_reading(tokens_per_s=10.0)])
    trainer = run.trainer(MFUMonitor())
    trainer.fit(run.module(), run.loader())
    assert "mfu" not in trainer.callback_metrics
    assert "mfu" not in trainer.progress_bar_metrics
    assert float(trainer.callback_metrics["tokens_per_s"]) == 10.0


def test_early_stopping_can_monitor_mfu_from_the_first_epoch_on(
    run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = [a_reading(mfu=0.5 - 0.01 * n) for n in range(4)]
    give_readings(monkeypatch, [None] * run.batches + [r for r in falling for _ in range(run.batches)])
    stopping = run.pl.callbacks.EarlyStopping(monitor="mfu", mode="max", patience=2)
    trainer = run.trainer(MFUMonitor(), stopping, max_epochs=10)
    trainer.fit(run.module(), run.loader())
    # Epoch 0 has no reading, epoch 1 the best one, epochs 2 and 3 are worse: patience of 2 is used up.
    assert trainer.current_epoch == 4
    assert float(stopping.best_score) == pytest.approx(0.5)


def test_a_window_without_the_value_keeps_the_last_valid_one(
    lightning_run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_readings(monkeypatch, [a_reading(mfu=0.25), a_reading(tokens_per_s=10.0)])
    stopping = lightning_run.pl.callbacks.EarlyStopping(monitor="mfu", mode="max")
    trainer = lightning_run.trainer(MFUMonitor(), stopping)
    with pytest.warns(MFUMonitorWarning, match="A callback monitors 'mfu'"):
        trainer.fit(lightning_run.module(), lightning_run.loader())
    assert float(trainer.callback_metrics["mfu"]) == 0.25


def test_model_checkpoint_can_keep_the_best_mfu(run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    give_readings(monkeypatch, [a_reading(mfu=m) for m in (0.1, 0.4, 0.2, 0.3, 0.2, 0.1)])
    keeper = run.pl.callbacks.ModelCheckpoint(
        dirpath=run.folder, monitor="mfu", mode="max", every_n_train_steps=1, filename="{step}"
    )
    run.trainer(MFUMonitor(), keeper, enable_checkpointing=True).fit(run.module(), run.loader())
    assert float(keeper.best_model_score) == pytest.approx(0.4)
    assert keeper.best_model_path.endswith("step=2.ckpt")


def test_training_stops_when_the_monitor_asks_for_it(
    run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_step(self: Any, **kwargs: Any) -> None:
        self.should_stop = len(steps_of(self)) == 3

    monkeypatch.setattr("mfu_monitor.callbacks.lightning_callback.Monitor.end_step", end_step)
    trainer = run.trainer(MFUMonitor(on_impossible="stop"))
    trainer.fit(run.module(), run.loader())
    assert trainer.global_step == 3


def test_the_monitor_is_told_what_the_trainer_promises_and_how_long_it_runs(run: Any, recorded: list[Any]) -> None:
    run.trainer(MFUMonitor(), precision="bf16-mixed", max_epochs=2).fit(run.module(), run.loader())
    run.trainer(MFUMonitor(), max_epochs=-1, max_steps=2, accumulate_grad_batches=3).fit(run.module(), run.loader())
    first, second = (monitor.config for monitor in recorded)
    assert (first.promised_precision, first.total_steps) == ("bf16-mixed", 2 * run.batches)
    assert (second.promised_precision, second.total_steps) == (None, 2 * 3)


def test_without_a_logger_a_console_line_and_with_several_each_its_own_sink(run: Any, recorded: list[Any]) -> None:
    loggers = [
        run.pl.loggers.TensorBoardLogger(run.folder, name="a"),
        run.pl.loggers.CSVLogger(run.folder, name="b"),
    ]
    run.trainer(MFUMonitor()).fit(run.module(), run.loader())
    run.trainer(MFUMonitor(), logger=loggers).fit(run.module(), run.loader())
    alone, several = recorded
    assert [type(sink).__name__ for sink in alone.sinks] == ["ConsoleSink"]
    assert [type(sink).__name__ for sink in several.sinks] == ["LoggerSink", "LoggerSink"]


def test_other_ranks_report_nothing(run: Any, recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.pl.Trainer, "is_global_zero", property(lambda self: False))
    run.trainer(MFUMonitor(jsonl=str(run.folder / "mfu.jsonl"))).fit(run.module(), run.loader())
    assert recorded[0].sinks == ()
    assert recorded[0].config.jsonl is None
