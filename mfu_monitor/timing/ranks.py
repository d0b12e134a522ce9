"""What the other ranks measured: one small collective a window, on a group of its own, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mfu_monitor.counting.fingerprints import SECTION_WORDS
from mfu_monitor.internals.rendezvous import default_store
from mfu_monitor.timing.present_ranks import PresentRanks, RollCall
from mfu_monitor.timing.step_window import StepWindow

__all__ = [
    "RankExchange",
    "StopAgreement",
    "call_the_roll",
    "join_ranks",
    "pack_window",
    "sections_of",
    "unknown_row",
    "world_fields",
]

_FIELDS = (
    "steps",
    "elapsed_ns",
    "backward_ns",
    "data_wait_ns",
    "model_flops",
    "hardware_flops",
    "palm_model_flops",
    "repeated_flops",
    "tokens",
    "samples",
    "peak_flops_per_s",
    "wants_stop",
    "label",
    "repeats_known",
)
_LABELS = ("exact", "presumed", "sampled", "upper_bound", "lower_bound", "unknown")
"""What a rank knows of its counts, on the wire as the place in this order: from the strongest to the weakest."""
_SECTIONS = 16
"""Rows at the start that have a section; with more fingerprints than these hold, repeats stay unknown for long."""
_UNKNOWN = -1
"""On the wire only: an integer tensor has no None."""
_LARGEST = 2**63 - 1
_TIMEOUT = timedelta(minutes=5)
"""For making the group, and for each collective."""
_STARTS: list[str] = []
"""Names of the starts of training in this process, one each, so that no two share a decision."""

Row = Mapping[str, int | None]


def pack_window(window: StepWindow, peak_flops_per_s: float | None, *, wants_stop: bool = False) -> list[int]:
    """The numbers of one rank's window as integers to send; -1 for unknown."""
    is_valid = window.invalid_reason is None and window.steps > 0 and window.elapsed_s > 0
    # Known to nobody but the step counter of a world: windows made otherwise hold all of this rank's tokens.
    is_compared = window.unique_samples is not None or window.unique_tokens is not None or not window.batches_known
    values = {
        "steps": window.steps,
        "elapsed_ns": _nanoseconds(window.elapsed_s),
        "backward_ns": _nanoseconds(window.backward_s),
        "data_wait_ns": _nanoseconds(window.data_wait_s),
        "model_flops": window.model_flops,
        "hardware_flops": window.hardware_flops,
        "palm_model_flops": window.palm_model_flops,
        "repeated_flops": window.repeated_flops,
        "tokens": window.unique_tokens if is_compared else window.tokens,
        "samples": window.unique_samples if is_compared else window.samples,
        "peak_flops_per_s": None if peak_flops_per_s is None else round(peak_flops_per_s),
        "wants_stop": int(wants_stop),
        "label": _LABELS.index(_label(window)),
        "repeats_known": int(is_compared and window.repeats_known and window.batches_known),
    }
    return [_sendable(values[name]) for name in _FIELDS] if is_valid else unknown_row(wants_stop=wants_stop)


def unknown_row(*, wants_stop: bool = False) -> list[int]:
    """What a rank sends that has nothing to report: it takes part all the same, or the others' order would break."""
    return [int(wants_stop) if name == "wants_stop" else _UNKNOWN for name in _FIELDS]


def _label(window: StepWindow) -> str:
    label = window.counts_label or ("sampled" if window.is_sampled else "exact")
    if label not in _LABELS or (label == "upper_bound" and window.is_lower_bound):
        return "unknown"
    return "lower_bound" if window.is_lower_bound and label != "unknown" else label


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def _sendable(value: int | None) -> int:
    return _UNKNOWN if value is None or not 0 <= value <= _LARGEST else value


def _unpack(row: Sequence[int]) -> Row:
    fields = row[: len(_FIELDS)]
    return {name: None if value == _UNKNOWN else value for name, value in zip(_FIELDS, fields, strict=True)}


