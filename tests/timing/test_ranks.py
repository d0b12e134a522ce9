"""The other ranks: pure sums, and one real collective a window between two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mfu_monitor.timing.ranks import RankExchange, StopAgreement, call_the_roll, pack_window, unknown_row, world_fields
from mfu_monitor.timing.step_window import StepWindow


def window(**changes: Any) -> StepWindow:
    values: dict[str, Any] = {
        "first_step": 0,
        "last_step": 9,
        "steps": 10,
        "elapsed_s": 2.0,
        "wall_s": 2.0,
        "model_flops": 1000,
        "hardware_flops": 1200,
        "tokens": 160,
        "samples": 20,
    }
    return StepWindow(**{**values, **changes})


def test_sums_of_ranks_with_equal_steps_are_exact() -> None:
    rows = [pack_window(window(model_flops=1001), 1e12), pack_window(window(model_flops=2002), 2e12)]
    fields = world_fields(dict(enumerate(rows)))
    assert fields["world_size"] == 2
    assert fields["world_model_flops"] == 3003
    assert (fields["world_hardware_flops"], fields["world_tokens"], fields["world_samples"]) == (2400, 320, 40)
    assert fields["world_peak_flops_per_s"] == 3e12


def test_ranks_that_left_steps_out_are_brought_to_the_steps_of_the_slowest() -> None:
    rows = [pack_window(window(), 1e12), pack_window(window(steps=9, model_flops=900), 1e12)]
    fields = world_fields(dict(enumerate(rows)))  # 0.200 s a step and 0.222 s a step
    assert (fields["world_steps"], fields["world_model_flops"]) == (9, 900 + 900)


def test_the_worlds_seconds_are_those_of_the_rank_that_takes_longest_a_step() -> None:
    rows = [pack_window(window(elapsed_s=s, steps=steps), 1e12) for s, steps in ((2.0, 10), (2.2, 11), (2.1, 10))]
    fields = world_fields(dict(enumerate(rows)))
    assert (fields["world_elapsed_s"], fields["world_steps"]) == (2.1, 10)
    # Of equal ones the first: no rank may choose another one.
    assert world_fields(dict(enumerate(rows[:2])))["world_steps"] == 10


@pytest.mark.parametrize(
    ("other", "unknown"),
    [
        ({"model_flops": None}, "world_model_flops"),
        ({"tokens": None}, "world_tokens"),
        ({"steps": 0}, "world_model_flops"),
        ({"invalid_reason": "clock"}, "world_samples"),
    ],
)
def test_what_one_rank_does_not_know_is_unknown_of_the_world(other: dict[str, Any], unknown: str) -> None:
    rows = [pack_window(window(), 1e12), pack_window(window(**other), 1e12)]
    assert world_fields(dict(enumerate(rows)))[unknown] is None


def test_a_rank_without_a_peak_leaves_the_worlds_unknown() -> None:
    rows = [pack_window(window(), 1e12), pack_window(window(), None)]
    assert world_fields(dict(enumerate(rows)))["world_peak_flops_per_s"] is None


@pytest.mark.parametrize(
    ("other", "label"),
    [
        ({"counts_label": "exact"}, "exact"),
        ({"counts_label": "presumed"}, "presumed"),
        ({"counts_label": "sampled"}, "sampled"),
        ({"counts_label": "presumed", "is_lower_bound": True}, "lower_bound"),
        ({"counts_label": "upper_bound", "is_lower_bound": True}, "unknown"),
        ({"counts_label": "upper_bound"}, "upper_bound"),
    ],
)
def test_every_rank_knows_the_weakest_label_of_all(other: dict[str, Any], label: str) -> None:
    rows = [pack_window(window(counts_label="exact"), 1e12), pack_window(window(**other), 1e12)]
    assert world_fields(dict(enumerate(rows)))["world_counts_label"] == label


def test_an_upper_bound_plus_a_lower_bound_is_unknown() -> None:
    labels = ("upper_bound", "lower_bound")
    rows = [pack_window(window(counts_label=label), 1e12) for label in labels]
    assert world_fields(dict(enumerate(rows)))["world_counts_label"] == "unknown"


def test_a_rank_that_failed_leaves_all_unknown_and_nothing_zero() -> None:
    fields = world_fields(dict(enumerate([pack_window(window(), 1e12), unknown_row()])))
    assert {name: value for name, value in fields.items() if value is not None} == {"world_size": 2}


def test_shared_tokens_are_summed_by_parts_and_one_rank_that_was_not_compared_leaves_repeats_unknown() -> None:
    parts = [pack_window(window(unique_tokens=80, unique_samples=10), 1e12)] * 2
    fields = world_fields(dict(enumerate(parts)))
    assert (fields["world_tokens"], fields["world_samples"], fields["world_repeats_known"]) == (160, 20, True)
    for other in ({}, {"unique_tokens": 80, "repeats_known": False}, {"unique_tokens": 80, "batches_known": False}):
        assert (
            world_fields(dict(enumerate([parts[0], pack_window(window(**other), 1e12)])))["world_repeats_known"]
            is False
        )


def test_the_first_windows_carry_fingerprints_then_ever_fewer() -> None:
    exchange = RankExchange(None, rank=0, world_size=2)
    with_section = []
    for number in range(100):
        exchange.sent = number
        with_section += [number] if exchange.takes_section else []
    assert with_section == [*range(16), 16, 32, 64]


def test_figures_too_large_for_the_wire_are_unknown_not_wrong() -> None:
    rows = [pack_window(window(model_flops=2**63), 1e12)] * 2
    assert world_fields(dict(enumerate(rows)))["world_model_flops"] is None


class TestStraggler:
    """The slowest rank is the one that was busy itself, not the ones that waited for it."""

    def test_it_is_found_outside_backward_where_the_others_wait_for_it(self) -> None:
        # All take 2 s; rank 1 spends 1.5 s outside backward, the others wait for it in their backward.
        rows = [pack_window(window(backward_s=backward_s), 1e12) for backward_s in (1.5, 0.5, 1.5)]
        fields = world_fields(dict(enumerate(rows)))
        assert fields["slowest_rank"] == 1
        assert fields["rank_spread"] == pytest.approx((1.5 - 0.5) / ((0.5 + 1.5 + 0.5) / 3))

    def test_without_phases_the_whole_step_decides(self) -> None:
        rows = [pack_window(window(elapsed_s=s), 1e12) for s in (2.0, 3.0)]
        fields = world_fields(dict(enumerate(rows)))
        assert (fields["slowest_rank"], fields["rank_spread"]) == (1, pytest.approx(1.0 / 2.5))


class TestStopAgreement:
    """Ranks that want to stop at different moments all stop at the end of the same window."""

    def rows(self, *wants_stop: bool) -> list[list[int]]:
        return [pack_window(window(), 1e12, wants_stop=wants) for wants in wants_stop]

    def test_all_stop_two_windows_after_the_one_in_whose_row_a_rank_asked(self) -> None:
        due = []
        agreement = StopAgreement()
        for asks in (False, False, True, False, False, False):
            agreement.close_window()
            agreement.take(self.rows(False, asks))
            due.append(agreement.is_due)
        assert due == [False, False, False, False, True, True]

    def test_a_rank_that_gets_the_rows_late_stops_at_the_same_window(self) -> None:
        agreement = StopAgreement()
        for _ in range(3):
            agreement.close_window()
        assert agreement.is_behind  # the first row may ask to stop now: it is waited for
        agreement.take(self.rows(True, False))
        assert not agreement.is_behind
        assert agreement.is_due

    def test_nobody_stops_where_nobody_asks(self) -> None:
        agreement = StopAgreement()
        for _ in range(50):
            agreement.close_window()
            agreement.take([*self.rows(False), unknown_row()])
        assert not agreement.is_due

    @pytest.mark.parametrize("changes", [{"steps": 0}, {"invalid_reason": "clock"}])
    def test_a_rank_without_a_valid_window_can_ask_too(self, changes: dict[str, Any]) -> None:
        row = pack_window(window(**changes), 1e12, wants_stop=True)
        assert row == unknown_row(wants_stop=True)
        agreement = StopAgreement()
        agreement.take([row])
        for _ in range(3):
            agreement.close_window()
        assert agreement.is_due


def test_backward_is_left_out_of_the_busy_time_only_where_every_rank_knows_it() -> None:
    # 10 steps: 2.0 s of which 1.0 s is backward, and 2.4 s of which 1.5 s is: busy for 1.0 s and 0.9 s.
    known = world_fields(_rows(((2.0, 1.0), (2.4, 1.5))))
    assert known["slowest_rank"] == 0
    assert known["rank_spread"] == pytest.approx((1.0 - 0.9) / 0.95)
    some = world_fields(_rows(((2.0, 1.0), (2.4, None))))
    assert some["slowest_rank"] == 1
    assert some["rank_spread"] == pytest.approx((2.4 - 2.0) / 2.2)


def _rows(seconds: Iterable[tuple[float, float | None]]) -> dict[int, list[int]]:
    return {r: pack_window(window(elapsed_s=e, backward_s=b), 1e12) for r, (e, b) in enumerate(seconds)}


def test_a_world_of_one_makes_no_group() -> None:
    assert call_the_roll() is None


_SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
import mfu_monitor as mm
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord

rank, port, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
calls, waits, groups = [], [], []
def watched(name):
    was = getattr(dist, name)
    def call(*args, **kwargs):
        if name == "new_group":
            groups.append(1)
        else:
            calls.append(name)
            waits.extend([] if kwargs.get("async_op") else [name])
        return was(*args, **kwargs)
    call.plain = was
    return call
for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier",
             "all_to_all_single", "broadcast", "broadcast_object_list", "gather", "gather_object", "new_group", "recv",
             "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "monitored_barrier"):
    setattr(dist, name, watched(name))
barrier = dist.barrier.plain

class Sink:
    def __init__(self): self.readings = []
    def emit(self, event):
        if event.kind == "reading": self.readings.append(event.payload)
    def close(self): pass

class Counter:
    def __enter__(self): return self
    def __exit__(self, *_):
        op = OpRecord(op="aten::mm", phase=Phase.FORWARD, precision="fp32",
                      totals=FlopTotals(model_flops=100 * (rank + 1)))
        self.record = StepRecord(ops=(op,))

if case == "alone" and rank == 1:  # a monitor on rank 0 only
    barrier()
    dist.destroy_process_group()
    print(json.dumps({}))
    sys.exit()
sink = Sink()
monitor = mm.Monitor(nn.Linear(2, 2), log_every_n_steps=5, max_overhead=0.0, sinks=[sink],
                     peak=1e9 * (rank + 1), counter_factory=lambda model: Counter(), stop_on_alert=case == "stops")
if case == "ends" and rank == 1:
    steps = 10
else:
    steps = 40 if case == "stops" else 20
longest_s = 0.0
for step in range(steps):
    if case == "stops" and rank == 1 and step == 7:
        monitor._request_stop()  # as after an alert that this rank sees and the other does not
    with monitor.step(torch.zeros(4, 8, dtype=torch.long)):
        if step == 0 and case != "alone":
            barrier()  # as training does with its first gradients: nobody is ahead by a whole window
        time.sleep(0.002 + 0.02 * (rank != (case == "ends")))
        slept_s = time.perf_counter()
    longest_s = max(longest_s, time.perf_counter() - slept_s)
    if case == "fails" and rank == 1 and step == 7:
        monitor._windows.builder.end_step = lambda **_: 1 / 0
    if monitor.should_stop:
        break
closing_s = time.perf_counter()
monitor.close()
closing_s = time.perf_counter() - closing_s
print(json.dumps({"last_step": step, "calls": len(calls), "kinds": sorted(set(calls)), "waits": waits,
                  "groups": len(groups), "readings": sink.readings, "longest_s": longest_s, "closing_s": closing_s}))
barrier()
dist.destroy_process_group()
"""


