"""Ranks agree whether all of them come, and none waits for one that does not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mfu_monitor.internals.rendezvous import all_ranks_come


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 2)
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    return dist.HashStore() if request.param == "hash" else dist.PrefixStore("ours", dist.HashStore())


def test_all_ranks_that_come_agree_to_go_together(store: Any) -> None:
    answers: list[bool] = []

    def rank() -> None:
        answers.append(all_ranks_come(store, "start", world_size=2, patience_s=60.0))

    first = threading.Thread(target=rank)
    first.start()
    rank()
    first.join()
    assert answers == [True, True]


def test_a_rank_that_comes_after_another_gave_up_stays_alone_too(store: Any) -> None:
    assert not all_ranks_come(store, "start", world_size=2, patience_s=0.0)
    assert not all_ranks_come(store, "start", world_size=2, patience_s=60.0)  # returns at once: it is decided


def test_each_point_of_the_program_is_decided_for_itself(store: Any) -> None:
    assert not all_ranks_come(store, "start0", world_size=2, patience_s=0.0)
    assert all_ranks_come(store, "start1", world_size=1, patience_s=0.0)
