"""Accumulation in a loop of one's own: every micro-batch seen, and tokens right or said to be of one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mfu_monitor as mm
from mfu_monitor.sinks import read_jsonl
from mfu_monitor.steps.batch import batch_counts

MICRO, ROWS, LENGTH, WIDTH, WORDS = 4, 2, 6, 8, 16
TOKENS = ROWS * LENGTH
# Linear(8, 16) on 12 tokens: forward, weight gradient, input gradient (the embedding is trained).
FLOPS = 3 * (2 * TOKENS * WIDTH * WORDS)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def train(path: Path | None, around: Callable[[Any, Any, list[Tensor], Any], None], **options: Any) -> nn.Module:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None if path is None else mm.Monitor(model, jsonl=path, log_every_n_steps=2, peak=1e12, **options)
    draw = torch.Generator().manual_seed(1)
    for _ in range(12):
        batches = [torch.randint(0, WORDS, (ROWS, LENGTH), generator=draw) for _ in range(MICRO)]
        around(monitor, model, batches, optimizer)
    if monitor is not None:
        monitor.close()
    return model


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def only_one(monitor: Any, model: Any, batches: list[Tensor], optimizer: Any) -> None:
    """As in nanoGPT: the loop fetches the others inside the step."""
    with monitor.step(batches[0]):
        for batch in batches:
            model(batch).backward()
        update(optimizer)


def as_a_list(monitor: Any, model: Any, batches: list[Tensor], optimizer: Any) -> None:
    with monitor.step([{"input_ids": batch} for batch in batches]):
        for batch in batches:
            model(batch).backward()
        update(optimizer)


def each_by_itself(monitor: Any, model: Any, batches: list[Tensor], optimizer: Any) -> None:
    with monitor.step():
        for batch in batches:
            with monitor.micro_batch(batch):
                model(batch).backward()
        update(optimizer)


def bare(monitor: Any, model: Any, batches: list[Tensor], optimizer: Any) -> None:
    for batch in batches:
        model(batch).backward()
    update(optimizer)


@pytest.mark.parametrize("around", [only_one, as_a_list, each_by_itself])
def test_weights_are_equal_to_the_bit(around: Any, tmp_path: Path) -> None:
    ours, theirs = train(tmp_path / "a.jsonl", around), train(None, bare)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_step_that_runs_more_than_it_was_given_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mfu_monitor"):
        train(tmp_path / "a.jsonl", only_one)
    told = [record.getMessage() for record in caplog.records if "micro-batch" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Every product ran 4 times in step 0")
    window = read_jsonl(tmp_path / "a.jsonl").readings[-1].window
    assert window.model_flops == window.steps * MICRO * FLOPS


def test_a_list_of_batches_has_the_tokens_of_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mfu_monitor"):
        train(tmp_path / "a.jsonl", as_a_list)
    assert "micro-batch" not in caplog.text
    window = read_jsonl(tmp_path / "a.jsonl").readings[-1].window
    assert window.tokens == window.steps * MICRO * TOKENS
    assert window.samples == window.steps * MICRO * ROWS
    assert window.model_flops == window.steps * MICRO * FLOPS


def test_micro_batches_are_counted_one_by_one_in_windows_of_whole_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mfu_monitor"):
        train(tmp_path / "a.jsonl", each_by_itself)
    assert "micro-batch" not in caplog.text
    windows = [reading.window for reading in read_jsonl(tmp_path / "a.jsonl").readings]
    assert all(window.last_step - window.first_step + 1 == 2 * MICRO for window in windows)
    assert windows[-1].tokens == windows[-1].steps * TOKENS
    assert windows[-1].model_flops == windows[-1].steps * FLOPS


def test_an_exception_in_a_micro_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    model = Tiny()
    monitor = mm.Monitor(model, jsonl=tmp_path / "a.jsonl", log_every_n_steps=1, peak=1e12)
    with pytest.raises(RuntimeError, match="diverged"), monitor.step(), monitor.micro_batch(torch.ones(2, 2).long()):
        raise RuntimeError("diverged")
    with monitor.step(torch.ones(ROWS, LENGTH).long()):
        model(torch.ones(ROWS, LENGTH).long()).backward()
    monitor.close()
    assert monitor.totals["steps"] == 1


@pytest.mark.parametrize(
    ("batch", "tokens", "samples"),
    [
        ([torch.ones(2, 6).long(), torch.ones(2, 6).long()], 12, 2),  # a batch and its targets
        ([(torch.ones(2, 6).long(),), (torch.ones(3, 6).long(),)], 30, 5),
        ([(torch.ones(2, 6).long(), torch.ones(2, 6).long())] * 2, 24, 4),
        ([(torch.ones(4, 3, 8, 8), torch.ones(4).long())] * 3, None, 12),
        ([{"input_ids": torch.ones(2, 6).long()}, {"pixels": torch.ones(2, 6)}], 12, 2),
        (({"input_ids": torch.ones(2, 6).long()}, torch.ones(2)), 12, 2),
    ],
)
def test_only_a_list_of_batches_is_summed(batch: Any, tokens: int | None, samples: int) -> None:
    counts = batch_counts(batch)
    assert (counts.tokens, counts.samples) == (tokens, samples)