def _two_ranks(tmp_path: Path, case: str) -> list[dict[str, Any]]:
    script = tmp_path / "rank.py"
    script.write_text(_SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), port, case], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_two_ranks_exchange_once_a_window_and_name_the_straggler(tmp_path: Path) -> None:
    answers = _two_ranks(tmp_path, "well")
    shown = [[(r["mfu"], r["hfu"], r["tokens_per_s"], r["exactness"]) for r in a["readings"]] for a in answers]
    assert shown[0] == shown[1]  # to the last digit
    for rank, answer in enumerate(answers):
        assert answer["calls"] == 20 // 5
        assert (answer["kinds"], answer["waits"], answer["groups"]) == (["all_gather"], [], 1)
        assert [reading["window"]["last_step"] for reading in answer["readings"]] == [4, 9, 14, 19]
        last = answer["readings"][-1]
        assert last["window"]["world_size"] == 2
        assert last["window"]["world_model_flops"] == 5 * (100 + 200)
        assert last["window"]["model_flops"] == 5 * 100 * (rank + 1)
        assert last["window"]["world_tokens"] == 2 * 5 * 32
        assert last["world_peak_flops_per_s"] == 3e9
        assert last["window"]["slowest_rank"] == 1
        slowest_s = answers[1]["readings"][-1]["window"]["elapsed_s"]
        assert last["window"]["world_elapsed_s"] == pytest.approx(slowest_s, abs=1e-9)
        assert last["mfu"] == 5 * 300 / (last["window"]["world_elapsed_s"] * 3e9)


