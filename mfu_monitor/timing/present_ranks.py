"""Rows of the ranks that are there, through the default store: where some never came, or have ended before the others.

No group can be made, or used any more, that holds a rank which takes no part. The store needs none: each rank leaves
its row under a key and reads those of the others once they are there. It serves small worlds; in larger ones a rank
that is without the others reads itself alone.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from mfu_monitor.internals.rendezvous import all_ranks_come, decide_alone

__all__ = ["PresentRanks", "RollCall"]

_MOST_RANKS = 64
"""Every rank reads the rows of all others, so that what the store serves grows with the square of their number."""
_WAIT_WINDOWS = 3
"""Newer windows of this rank after which a row that has not come is left out."""
_KEPT_ROWS = 8
_PATIENCE_S = 10.0
"""For the other ranks to reach the end of the same window. They are there already, so this is for one that dies."""


class RollCall:
    """Which ranks have started the monitor, and which have ended: a few keys in the store, never waited for.

    Args:
        store: any ``torch.distributed`` store that all ranks share.
        name: of this start of training, the same on all ranks and used once.
        rank: this one, which is announced.
        world_size: ranks of the world.
    """

    def __init__(self, store: Any, name: str, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._name = name
        self._here: set[int] = {rank}
        store.set(f"{name}/here/{rank}", "yes")
        store.add(f"{name}/started", 1)

    def all_meet(self) -> bool:
        """At the end of the first window, on each rank: whether all ranks are there, decided alike on all of them.

        Costs two questions to the store where one has not started by now, and waits for nobody then.
        """
        if self._store.add(f"{self._name}/started", 0) < self.world_size:
            decide_alone(self._store, self._name)
        return all_ranks_come(self._store, self._name, world_size=self.world_size, patience_s=_PATIENCE_S)

    def leave(self, rows: int) -> None:
        """This rank has ended after so many rows."""
        self._store.set(f"{self._name}/ended/{self.rank}", str(rows))
        self._store.add(f"{self._name}/ends", 1)

    def come_back(self) -> None:
        """It goes on after all."""
        self._store.set(f"{self._name}/ended/{self.rank}", "no")

    @property
    def any_left(self) -> bool:
        """Whether some rank has ended."""
        return bool(self._store.add(f"{self._name}/ends", 0) > 0)

    def present(self, row: int) -> list[int]:
        """Ranks that have started and had not ended before this row, in order."""
        if self.world_size > _MOST_RANKS:
            return [self.rank]
        self._here |= {r for r in range(self.world_size) if r not in self._here and self._has(f"here/{r}")}
        return [r for r in sorted(self._here) if r == self.rank or not self._ended_before(r, row)]

    def _ended_before(self, rank: int, row: int) -> bool:
        if not self._has(f"ended/{rank}"):
            return False
        rows = self._store.get(f"{self._name}/ended/{rank}").decode()
        return rows.isdigit() and int(rows) <= row

    def _has(self, key: str) -> bool:
        return bool(self._store.check([f"{self._name}/{key}"]))

    def put(self, row: int, values: Sequence[int]) -> None:
        """Leave this rank's row."""
        self._store.set(f"{self._name}/row{row}/{self.rank}", ",".join(map(str, values)))
        with contextlib.suppress(Exception):  # not every store can delete; then its rows stay
            self._store.delete_key(f"{self._name}/row{row - _KEPT_ROWS}/{self.rank}")

    def take(self, row: int, rank: int) -> list[int] | None:
        """Another rank's row; None while it is not there."""
        if not self._has(f"row{row}/{rank}"):
            return None
        return [int(value) for value in self._store.get(f"{self._name}/row{row}/{rank}").decode().split(",")]


class PresentRanks:
    """The same as ``RankExchange`` for the ranks that are there: rows go out, and those of the present ones come back.

    Args:
        roll_call: which ranks are there.
        first: number of the first row.
    """

    takes_section = False

    def __init__(self, roll_call: RollCall, *, first: int = 0) -> None:
        self._roll_call = roll_call
        self._in_flight: deque[tuple[int, list[int]]] = deque()
        self._next = first

    @property
    def in_flight(self) -> int:
        """Rows sent whose answers have not come."""
        return len(self._in_flight)

    @property
    def sent(self) -> int:
        """Rows sent since the start of training."""
        return self._next

    def send(self, row: Sequence[int], section: Sequence[int] = ()) -> None:
        """Leave one window's row for the others."""
        self._roll_call.put(self._next, row)
        self._in_flight.append((self._next, list(row)))
        self._next += 1

    def received(self) -> list[dict[int, list[int]]]:
        """For each window that all present ranks have sent by now, oldest first: rows by rank. Never waits."""
        windows: list[dict[int, list[int]]] = []
        while self._in_flight:
            number, mine = self._in_flight[0]
            ranks = self._roll_call.present(number)
            rows = {r: mine if r == self._roll_call.rank else self._roll_call.take(number, r) for r in ranks}
            found = {rank: row for rank, row in rows.items() if row is not None}
            if len(found) < len(ranks) and len(self._in_flight) <= _WAIT_WINDOWS:
                break
            self._in_flight.popleft()
            windows.append(found)
        return windows
