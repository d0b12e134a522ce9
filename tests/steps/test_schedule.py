"""Which steps are counted, and what that may cost."""

from __future__ import annotations

import itertools
import random

import pytest

from mfu_monitor.steps.schedule import FREE_SIGNATURES, MOST_PROVISIONAL_RETRIES, CountSchedule


def simulate(schedule: CountSchedule, steps: int, *, step_s: float = 0.1, counted_s: float = 0.4) -> list[int]:
    """A loop of equal steps; the numbers of those that were counted."""
    now_s, counted = 0.0, []
    for step in range(steps):
        is_first = step == 0
        if schedule.wants_count(is_known=not is_first, is_provisional=False, now_s=now_s):
            counted.append(step)
            now_s += counted_s
            schedule.add_counted(counted_s, is_new=is_first, has_compiled=False)
        else:
            now_s += step_s
            schedule.add_uncounted(step_s)
    return counted


@pytest.mark.parametrize("max_overhead", [0.0005, 0.002, 0.02, 0.2])
def test_the_cost_stays_within_the_budget_and_uses_a_good_part_of_it(max_overhead: float) -> None:
    steps = round(100 / max_overhead)
    counted = simulate(CountSchedule(max_overhead=max_overhead, seed=1), steps)
    extra_s = 0.3 * len(counted)
    total_s = 0.1 * steps + extra_s
    assert extra_s <= max_overhead * total_s + 0.3  # the first count is not a matter of budget
    assert extra_s >= 0.25 * max_overhead * total_s


def test_without_a_budget_only_the_first_step_is_counted() -> None:
    assert simulate(CountSchedule(max_overhead=0.0), 10_000) == [0]


def test_the_draws_do_not_keep_in_step_with_a_loop_that_alternates() -> None:
    counted = simulate(CountSchedule(max_overhead=0.2, seed=3), 20_000)
    odd = sum(step % 2 for step in counted)
    assert 0.4 < odd / len(counted) < 0.6


def test_ranks_share_the_budget() -> None:
    alone = simulate(CountSchedule(max_overhead=0.02, seed=1), 20_000)
    shared = CountSchedule(max_overhead=0.02, seed=1)
    shared.share_with(8)
    in_a_world = simulate(shared, 20_000)
    assert len(in_a_world) < len(alone) / 4


def test_every_step_is_counted_if_asked() -> None:
    assert simulate(CountSchedule(max_overhead=0.0, every_step=True), 20) == list(range(20))


def test_first_steps_of_a_few_signatures_are_free_and_further_ones_are_paid_for() -> None:
    schedule = CountSchedule(max_overhead=0.002)
    taken = 0
    for _ in range(FREE_SIGNATURES + 5):
        if schedule.wants_count(is_known=False, is_provisional=False, now_s=0.0):
            schedule.add_counted(1.0, is_new=True, has_compiled=False)
            taken += 1
        schedule.add_uncounted(0.1)
    assert taken == FREE_SIGNATURES
    assert schedule.wants_count(is_known=False, is_provisional=False, now_s=1e6)  # the budget has grown


def test_a_count_taken_while_compiling_is_repeated_a_few_times() -> None:
    schedule = CountSchedule(max_overhead=0.0)
    wanted = [schedule.wants_count(is_known=True, is_provisional=True, now_s=0.0) for _ in range(10)]
    assert sum(wanted) == MOST_PROVISIONAL_RETRIES


def test_time_spent_compiling_is_not_charged_to_counting() -> None:
    schedule = CountSchedule(max_overhead=0.002)
    schedule.wants_count(is_known=False, is_provisional=False, now_s=0.0)
    schedule.add_counted(60.0, is_new=True, has_compiled=True)
    schedule.add_uncounted(0.1)
    assert schedule.spent_s == 0.0


def test_the_first_step_of_a_run_is_not_taken_for_the_cost_of_counting() -> None:
    schedule = CountSchedule(max_overhead=0.002)
    for seconds in (30.0, 0.5):
        schedule.wants_count(is_known=False, is_provisional=False, now_s=0.0)
        schedule.add_counted(seconds, is_new=True, has_compiled=False)
        schedule.add_uncounted(0.1)
    assert schedule.spent_s == pytest.approx(0.4)


