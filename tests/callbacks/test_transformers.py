"""The Hugging Face callback: every batch a step, its inputs seen, the trainer left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from mfu_monitor.callbacks import MFUCallback
from mfu_monitor.errors import ConfigurationError, StageDisabledWarning
from mfu_monitor.sinks import Event, read_jsonl

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
    assert names[:4] == ["begin_step", "mark_phase optimizer", "mark_phase other", "end_step True"]


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


def test_metrics_reach_the_log_history_and_the_trainers_own_log_is_not_lost(
    recorded: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_step(self: Any, **kwargs: Any) -> None:
        for sink in self.sinks:
            sink.emit(Event(kind="alert", step=0, metrics={"utilization/mfu": 0.25}))

    monkeypatch.setattr("mfu_monitor.callbacks.transformers_callback.Monitor.end_step", end_step)
    subject = trainer(tmp_path, MFUCallback(), report_to=["tensorboard"])
    subject.train()
    logs = [entry for entry in subject.state.log_history if "loss" in entry]
    ours = [entry for entry in subject.state.log_history if "utilization/mfu" in entry]
    assert [entry["step"] for entry in logs] == [2, 4, 6]
    assert [entry["step"] for entry in ours] == [1, 2, 3, 4, 5, 6]


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
    assert "train/utilization/mfu" in tags["scalars"]
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