def sections_of(rows: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """The sections that came with the rows, one a rank; empty ones where there were none."""
    return [row[len(_FIELDS) :] for row in rows]


def world_fields(rows: Mapping[int, Sequence[int]], *, world_size: int | None = None) -> dict[str, Any]:
    """The world's fields of a window, from every rank's row: the same on all ranks, to the last digit. Pure.

    A step is over when its slowest rank is done, so the world's time is that of the rank that took longest a step.
    Ranks leave out steps of their own (those they counted), so each rank's sum is brought to that rank's number of
    steps; where the numbers agree the sums are exact.

    Args:
        rows: one row of integers a rank, as ``pack_window`` makes them, in rank order.
        world_size: of the world, where some of its ranks took no part; sums are of those that did.
    """
    ranks = [_unpack(row) for row in rows.values()]
    numbers = list(rows)
    busy = _busy_s_per_step(ranks)
    last = _takes_longest(ranks)
    return {
        "world_size": world_size or len(ranks),
        "ranks_present": len(ranks) if world_size not in (None, len(ranks)) else None,
        "world_steps": None if last is None else last["steps"],
        "world_elapsed_s": None if last is None else (last["elapsed_ns"] or 0) / 1e9,
        **{f"world_{name}": None if last is None else _sum_for_steps(ranks, name, last["steps"]) for name in _SUMMED},
        "world_peak_flops_per_s": _sum_of_peaks(ranks),
        "world_counts_label": _weakest_label(ranks),
        "world_repeats_known": None if last is None else all(row["repeats_known"] for row in ranks),
        "slowest_rank": None if busy is None else numbers[max(range(len(busy)), key=busy.__getitem__)],
        "rank_spread": None if not busy or not sum(busy) else (max(busy) - min(busy)) * len(busy) / sum(busy),
    }


_SUMMED = ("model_flops", "hardware_flops", "palm_model_flops", "repeated_flops", "tokens", "samples")


def _takes_longest(ranks: Sequence[Row]) -> Row | None:
    """The row with the most time a step, the first of equals; None where a rank has none."""
    slowest: Row | None = None
    for row in ranks:
        elapsed, steps = row["elapsed_ns"], row["steps"]
        if elapsed is None or not steps:
            return None
        # Compared crosswise, in integers: quotients that round alike would make ranks of unequal time equal.
        if slowest is None or elapsed * (slowest["steps"] or 0) > (slowest["elapsed_ns"] or 0) * steps:
            slowest = row
    return slowest


def _sum_for_steps(ranks: Sequence[Row], name: str, own_steps: int | None) -> int | None:
    total = 0
    for row in ranks:
        value, steps = row[name], row["steps"]
        if value is None or not steps or not own_steps:
            return None
        total += (value * own_steps + steps // 2) // steps
    return total


def _sum_of_peaks(ranks: Sequence[Row]) -> float | None:
    peaks = [row["peak_flops_per_s"] for row in ranks]
    return float(sum(p for p in peaks if p)) if peaks and all(peaks) else None


def _weakest_label(ranks: Sequence[Row]) -> str | None:
    """Of all ranks' counts; an upper bound plus a lower one is neither. None where a rank has none."""
    places = [row["label"] for row in ranks]
    labels = {_LABELS[place] for place in places if place is not None}
    if None in places:
        return None
    return "unknown" if {"upper_bound", "lower_bound"} <= labels else max(labels, key=_LABELS.index)


def _busy_s_per_step(ranks: Sequence[Row]) -> list[float] | None:
    """Seconds a step that each rank was busy itself; None if one is not known.

    Backward is left out where it is known of all: gradients are reduced in it, so there the fast ranks wait for the
    slow one and all take the same time.
    """
    has_backward = all(row["backward_ns"] is not None for row in ranks)
    busy: list[float] = []
    for row in ranks:
        elapsed, steps = row["elapsed_ns"], row["steps"]
        if elapsed is None or not steps:
            return None
        backward = (row["backward_ns"] or 0) if has_backward else 0
        busy.append((elapsed - backward) / 1e9 / steps)
    return busy


_STOP_AFTER = 2
"""Windows from the row that asks for a stop to the stop. By then the row has come, nearly always without waiting."""


class StopAgreement:
    """The batch after which all ranks stop together, from the rows that they exchange anyway.

    Each rank reads its own clock, so they would stop at different batches, and one that stops alone leaves the others
    in a collective that never ends. A rank that wants to stop says so in its next row. All get the same rows, so all
    stop at the end of the same window.

    Example:
        >>> agreement = StopAgreement()
        >>> agreement.close_window()
        >>> agreement.take([pack_window(window, None), pack_window(window, None, wants_stop=True)])
        >>> agreement.is_due  # two windows later it is
        False
    """

    def __init__(self) -> None:
        self._closed = 0
        self._received = 0
        self._stop_at: int | None = None

    def close_window(self) -> None:
        """This rank has ended a window."""
        self._closed += 1

    def take(self, rows: Iterable[Sequence[int]]) -> None:
        """The rows of the next window have come."""
        self._received += 1
        if self._stop_at is None and any(_unpack(row)["wants_stop"] for row in rows):
            self._stop_at = self._received + _STOP_AFTER

    @property
    def is_behind(self) -> bool:
        """Whether a row is missing that could ask for a stop now: it has to be waited for."""
        return self._closed - self._received > _STOP_AFTER

    @property
    def is_due(self) -> bool:
        """Whether training is to stop at the end of the window that was closed last."""
        return self._stop_at is not None and self._closed >= self._stop_at


class RankExchange:
    """Sends each window's row to all ranks and gives the rows of all back, later and in order.

    Every rank must send the same number of rows; one that has nothing to report sends ``unknown_row()``.

    Args:
        group: a process group of its own on the CPU. Collectives of a group are matched by their order, and windows are
            known at other moments on each rank, so the group of the training must not be used.

    Example:
        >>> exchange = RankExchange.make(rank=0, world_size=2)
        >>> exchange.send(pack_window(window, peak_flops_per_s))
        >>> exchange.received()
        []
    """

    def __init__(self, group: Any, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = group
        self._in_flight: deque[tuple[Any, list[torch.Tensor], list[int]]] = deque()
        self.sent = 0
        """Rows sent since the start of training."""

    @classmethod
    def make(cls, *, rank: int, world_size: int) -> RankExchange:
        """Make the group, on all ranks at the same point of the program.

        Raises:
            RuntimeError: the group could not be made (no gloo in this torch).
        """
        # Local synchronisation names the group by its ranks: the counter that names the user's groups is not moved.
        group = dist.new_group(
            list(range(world_size)), timeout=_TIMEOUT, backend="gloo", use_local_synchronization=True
        )
        return cls(group, rank=rank, world_size=world_size)

    @property
    def in_flight(self) -> int:
        """Rows sent whose answers have not come."""
        return len(self._in_flight)

    @property
    def takes_section(self) -> bool:
        """Whether the next row goes out with a section of fingerprints: the first ones do, then ever fewer.

        All ranks send the same number of rows, so they agree on it without being asked.
        """
        return self.sent < _SECTIONS or not self.sent & (self.sent - 1)

    def send(self, row: Sequence[int], section: Sequence[int] = ()) -> None:
        """Send one window's row, with a section where ``takes_section`` says so. Returns at once."""
        whole = [*row]
        if self.takes_section:
            whole += [*section, *[0] * (SECTION_WORDS - len(section))]
        self.sent += 1
        mine = torch.tensor(whole, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = dist.all_gather(rows, mine, group=self._group, async_op=True)
        self._in_flight.append((work, rows, [*row]))

    def received(self) -> list[dict[int, list[int]]]:
        """For each window that all ranks have sent by now, oldest first: rows by rank. Never waits.

        Raises:
            RuntimeError: a collective failed (a rank has gone).
        """
        windows: list[dict[int, list[int]]] = []
        while self._in_flight and self._in_flight[0][0].is_completed():
            work, rows, _ = self._in_flight.popleft()
            work.wait()  # complete already: raises what went wrong in it
            windows.append({rank: row.tolist() for rank, row in enumerate(rows)})
        return windows

    def without_those_who_left(self, roll_call: RollCall) -> PresentRanks:
        """A rank has ended, so that rows on their way will never be answered here: they go to those that are left."""
        present = PresentRanks(roll_call, first=self.sent - len(self._in_flight))
        for _, _, row in self._in_flight:
            present.send(row)
        return present


def call_the_roll() -> RollCall | None:
    """Training begins: announce this rank to the others. None in a world of one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "fake":  # torch's stand-in for tests: its other ranks do not exist
        return None
    _STARTS.append(f"start{len(_STARTS)}")
    store = default_store()
    return (
        None if store is None else RollCall(store, _STARTS[-1], rank=dist.get_rank(), world_size=dist.get_world_size())
    )


def join_ranks(roll_call: RollCall) -> RankExchange | PresentRanks:
    """At the end of the first window, on all ranks: a group of all of them, or the ranks that are there.

    By then every rank that takes part has announced itself, so that nobody waits for one that does not.
    """
    if roll_call.all_meet():
        return RankExchange.make(rank=roll_call.rank, world_size=roll_call.world_size)
    return PresentRanks(roll_call)
