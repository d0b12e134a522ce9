"""Ranks that are there, by keys in a store: several ranks of one process, each with its own hand on the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mfu_monitor.timing.present_ranks import PresentRanks, RollCall


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 2)
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return dist.HashStore()


def roll_calls(store: Any, ranks: list[int], world_size: int) -> list[RollCall]:
    return [RollCall(store, "start0", rank=rank, world_size=world_size) for rank in ranks]


def test_a_rank_that_never_comes_is_waited_for_by_nobody(store: Any) -> None:
    began_s = time.perf_counter()
    calls = roll_calls(store, [0, 2], 3)
    assert [call.all_meet() for call in calls] == [False, False]
    assert time.perf_counter() - began_s < 0.5
    assert [call.present(0) for call in calls] == [[0, 2], [0, 2]]


def test_a_rank_that_comes_after_it_was_given_up_is_present_and_does_not_wait_either(store: Any) -> None:
    (first,) = roll_calls(store, [0], 2)
    assert not first.all_meet()
    (late,) = roll_calls(store, [1], 2)
    assert not late.all_meet()
    assert first.present(0) == late.present(0) == [0, 1]


def test_rows_of_the_present_ranks_come_back_once_all_of_them_are_there(store: Any) -> None:
    mine, theirs = (PresentRanks(call) for call in roll_calls(store, [0, 2], 3))
    mine.send([7, -1])
    assert mine.received() == []
    theirs.send([8, 2**62])
    assert mine.received() == theirs.received() == [{0: [7, -1], 2: [8, 2**62]}]
    assert mine.in_flight == 0


def test_a_row_that_does_not_come_is_left_out_three_windows_later(store: Any) -> None:
    mine = PresentRanks(roll_calls(store, [0, 1], 2)[0])
    answers = []
    for row in range(5):
        mine.send([row])
        answers.append(mine.received())
    assert answers == [[], [], [], [{0: [0]}], [{0: [1]}]]


def test_a_rank_that_ended_has_no_further_rows_and_has_them_again_if_it_goes_on(store: Any) -> None:
    first, second = roll_calls(store, [0, 1], 2)
    assert not first.any_left
    second.leave(2)
    assert first.any_left
    assert [first.present(row) for row in (1, 2)] == [[0, 1], [0]]
    second.come_back()
    assert first.present(2) == [0, 1]


def test_in_a_large_world_a_rank_without_the_others_reads_itself(store: Any) -> None:
    assert roll_calls(store, [0, 1], 65)[0].present(0) == [0]
