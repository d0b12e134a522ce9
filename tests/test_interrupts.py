"""Ctrl-C at a line of ours in a counted step: it passes, and modes, patches and hooks are as before.

A sample of the lines in each run; all of them with ``make faults``.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mfu_monitor as mm
from mfu_monitor.formulas.registry import register_module_formula, unregister_module_formula

ROOT = str(Path(mm.__file__).parent)
CALL = CompiledFxGraph.__call__
SAMPLE = 120


class Opaque(nn.Linear):
    """A layer with a formula of its own."""


@pytest.fixture(autouse=True)
def formula() -> Iterator[None]:
    register_module_formula(Opaque)(lambda module, x: 2 * x.numel() * module.out_features)
    yield
    unregister_module_formula(Opaque)


class Interrupt:
    """A trace function that raises at the n-th line of ours."""

    def __init__(self, nth: int) -> None:
        self.nth, self.lines, self.at = nth, 0, ""

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return self
        if event == "line":
            self.lines += 1
            if self.lines == self.nth:
                self.at = f"{frame.f_code.co_filename[len(ROOT) + 1 :]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def left() -> list[str]:
    found = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    found += ["CompiledFxGraph"] if CompiledFxGraph.__call__ is not CALL else []
    return found + (["Opaque"] if "__call__" in vars(Opaque) else [])


def interrupted(nth: int) -> tuple[Interrupt, bool, list[str]]:
    """The interrupt, whether it passed, and what it left behind."""
    torch.manual_seed(0)
    model = nn.Sequential(Opaque(4, 4), nn.Linear(4, 4))
    monitor = mm.Monitor(model, log_every_n_steps=1, peak=1e12, console=False)
    interrupt, passed = Interrupt(nth), False
    sys.settrace(interrupt)
    try:
        with monitor.step(torch.ones(2, 4)):
            model(torch.ones(2, 4)).sum().backward()
    except KeyboardInterrupt:
        passed = True
    finally:
        sys.settrace(None)
    found = left()
    monitor.close()
    meters = [callback for callback in gc.callbacks if "GcPauseMeter" in repr(callback)]
    return interrupt, passed, [*found, *left(), *map(repr, meters)]


@pytest.mark.skipif(sys.gettrace() is not None, reason="another tool traces this process")
@pytest.mark.timeout(3600 if "MFU_MONITOR_ALL_FAULTS" in os.environ else 300)
def test_ctrl_c_at_a_line_of_ours_passes_and_leaves_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interrupted(10**9)  # what runs once per process is not part of the list
        total = interrupted(10**9)[0].lines
        assert total > 1000
        places = range(1, total + 1)
        if "MFU_MONITOR_ALL_FAULTS" not in os.environ:
            places = random.Random(0).sample(places, SAMPLE)  # type: ignore[assignment]
        faults = []
        for nth in places:
            interrupt, passed, found = interrupted(nth)
            if found or (interrupt.at and not passed):
                faults.append((interrupt.at, passed, found))
    assert not faults, "\n".join(map(repr, faults))
