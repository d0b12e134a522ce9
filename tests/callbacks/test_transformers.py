"""The Hugging Face callback: every batch a step, its inputs seen, the trainer left as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from mfu_monitor.callbacks import MFUCallback
from mfu_monitor.cli import main
from mfu_monitor.errors import ConfigurationError, StageDisabledWarning
from mfu_monitor.sinks import read_jsonl

ROWS, TOKENS = 24, 5


class Tiny(nn.Module):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.fail_at, self.seen = fail_at, 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training:
            self.seen += 1
            if self.seen == self.fail_at:
                raise RuntimeError("diverged")
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def data() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 16, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, *callbacks: Any, model: nn.Module | None = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**{**defaults, **options})
    return Trainer(model or Tiny(), arguments, train_dataset=data(), eval_dataset=data(), callbacks=list(callbacks))


def wrapped(subject: Trainer) -> list[str]:
    names = ("training_step", "_save_checkpoint", "evaluate", "_run_epoch", "get_batch_samples")
    return [name for name in names if name in subject.__dict__]


def test_every_batch_is_a_step_that_knows_its_inputs(recorded: list[Any], tmp_path: Path) -> None:
    trainer(tmp_path, MFUCallback()).train()
    (monitor,) = recorded
    names = [call[0] for call in monitor.calls]
    assert names.count("begin_step") == names.count("end_step") == ROWS // 4
    assert names[-1] == "close"
    assert isinstance(monitor.model, Tiny)


def test_accumulated_batches_are_steps_of_their_own(recorded: list[Any], tmp_path: Path) -> None:
    trainer(tmp_path, MFUCallback(), gradient_accumulation_steps=3).train()
    (monitor,) = recorded
    assert [call[2] for call in monitor.calls if call[0] == "begin_step"] == [(False,), (False,), (True,)] * 2
    assert [call[1] for call in monitor.calls if call[0] == "end_step"] == [False, False, True] * 2


def test_evaluation_and_saving_are_paused(recorded: list[Any], tmp_path: Path) -> None:
    subject = trainer(tmp_path, MFUCallback(), eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3)
    subject.train()
    names = recorded[0].names()
    assert names.count("pause validation") == names.count("resume validation") == 2
    assert names.count("pause checkpoint") == names.count("resume checkpoint") >= 2
    assert names[names.index("pause validation") - 1].startswith("end_step")


def test_the_optimizers_work_is_marked(recorded: list[Any], tmp_path: Path) -> None:
    trainer(tmp_path, MFUCallback(), max_steps=1).train()
    names = recorded[0].names()
    forward = ["begin_step", "mark_phase forward", "mark_phase h2d_copy", "mark_phase forward"]
    backward = ["mark_phase backward", "mark_phase other"]
    assert names[:9] == [*forward, *backward, "mark_phase optimizer", "mark_phase other", "end_step True"]


def test_the_trainer_is_left_as_it_was(recorded: list[Any], tmp_path: Path) -> None:
    subject = trainer(tmp_path, MFUCallback())
    subject.train()
    assert wrapped(subject) == []


def test_after_an_exception_in_the_step_nothing_of_ours_is_left(recorded: list[Any], tmp_path: Path) -> None:
    subject = trainer(tmp_path, MFUCallback(), model=Tiny(fail_at=3))
    with pytest.raises(RuntimeError, match="diverged"):
        subject.train()
    assert recorded[0].names()[-2:] == ["abort_step", "close"]
    assert wrapped(subject) == []


def test_after_ctrl_c_in_another_callback_nothing_of_ours_is_left(recorded: list[Any], tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    subject = trainer(tmp_path, MFUCallback(), Interrupt())
    with pytest.raises(KeyboardInterrupt):
        subject.train()
    assert wrapped(subject) == []


def test_a_second_training_with_the_same_callback_starts_afresh(recorded: list[Any], tmp_path: Path) -> None:
    subject = trainer(tmp_path, MFUCallback())
    subject.train()
    subject.train()
    assert len(recorded) == 2
    assert [monitor.names().count("close") for monitor in recorded] == [1, 1]


def scalars(folder: Path) -> dict[str, list[Any]]:
    """Every scalar below the folder, as TensorBoard reads it."""
    (logs,) = {path.parent for path in folder.rglob("events.out.tfevents*")}
    events = EventAccumulator(str(logs)).Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def test_the_trainers_own_log_line_gets_three_numbers_and_no_more(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", num_train_epochs=4)
    plain.train()
    measured = trainer(tmp_path / "measured", MFUCallback(peak=1e12, count="every_step"), num_train_epochs=4)
    measured.train()
    theirs = [entry for entry in plain.state.log_history if "loss" in entry]
    ours = [entry for entry in measured.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs]
    assert len(measured.state.log_history) == len(plain.state.log_history)
    assert {frozenset(entry) - frozenset(old) for entry, old in zip(ours, theirs, strict=True)} == {
        frozenset({"mfu", "hfu", "tokens_per_s"})
    }


def test_tensorboard_has_lightnings_tags_at_optimizer_steps(tmp_path: Path) -> None:
    """24 rows in batches of 2: twelve batches an epoch, two to an optimizer step; windows of two optimizer steps."""
    callback = MFUCallback(peak=1e12, count="every_step", jsonl=tmp_path / "mfu.jsonl")
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer(tmp_path, callback, report_to=["tensorboard"], num_train_epochs=2, **options).train()
    found = scalars(tmp_path)
    assert [point.step for point in found["utilization/mfu"]] == [2, 4, 6, 8, 10, 12]
    parts = {f"step_time/{part}_s" for part in ("total", "data_wait", "forward", "backward", "optimizer")}
    assert parts | {"utilization/is_exact", "remaining/wall_clock_s"} <= found.keys()
    assert not [tag for tag in found if tag.startswith("train/") and "/" in tag.removeprefix("train/")]
    # Linear(8, 16) on 2 x 2 x 5 tokens: forward, weight gradient, input gradient.
    assert {point.value for point in found["flops_per_step/model"]} == {3 * (2 * (2 * 2 * TOKENS) * 8 * 16)}
    for reading, point in zip(read_jsonl(tmp_path / "mfu.jsonl").readings, found["step_time/total_s"], strict=True):
        assert reading.window.steps + reading.window.excluded_steps == 4
        assert point.value == pytest.approx(2 * reading.elapsed_s / reading.window.steps)
    assert found["remaining/wall_clock_s"][-1].value == 0.0


def test_windows_end_with_optimizer_steps_also_where_an_epochs_last_one_is_short(tmp_path: Path) -> None:
    """Twelve batches an epoch in optimizer steps of 5, 5 and 2."""
    callback = MFUCallback(peak=1e12, count="every_step", jsonl=tmp_path / "mfu.jsonl")
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 5}
    training = trainer(tmp_path, callback, num_train_epochs=2, logging_steps=1, **options)
    training.train()
    windows = [reading.window for reading in read_jsonl(tmp_path / "mfu.jsonl").readings]
    # Older Trainers plan twelve batches as two steps, and end after four of six.
    done = training.state.global_step
    assert done >= 4
    assert [window.steps + window.excluded_steps for window in windows] == [5, 5, 2, 5, 5, 2][:done]


def test_the_report_reads_the_trainers_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = MFUCallback(peak=1e12, count="every_step")
    trainer(tmp_path / "run", callback, report_to=["tensorboard"], num_train_epochs=4).train()
    assert callback.reading is not None
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents*")}
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(folder), "--json"])
    [told] = json.loads(capsys.readouterr().out)
    assert told["windows"] == 12
    assert told["best"]["mfu"] > 0


def test_a_failure_of_ours_is_one_warning_and_training_goes_on(
    recorded: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr("mfu_monitor.callbacks.transformers_callback.Monitor.begin_step", broken)
    subject = trainer(tmp_path, MFUCallback())
    with pytest.warns(StageDisabledWarning, match="a bug of ours"):
        subject.train()
    assert subject.state.global_step == ROWS // 4
    assert wrapped(subject) == []


def test_training_gives_the_same_weights_bit_for_bit(recorded: list[Any], tmp_path: Path) -> None:
    plain, measured = trainer(tmp_path), trainer(tmp_path, MFUCallback())
    plain.train()
    measured.train()
    assert plain.model is not None
    assert measured.model is not None
    for ours, theirs in zip(measured.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigurationError, match="peak"):
        MFUCallback(peaks=1e12)


def test_called_by_something_else_it_says_what_to_use_instead(recorded: list[Any], tmp_path: Path) -> None:
    callback = MFUCallback()
    with pytest.warns(StageDisabledWarning, match=r"monitor\.step"):
        callback.on_train_begin(TrainingArguments(output_dir=str(tmp_path), report_to=[]), None, None)


def test_a_real_training_reports_mfu_to_tensorboard_and_keeps_tokens(tmp_path: Path) -> None:
    callback = MFUCallback(peak=1e12, jsonl=str(tmp_path / "mfu.jsonl"))
    trainer(tmp_path, callback, report_to=["tensorboard"], num_train_epochs=2).train()
    run = read_jsonl(tmp_path / "mfu.jsonl")
    # Linear(8, 16) on 4 x 5 tokens: forward, weight gradient, input gradient (the embedding is trained).
    assert run.records[0].model_flops == 3 * (2 * 4 * TOKENS * 8 * 16)
    assert "head" in run.records[0].by_module()
    assert run.readings[-1].window.tokens == run.readings[-1].window.steps * 4 * TOKENS
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    tags = EventAccumulator(str(folder)).Reload().Tags()
    assert "utilization/mfu" in tags["scalars"]
    assert "custom_scalars__config__" in str(tags["tensors"])
    assert "mfu_monitor/card/end/text_summary" in tags["tensors"]


@pytest.mark.parametrize("restores_callbacks", [False, True])
def test_totals_and_levels_go_on_after_a_resume(tmp_path: Path, restores_callbacks: bool) -> None:
    """Six batches an epoch. The first run ends after one epoch, the second goes on to the end of another one."""
    first = MFUCallback(peak=1e12, alerts={"warmup": 0})
    trainer(tmp_path, first, save_strategy="epoch").train()
    assert first.monitor is not None
    levels = first.monitor.state_dict()["alerts"]["history"]
    assert levels
    second = MFUCallback(peak=1e12, alerts={"warmup": 50})
    resumed = trainer(tmp_path, second, num_train_epochs=2, restore_callback_states_from_checkpoint=restores_callbacks)
    resumed.train(resume_from_checkpoint=True)
    assert second.monitor is not None
    assert second.monitor.totals["steps"] == 12
    assert second.monitor.state_dict()["next_step"] == 12
    assert second.monitor.state_dict()["alerts"]["history"] == levels  # all later windows are warm-up


def test_another_run_of_the_same_trainer_starts_anew(tmp_path: Path) -> None:
    callback = MFUCallback(peak=1e12)
    subject = trainer(tmp_path, callback, save_strategy="epoch")
    subject.train()
    subject.train()
    assert callback.monitor is not None
    assert callback.monitor.totals["steps"] == 6
