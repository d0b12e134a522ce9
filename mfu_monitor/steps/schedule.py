"""Which steps are counted: the first of each kind, then random ones that the budget can pay."""

from __future__ import annotations

import random

__all__ = ["CountSchedule"]

FREE_SIGNATURES = 8
"""Signatures whose first step is counted whatever it costs; a run with more (every batch of another length) pays for
the rest out of the budget."""
FREE_SIZES = 16
"""The same for sizes outside those that the law of their kind of step was made from, while there is such a law."""
CONFIRMING_COUNTS = 3
"""Counts that make a kind of step known: the first, the second and an early one drawn at random."""
CONFIRMING_DRAW = 1 / 8
"""Chance of each step to be that early one."""
CONFIRMING_GAP = 3
"""Uncounted steps before that early one, so that a short window keeps a step with a time."""
MOST_PROVISIONAL_RETRIES = 3
"""A count taken while something compiled is taken again, so often at most: with endless recompiles it never settles."""

_LARGEST_DRAW = 0.5
"""A step is never counted for certain, or a loop that alternates could be seen from one side only."""
_SMOOTHING = 0.05
"""Weight of the newest step in the typical step's time: twenty steps of memory."""
_OUTLIER = 4.0
"""A step longer than so many typical ones (a checkpoint, a stall) counts as so many and no more."""
_FIRST_GUESS_COST = 3.0
"""Cost of counting in typical steps, until it was measured once: a bare dispatch mode makes small models 3.6 to 6 times
slower, large ones hardly at all."""


class CountSchedule:
    """Draws the steps to count so that counting costs at most ``max_overhead`` of the run's time.

    It has random numbers of its own; the global generators are never touched.

    Args:
        max_overhead: share of the run's time that counts may cost beyond the typical step's time, in the whole world.
        every_step: count all.
        seed: of the draws.

    Example:
        >>> schedule = CountSchedule(max_overhead=0.002)
        >>> schedule.wants_count(is_known=False, is_provisional=False, now_s=0.0)
        True
    """

    def __init__(self, *, max_overhead: float, every_step: bool = False, seed: int | None = None) -> None:
        self._every_step = every_step
        self._max_overhead = self._share = max_overhead
        self._random = random.Random(seed)
        self._start_s: float | None = None
        self._typical_s: float | None = None
        self._is_warming_up = True
        self._counted_s = 0.0
        self._counted = 0
        self._next_s = float("inf")
        self._signatures = 0
        self._sizes = 0
        self.was_drawn = False
        """Whether the step that is counted was drawn at random."""
        self._retries = 0
        self._confirmations = 0
        self._uncounted_in_a_row = 0

    def share_with(self, world_size: int) -> None:
        """Divide the budget: each rank counts at moments of its own, and makes the others wait."""
        self._share = self._max_overhead / max(1, world_size)

    @property
    def spent_s(self) -> float:
        """What counting has cost so far beyond typical steps; the first step and those that compiled are left out."""
        return max(0.0, self._counted_s - self._counted * (self._typical_s or 0.0))

    @property
    def cost_s(self) -> float:
        """What one more count will cost, from the counts so far."""
        return self.spent_s / self._counted if self._counted else _FIRST_GUESS_COST * (self._typical_s or 0.0)

    def wants_count(
        self,
        *,
        is_known: bool,
        is_provisional: bool,
        now_s: float,
        equal_counts: int = CONFIRMING_COUNTS,
        has_law: bool = False,
    ) -> bool:
        """Whether the step that begins is to be counted.

        Args:
            is_known: a step of this signature was counted before.
            is_provisional: but something compiled in it, so its count may not be the settled one.
            now_s: the host's clock.
            equal_counts: how often it was counted with one result.
            has_law: the FLOPs of its kind of step may follow from the sizes of the batch.
        """
        if self._start_s is None:
            self._start_s = now_s
        self.was_drawn = self._every_step or (is_known and equal_counts > 1)
        if self._every_step:
            return True
        if not is_known:
            return self._wants_new(now_s, has_law)
        if is_provisional and self._retries < MOST_PROVISIONAL_RETRIES:
            self._retries += 1
            self.was_drawn = False
            return True
        if equal_counts < CONFIRMING_COUNTS and self._confirms(equal_counts):
            self._confirmations += 1
            return True
        return now_s >= self._next_s and self._can_pay(now_s) and self._draw()

    def _wants_new(self, now_s: float, has_law: bool) -> bool:
        if self._signatures < FREE_SIGNATURES or self._can_pay(now_s):
            return True
        is_free = has_law and self._share > 0 and self._sizes < FREE_SIZES
        self._sizes += is_free
        return is_free

    def _confirms(self, equal_counts: int) -> bool:
        # As the first steps of signatures, these are free for so many and no more.
        is_free = self._share > 0 and self._confirmations < (CONFIRMING_COUNTS - 1) * FREE_SIGNATURES
        if not is_free or equal_counts == 1:
            return is_free
        return self._uncounted_in_a_row >= CONFIRMING_GAP and self._random.random() < CONFIRMING_DRAW

    def _can_pay(self, now_s: float) -> bool:
        assert self._start_s is not None
        return self._share > 0 and self.spent_s + self.cost_s <= self._share * (now_s - self._start_s)

    def _draw(self) -> bool:
        # On average one count in the steps that earn its cost; the wait for the budget comes on top, so the rate stays
        # below the budget.
        earned_per_step_s = self._share * (self._typical_s or 0.0)
        return self._random.random() < min(_LARGEST_DRAW, earned_per_step_s / self.cost_s if self.cost_s > 0 else 1.0)

    def add_counted(self, seconds: float, *, is_new: bool, has_compiled: bool) -> None:
        """A counted step has ended after so many seconds of the host's clock."""
        self._signatures += is_new
        self._uncounted_in_a_row = 0
        # The run's first step makes pools, plans and threads that belong to nobody: no measure of what counting costs.
        if not has_compiled and not self._is_warming_up:
            self._counted += 1
            self._counted_s += seconds
        self._is_warming_up = False
        self._plan()

    def add_uncounted(self, seconds: float) -> None:
        """An uncounted step, not compiling, has ended."""
        typical_s = self._typical_s
        self._uncounted_in_a_row += 1
        if typical_s is None:
            self._typical_s = seconds
            self._plan()
        else:
            self._typical_s = typical_s + _SMOOTHING * (min(seconds, _OUTLIER * typical_s) - typical_s)

    def _plan(self) -> None:
        # Until then one comparison on each step is enough.
        if self._start_s is not None and self._share > 0 and self._typical_s is not None:
            self._next_s = self._start_s + (self.spent_s + self.cost_s) / self._share