def test_a_rank_whose_monitor_failed_takes_part_and_the_world_is_unknown(tmp_path: Path) -> None:
    healthy, failed = _two_ranks(tmp_path, "fails")
    assert healthy["calls"] == failed["calls"] == 4
    assert [r["window"]["last_step"] for r in healthy["readings"]] == [4, 9, 14, 19]
    assert healthy["readings"][0]["mfu"] is not None
    assert healthy["readings"][-1]["mfu"] is None
    assert "other 1 ranks" in healthy["readings"][-1]["reason"]


def test_a_monitor_on_one_rank_of_two_waits_for_nobody_and_says_whom_it_reads(tmp_path: Path) -> None:
    alone, _ = _two_ranks(tmp_path, "alone")
    assert alone["calls"] == alone["groups"] == 0
    assert alone["longest_s"] < 0.5  # the end of a step, the one where ranks meet included; a wait would be 10 s
    assert [r["window"]["last_step"] for r in alone["readings"]] == [4, 9, 14, 19]
    for reading in alone["readings"]:
        assert (reading["coverage"], reading["exactness"], reading["tokens_per_s"]) == ("1/2", "upper_bound", None)
        assert "only 1 of 2 ranks take part" in reading["not_known"]
        assert reading["mfu"] == reading["window"]["steps"] * 100 / (reading["window"]["world_elapsed_s"] * 1e9)


def test_when_a_rank_ends_before_the_others_their_windows_go_on_without_it(tmp_path: Path) -> None:
    longer, shorter = _two_ranks(tmp_path, "ends")
    assert [r["window"]["last_step"] for r in shorter["readings"]] == [4, 9]
    assert [r["window"]["last_step"] for r in longer["readings"]] == [4, 9, 14, 19]
    assert [r["coverage"] for r in longer["readings"]] == [None, None, "1/2", "1/2"]
    assert all(r["mfu"] is not None for r in longer["readings"])
    assert longer["closing_s"] < 1.0


def test_two_ranks_stop_after_the_same_step_though_only_one_wants_to(tmp_path: Path) -> None:
    """Asked for in the window of steps 5-9, whose row all have by the end of steps 15-19; no collective more."""
    for answer in _two_ranks(tmp_path, "stops"):
        assert answer["last_step"] == 19
        assert answer["calls"] == 20 // 5
