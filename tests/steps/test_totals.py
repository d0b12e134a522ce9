"""Tokens and FLOPs of windows, from steps by signature."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.steps.batch import BatchCounts
from mfu_monitor.steps.totals import MOST_WAYS, StepLedger

TOKENS = BatchCounts(tokens=16, samples=2)


def counted(ledger: StepLedger, name: str, record: StepRecord | None, counts: BatchCounts = TOKENS) -> Any:
    entry = ledger.entry(name, counts)
    if record is not None:
        entry.add_record(record, is_provisional=False)
    return entry


def run(ledger: StepLedger, entry: Any, steps: int = 1, **how: Any) -> None:
    for _ in range(steps):
        ledger.add_step(entry, how.pop("counts", entry.counts), is_excluded=how.pop("is_excluded", False), **how)


def test_a_window_is_steps_times_the_count(record: Any) -> None:
    ledger = StepLedger()
    run(ledger, counted(ledger, "a", record(600, recompute_flops=100)), 3)
    window = ledger.take_window()
    assert (window["model_flops"], window["recompute_flops"], window["hardware_flops"]) == (1800, 300, 2100)
    assert window["model_flops_by_precision"] == {"fp32": 1800}
    assert window["hardware_flops_by_precision"] == {"fp32": 2100}
    assert (window["tokens"], window["samples"]) == (48, 6)
    assert (window["is_sampled"], window["is_lower_bound"]) == (False, False)


def test_signatures_add_up(record: Any) -> None:
    ledger = StepLedger()
    run(ledger, counted(ledger, "a", record(600)), 2)
    run(ledger, counted(ledger, "b", record(50, precision="bf16"), BatchCounts(tokens=1, samples=1)))
    window = ledger.take_window()
    assert window["model_flops"] == 2 * 600 + 50
    assert window["model_flops_by_precision"] == {"fp32": 1200, "bf16": 50}
    assert (window["tokens"], window["samples"]) == (33, 5)


def test_excluded_steps_are_in_no_window_but_in_the_totals(record: Any) -> None:
    ledger = StepLedger()
    entry = counted(ledger, "a", record(600))
    run(ledger, entry, is_excluded=True)
    run(ledger, entry, 2)
    assert ledger.totals["tokens"] == 48
    window = ledger.take_window()
    assert (window["tokens"], window["model_flops"]) == (32, 1200)
    assert (ledger.totals["tokens"], ledger.totals["model_flops"], ledger.totals["steps"]) == (48, 1800, 3)


def test_totals_of_batch_sizes_one_two_one_are_one_three_four() -> None:
    ledger = StepLedger()
    seen = []
    for size in (1, 2, 1):
        run(ledger, ledger.entry(size, BatchCounts(samples=size)))
        seen.append(ledger.totals["samples"])
    assert seen == [1, 3, 4]


def test_windows_do_not_share_steps(record: Any) -> None:
    ledger = StepLedger()
    entry = counted(ledger, "a", record(600))
    run(ledger, entry, 2)
    ledger.take_window()
    run(ledger, entry, 1)
    assert ledger.take_window()["model_flops"] == 600
    assert ledger.totals["model_flops"] == 1800


def test_tokens_of_one_unknown_batch_make_the_sum_unknown() -> None:
    ledger = StepLedger()
    run(ledger, ledger.entry("a", TOKENS))
    run(ledger, ledger.entry("b", BatchCounts(samples=3)))
    window = ledger.take_window()
    assert (window["tokens"], window["samples"]) == (None, 5)


def test_counts_of_each_batch_are_used_where_they_differ() -> None:
    ledger = StepLedger()
    entry = ledger.entry("a", TOKENS)
    run(ledger, entry)
    run(ledger, entry, counts=BatchCounts(tokens=5, tokens_not_padding=4, samples=2))
    run(ledger, entry, counts=BatchCounts(tokens=7, samples=2), is_excluded=True)
    assert ledger.totals["tokens"] == 16 + 5 + 7
    assert ledger.take_window()["tokens"] == 16 + 5


class TestOptimizerSteps:
    """Known where every step says it."""

    @pytest.mark.parametrize(("said", "expected"), [((True, False, True), 2), ((True, None), None), ((), 0)])
    def test_they_are_counted(self, said: tuple[bool | None, ...], expected: int | None) -> None:
        ledger = StepLedger()
        entry = ledger.entry("a", TOKENS)
        for stepped in said:
            run(ledger, entry, optimizer_step=stepped)
        assert ledger.take_window()["optimizer_steps"] == expected

    def test_those_of_excluded_steps_are_in_the_totals_only(self) -> None:
        ledger = StepLedger()
        run(ledger, ledger.entry("a", TOKENS), optimizer_step=True, is_excluded=True)
        assert ledger.take_window()["optimizer_steps"] == 0
        assert ledger.totals["optimizer_steps"] == 1


class TestSampled:
    """Counts that differ, or were never taken, say so."""

    def test_differing_counts_give_their_mean_and_spread(self, record: Any) -> None:
        ledger = StepLedger()
        entry = counted(ledger, "a", record(600, recompute_flops=0))
        counted(ledger, "a", record(1000, recompute_flops=0))
        run(ledger, entry, 10)
        window = ledger.take_window()
        assert window["model_flops"] == 10 * 800
        assert window["is_sampled"]
        assert window["flops_spread"] == pytest.approx((1000 - 600) / 800)

    def test_equal_counts_are_exact(self, record: Any) -> None:
        ledger = StepLedger()
        entry = counted(ledger, "a", record(600))
        counted(ledger, "a", record(600))
        run(ledger, entry)
        window = ledger.take_window()
        assert (window["is_sampled"], window["flops_spread"]) == (False, 0.0)

    def test_a_provisional_count_gives_way_to_the_settled_one(self, record: Any) -> None:
        ledger = StepLedger()
        entry = ledger.entry("a", TOKENS)
        entry.add_record(record(999), is_provisional=True)
        entry.add_record(record(600), is_provisional=False)
        run(ledger, entry)
        window = ledger.take_window()
        assert (window["model_flops"], window["is_sampled"]) == (600, False)

    def test_work_that_changed_for_good_is_no_mean_with_the_past(self, record: Any) -> None:
        ledger = StepLedger()
        entry = counted(ledger, "a", record(600, recompute_flops=0))
        for _ in range(4):
            counted(ledger, "a", record(600, recompute_flops=200))
        run(ledger, entry)
        window = ledger.take_window()
        assert (window["recompute_flops"], window["is_sampled"]) == (200, False)

    @pytest.mark.parametrize(
        ("flops", "is_blind", "label"),
        [
            ([600], False, "presumed"),
            ([600] * 2, False, "presumed"),
            ([600] * 3, False, "exact"),
            ([600] * 7, True, "presumed"),
            ([600] * 8, True, "exact"),
            ([600, 600, 900], False, "sampled"),
            ([900] + [600] * 4, False, "presumed"),  # it changed once, so it may change again
        ],
    )
    def test_the_label_says_how_often_a_kind_of_step_was_counted(
        self, record: Any, flops: list[int], is_blind: bool, label: str
    ) -> None:
        ledger = StepLedger()
        entry = ledger.entry("a", TOKENS, is_blind=is_blind)
        for model_flops in flops:
            entry.add_record(record(model_flops), is_provisional=False)
        run(ledger, entry)
        assert ledger.take_window()["counts_label"] == label

    def test_a_window_has_the_label_of_its_least_known_kind(self, record: Any) -> None:
        ledger = StepLedger()
        for _ in range(3):
            counted(ledger, "often", record(600))
        run(ledger, counted(ledger, "often", None))
        run(ledger, counted(ledger, "once", record(50)))
        assert ledger.take_window()["counts_label"] == "presumed"

    def test_a_provisional_count_confirms_nothing(self, record: Any) -> None:
        entry = StepLedger().entry("a", TOKENS)
        for is_provisional in (True, False, False):
            entry.add_record(record(600), is_provisional=is_provisional)
        assert (entry.label, entry.equal_counts) == ("presumed", 2)

    def test_an_uncounted_signature_is_taken_by_flops_per_token(self, record: Any) -> None:
        ledger = StepLedger()
        counted(ledger, "a", record(600, recompute_flops=0), BatchCounts(tokens=10, samples=1))
        counted(ledger, "b", record(1800, recompute_flops=0), BatchCounts(tokens=20, samples=1))
        run(ledger, ledger.entry("new", BatchCounts(tokens=5, samples=1)), 2)
        window = ledger.take_window()
        assert window["model_flops"] == 2 * 5 * (600 + 1800) // (10 + 20)
        assert window["is_sampled"]

    def test_without_tokens_it_is_taken_by_samples(self, record: Any) -> None:
        ledger = StepLedger()
        counted(ledger, "a", record(600), BatchCounts(samples=6))
        run(ledger, ledger.entry("new", BatchCounts(samples=2)))
        assert ledger.take_window()["model_flops"] == 200

    def test_without_either_it_is_taken_by_step(self, record: Any) -> None:
        ledger = StepLedger()
        counted(ledger, "a", record(600), BatchCounts())
        run(ledger, ledger.entry("new", BatchCounts()), 3)
        assert ledger.take_window()["model_flops"] == 1800

    def test_with_no_count_at_all_flops_are_unknown(self) -> None:
        ledger = StepLedger()
        run(ledger, ledger.entry("a", TOKENS))
        window = ledger.take_window()
        assert (window["model_flops"], window["hardware_flops"]) == (None, None)
        assert ledger.totals["model_flops"] is None


def test_a_lower_bound_is_passed_on(record: Any) -> None:
    ledger = StepLedger()
    run(ledger, counted(ledger, "a", record(600, incomplete=True)))
    assert ledger.take_window()["is_lower_bound"]


def test_totals_go_on_after_loading(record: Any) -> None:
    before, after = StepLedger(), StepLedger()
    run(before, counted(before, "a", record(600)), 3)
    after.load_totals(before.totals)
    run(after, counted(after, "a", record(600)), 2)
    assert (after.totals["steps"], after.totals["tokens"], after.totals["model_flops"]) == (5, 80, 3000)


def test_endless_new_signatures_are_forgotten(monkeypatch: pytest.MonkeyPatch, record: Any) -> None:
    monkeypatch.setattr("mfu_monitor.steps.totals.MOST_SIGNATURES", 10)
    ledger = StepLedger()
    counted(ledger, "kept", record(600))
    for length in range(50):
        run(ledger, ledger.entry(length, BatchCounts(tokens=length, samples=1)))
        ledger.take_window()
    assert len(ledger.entries) <= 12
    assert "kept" in ledger.entries


@given(flops=st.lists(st.integers(min_value=0, max_value=10**18), min_size=1, max_size=6), steps=st.integers(1, 50))
def test_hardware_is_always_the_sum_of_its_parts(flops: list[int], steps: int) -> None:
    from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase

    ledger = StepLedger()
    entry = ledger.entry("a", TOKENS)
    for i, n in enumerate(flops):
        totals = FlopTotals(model_flops=n, recompute_flops=n // (i + 2), other_flops=i, optimizer_flops=3 * i)
        op = OpRecord(op="aten::mm", phase=Phase.FORWARD, precision="bf16", totals=totals)
        entry.add_record(StepRecord(ops=(op,)), is_provisional=False)
    run(ledger, entry, steps)
    window = ledger.take_window()
    parts = ("model_flops", "recompute_flops", "kernel_recompute_flops", "optimizer_flops", "other_flops")
    assert window["hardware_flops"] == sum(window[name] for name in parts)
    assert window["hardware_flops"] >= window["model_flops"]


def test_steps_of_one_signature_that_ran_otherwise_have_a_count_of_their_own(record: Any) -> None:
    ledger = StepLedger()
    entry = counted(ledger, "a", record(600))
    assert ledger.as_ran(entry, "a", "both") is entry
    run(ledger, entry)
    other = ledger.as_ran(entry, "a", "critic")
    assert other is not entry
    assert not entry.is_known  # a way of running was seen that nobody counted
    run(ledger, other, 4)
    assert ledger.take_window()["is_sampled"]
    other.add_record(record(50), is_provisional=False)
    assert entry.is_known
    run(ledger, ledger.as_ran(entry, "a", "both"))
    run(ledger, ledger.as_ran(entry, "a", "critic"), 4)
    window = ledger.take_window()
    assert (window["model_flops"], window["is_sampled"]) == (600 + 4 * 50, False)


def test_ways_of_running_without_end_share_one_entry_at_last() -> None:
    ledger = StepLedger()
    entry = ledger.entry("a", TOKENS)
    ways = {id(ledger.as_ran(entry, "a", ("line search", n))) for n in range(1000)}
    assert len(ways) == 1 + MOST_WAYS + 1  # the first, the others, the rest