def test_counting_that_costs_nothing_is_drawn_every_second_step_and_never_for_certain() -> None:
    counted = simulate(CountSchedule(max_overhead=0.002, seed=5), 4000, step_s=0.1, counted_s=0.1)
    # Before the first measured count a guess holds: three typical steps, earned in 0.3 s / 0.002 = 1500 steps.
    assert counted[1] >= 1500
    assert 0.45 < len(counted[1:]) / (4000 - counted[1]) < 0.55
    assert sum(b - a > 1 for a, b in itertools.pairwise(counted)) > 100


@pytest.mark.parametrize(("now_s", "is_wanted"), [(1000.0, False), (1034.9, False), (1035.1, True)])
def test_a_kind_of_step_that_is_new_late_in_a_run_is_counted_once_the_budget_has_earned_it(
    now_s: float, is_wanted: bool
) -> None:
    schedule, start_s = CountSchedule(max_overhead=0.10), 1000.0
    for _ in range(FREE_SIGNATURES):
        assert schedule.wants_count(is_known=False, is_provisional=False, now_s=start_s)
        schedule.add_counted(0.5375, is_new=True, has_compiled=False)
        schedule.add_uncounted(0.1)
    # Seven counts (the first is a warm-up) of 0.4375 s beyond a typical step: 3.0625 s, and one more makes 3.5 s.
    assert schedule.spent_s + schedule.cost_s == pytest.approx(3.5)
    assert schedule.wants_count(is_known=False, is_provisional=False, now_s=now_s) is is_wanted


def test_global_random_numbers_are_not_touched() -> None:
    random.seed(0)
    state = random.getstate()
    simulate(CountSchedule(max_overhead=0.2), 1000)
    assert random.getstate() == state


@pytest.mark.parametrize("seed", range(20))
def test_the_second_step_of_a_kind_and_an_early_random_one_are_counted(seed: int) -> None:
    schedule = CountSchedule(max_overhead=1e-9, seed=seed)
    counted: list[int] = []
    for step in range(400):
        if schedule.wants_count(
            is_known=bool(counted), is_provisional=False, now_s=0.1 * step, equal_counts=min(len(counted), 3)
        ):
            counted.append(step)
            schedule.add_counted(0.4, is_new=step == 0, has_compiled=False)
        else:
            schedule.add_uncounted(0.1)
    assert counted[:2] == [0, 1]
    assert len(counted) == 3


def counted_steps(seed: int, steps: int = 200) -> list[int]:
    """Numbers of the counted steps of one kind, all counts equal; steps take no time, so the budget pays for none."""
    schedule, counted = CountSchedule(max_overhead=0.002, seed=seed), []
    for step in range(steps):
        known, equal = bool(counted), min(len(counted), 3)
        if schedule.wants_count(is_known=known, is_provisional=False, now_s=0.0, equal_counts=equal if known else 0):
            counted.append(step)
            schedule.add_counted(0.01, is_new=not known, has_compiled=False)
        else:
            schedule.add_uncounted(0.001)
    return counted


def test_a_kind_is_confirmed_by_its_second_step_and_an_early_random_one() -> None:
    drawn = [counted_steps(seed) for seed in range(200)]
    assert all(counted[:2] == [0, 1] and len(counted) == 3 for counted in drawn)
    thirds = [counted[2] for counted in drawn]
    # Three steps are left with their time before it; then each is drawn with a chance of an eighth.
    assert min(thirds) == 5
    assert len(set(thirds)) > 10
    assert abs(sum(thirds) / len(thirds) - (5 + 7)) < 2.5  # the mean of seven misses, and its spread over 200 draws


def test_without_a_budget_nothing_is_confirmed() -> None:
    schedule = CountSchedule(max_overhead=0.0, seed=0)
    assert schedule.wants_count(is_known=False, is_provisional=False, now_s=0.0)
    schedule.add_counted(0.01, is_new=True, has_compiled=False)
    assert not any(
        schedule.wants_count(is_known=True, is_provisional=False, now_s=0.0, equal_counts=1) for _ in range(50)
    )
