"""A perfect guest at every function and line: a sample of the faults in each run, all of them by ``make faults``."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mfu_monitor.formulas.registry import register_module_formula, unregister_module_formula

from .harness import Harness
from .loops import Opaque

IS_ALL = "MFU_MONITOR_ALL_FAULTS" in os.environ
PARTS = 16
SAMPLE = {
    ("plain", "error"): 150,
    ("plain", "interrupt"): 110,
    ("plain", "signal"): 80,
    ("lightning", "error"): 50,
    ("lightning", "interrupt"): 40,
    ("hugging_face", "error"): 40,
    ("hugging_face", "interrupt"): 30,
}
"""Five hundred points of some thirty thousand."""
ALL = [*SAMPLE, ("compiled", "error"), ("compiled", "interrupt")]
BEYOND = {"compiled": "plain"}
"""The same loop around compiled code: what it runs besides."""
CASES = [(*case, part) for part in range(PARTS) for case in ALL] if IS_ALL else [(*case, 0) for case in SAMPLE]

pytestmark = [
    pytest.mark.skipif(sys.gettrace() is not None, reason="another tool traces this process"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(3600 if IS_ALL else 300),
]


@pytest.fixture(autouse=True)
def formula() -> Iterator[None]:
    register_module_formula(Opaque)(lambda module, x: 2 * x.numel() * module.out_features)
    yield
    unregister_module_formula(Opaque)
    gc.unfreeze()


@pytest.mark.parametrize(("loop", "kind", "part"), CASES)
def test_a_fault_at_any_function_or_line_reaches_nobody_and_leaves_nothing(
    loop: str, kind: str, part: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    harness = Harness(tmp_path)
    points = harness.points(loop, kind, beyond=BEYOND.get(loop))
    assert len(points) > (100 if loop in BEYOND else 1000)
    points = points[part::PARTS] if IS_ALL else random.Random(0).sample(points, SAMPLE[loop, kind])
    struck, broken = 0, []
    for point in points:
        faults = harness.strike(point)
        struck += faults is not None
        broken += [f"{point}: {', '.join(faults)}"] if faults else []
    record_property("points", len(points))
    record_property("struck", struck)
    record_property("broken", len(broken))
    assert not broken, "\n".join(broken)
    assert struck > 0.9 * len(points)
