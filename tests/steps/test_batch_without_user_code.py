"""A batch is read from what it keeps, and nothing of the user's runs: a property may load, draw or augment."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.steps.batch import batch_counts, batch_signature, find_masks, has_tensors
from mfu_monitor.steps.totals import SignatureEntry

IDS = torch.zeros(2, 3, dtype=torch.long)
X = torch.zeros(4, 8)


class _RanError(BaseException):
    """Not an ``Exception``: nothing may swallow it."""


def ran(*_: Any, **__: Any) -> Any:
    raise _RanError


class Properties:
    shape = dtype = input_ids = labels = property(ran)

    def __init__(self) -> None:
        self.kept = X


class AnyAttribute:
    __getattr__ = ran


class Lazy(Mapping[str, Any]):
    __getitem__ = __iter__ = __len__ = ran


class OddList(list[Any]):
    __getitem__ = __iter__ = __len__ = ran


class OddDict(dict[Any, Any]):
    __getitem__ = __iter__ = __len__ = __eq__ = items = values = keys = get = ran  # type: ignore[assignment]
    __hash__ = ran


class OddKey:
    __eq__ = ran

    def __hash__(self) -> int:
        return 1


class OddClass:
    __class__ = property(ran)  # type: ignore[assignment]


class Slots:
    __slots__ = ("input_ids", "unset")

    def __init__(self) -> None:
        self.input_ids = IDS


@dataclasses.dataclass
class Fields:
    input_ids: torch.Tensor
    labels: torch.Tensor


def endless() -> Iterator[int]:
    ran()
    yield 0


Named = namedtuple("Named", "x input_ids")
cycle: dict[str, Any] = {"input_ids": IDS}
cycle["self"] = cycle


ODD = {
    "properties": Properties,
    "any attribute": AnyAttribute,
    "lazy mapping": Lazy,
    "list": lambda: OddList([X]),
    "dict": lambda: OddDict(x=X),
    "key": lambda: {OddKey(): X},
    "class": OddClass,
    "generator": endless,
    "map": lambda: map(ran, [1]),
    "module": lambda: sys,
    "type": lambda: OddClass,
    "function": lambda: ran,
    "set": lambda: {1, 2},
    "number": lambda: 10**5000,
    "cycle": lambda: cycle,
}
PLAIN = {
    "slots": Slots,
    "dataclass": lambda: Fields(IDS, IDS),
    "UserDict": lambda: UserDict(input_ids=IDS),
    "named tuple": lambda: Named(X, IDS),
    "dict": lambda: OddDict(input_ids=IDS),
    "tuple": lambda: ({"input_ids": IDS}, X),
}


@pytest.mark.parametrize("kind", ODD)
def test_nothing_of_the_users_runs(kind: str) -> None:
    batch: Any = ODD[kind]()  # type: ignore[operator]
    first = batch_signature(batch)
    assert hash(first) == hash(batch_signature(batch))
    batch_counts(batch)
    find_masks(batch)
    has_tensors(batch)


@pytest.mark.parametrize("kind", PLAIN)
def test_what_a_container_keeps_is_found(kind: str) -> None:
    counts = batch_counts(PLAIN[kind](), read_contents=False)  # type: ignore[operator]
    assert (counts.tokens, counts.samples) == (2 * 3, 2)


def test_work_of_another_shape_has_another_signature() -> None:
    for make in (Properties, lambda: OddList([X]), lambda: OddDict(x=X), lambda: np.zeros((2, 3))):
        other = make()
        assert batch_signature(make()) == batch_signature(other)
    wider = Properties()
    wider.kept = torch.zeros(4, 16)
    assert batch_signature(wider) != batch_signature(Properties())
    assert batch_signature(np.zeros((2, 3))) != batch_signature(np.zeros((2, 4)))


def test_a_count_that_missed_work_is_never_averaged_with_whole_ones() -> None:
    entry = SignatureEntry()
    whole, partial = StepRecord(), StepRecord(incomplete=True)
    for record in (whole, partial, whole, whole, whole):
        entry.add_record(record, is_provisional=False)
        assert len({entry.record and entry.record.is_lower_bound}) == 1
        assert not entry.has_varied
    assert (len(entry.recent), entry.label) == (3, "presumed")  # it was seen to miss work: never exact again
