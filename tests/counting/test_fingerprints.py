"""Fingerprints of operands: equal for equal ones, different for others, taken without waiting and without a trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.fingerprints import Marks, Print, batch_print
from mfu_monitor.counting.late_reads import read_late


def print_of(*operands: torch.Tensor) -> Print:
    marks = Marks()
    number = marks.mark(operands)
    assert number is not None
    prints = marks.settle()()
    assert prints is not None
    return prints[number]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_equal_operands_have_equal_prints_and_others_do_not(dtype: torch.dtype) -> None:
    x, w = noise(64, 128, dtype=dtype), noise(128, 32, seed=1, dtype=dtype)
    same = print_of(x, w)
    assert print_of(x.clone(), w.clone()) == same
    other_data, other_weight = print_of(noise(64, 128, seed=2, dtype=dtype), w), print_of(x, w + 1)
    assert other_data.rest == same.rest
    assert other_data.first != same.first
    assert other_weight.rest != same.rest
    assert other_weight.first == same.first


def test_rows_that_begin_alike_on_all_ranks_do_not_make_operands_equal() -> None:
    """Sequences of 64 tokens that begin with the same one: in every layer their first rows are equal."""
    mine, theirs = noise(64 * 64, 32), noise(64 * 64, 32, seed=1)
    theirs[::64] = mine[::64]
    assert print_of(mine, mine[:32]).first != print_of(theirs, mine[:32]).first


def test_the_layout_in_memory_does_not_matter() -> None:
    x = noise(48, 80)
    assert print_of(x.t().contiguous().t(), x) == print_of(x, x)


def test_a_sample_of_one_value_is_flat_and_a_bias_does_not_count() -> None:
    x, w = noise(8, 8), noise(8, 8, seed=1)
    assert print_of(torch.zeros(8, 8), w).is_flat
    assert not print_of(torch.zeros(8), x, w).is_flat
    assert print_of(torch.zeros(8), x, w) == print_of(torch.ones(8), x, w)


def test_what_has_no_contents_has_no_print() -> None:
    assert Marks().mark([torch.zeros(4, 4, device="meta")]) is None
    assert Marks().mark([]) is None
    assert batch_print([]) is None
    assert batch_print([torch.zeros(4, device="meta")]) is None


def test_batches_are_told_apart_by_one_token() -> None:
    ids = torch.arange(64).view(4, 16)
    other = ids.clone()
    other[3, 15] = 0
    reads = [batch_print([t, torch.ones(4)]) for t in (ids, ids.clone(), other)]
    prints = [read() for read in reads if read is not None]
    assert prints[0] == prints[1] != prints[2]


def test_a_value_on_a_device_is_read_once_its_event_says_so() -> None:
    class Event:
        has_come = False

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.has_come

    event = Event()
    has_come, host = read_late(torch.tensor(3), event_factory=lambda: event)
    assert not has_come()
    event.has_come = True
    assert has_come()
    assert int(host) == 3


def test_a_step_with_fingerprints_counts_draws_and_computes_the_same() -> None:
    model, x = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), noise(4, 16)

    def run(**options: Any) -> tuple[Any, list[torch.Tensor], Any]:
        model.zero_grad()
        with FlopCounter(model, **options) as counter:
            model(x).sum().backward()
        return counter.record, [p.grad.clone() for p in model.parameters()], counter.prints

    draws = torch.get_rng_state(), random.getstate()
    plain, gradients, none = run()
    record, with_prints, prints = run(fingerprints=True)
    assert none is None
    assert record == plain
    assert all(map(torch.equal, gradients, with_prints))
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    # Two products forward and three backward: the batch needs no gradient. Each is an entry of its own.
    assert prints is not None
    assert sorted(map(len, prints.calls.values())) == [1] * 5
    assert len(prints.units()) == 5


def test_work_that_nobody_sees_into_has_no_print() -> None:
    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    mm.register_module_formula(Opaque)(lambda module, *shapes, out_shape: 1000)
    model = nn.Sequential(nn.Linear(4, 4), Opaque())
    with FlopCounter(model, fingerprints=True) as counter, torch.no_grad():
        model(noise(2, 4))
    assert counter.prints is not None
    assert [None in numbers for numbers in counter.prints.calls.values()] == [False, True]
