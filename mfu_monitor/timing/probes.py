"""Small meters for what slows a step without showing in its FLOPs. Read at window edges; none waits for the device."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import itemgetter, sub
from pathlib import Path
from typing import Any

import torch

from mfu_monitor.errors import ignored, must_pass
from mfu_monitor.hardware.nvml import NvmlReading, read_nvml

__all__ = ["GcPauseMeter", "TrainingProbes", "allocation_retries", "cpu_wait_s_by_thread"]


class GcPauseMeter:
    """Sums the time that Python's garbage collector holds the process, from ``gc.callbacks``.

    No line of Python runs at a collection: Ctrl-C and a signal handler's exception strike between two lines of Python,
    and what is raised within a callback of the collector is printed and lost. So the callback is put together from
    functions of C, which read the clock and sum up.

    Args:
        clock: seconds; of C where nothing may be lost.

    Example:
        >>> meter = GcPauseMeter()
        >>> meter.start(); train(); meter.stop()
        >>> meter.seconds, meter.collections
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: deque[float] = deque([0.0], maxlen=1)
        self._sums: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=1)
        ends, starts = iter(clock, None), iter(partial(itemgetter(0), self._began), None)
        sums = zip(accumulate(map(sub, ends, starts)), itertools.count(1), strict=False)
        # gc calls callback("start", info) and callback("stop", info): getattr of C, which reads one of two properties.
        edges = {
            "start": property(partial(next, map(self._began.append, iter(clock, None)))),
            "stop": property(partial(next, map(self._sums.append, sums))),
        }
        self._callback = partial(getattr, type("GcPauseMeterEdges", (), edges)())

    @property
    def seconds(self) -> float:
        """Spent so far."""
        return self._sums[0][0]

    @property
    def collections(self) -> int:
        """Collections so far."""
        return self._sums[0][1]

    def start(self) -> None:
        """Listen; a second call changes nothing."""
        if self._callback not in gc.callbacks:
            self._began.append(self._clock())  # a collection that runs now counts from here on
            gc.callbacks.append(self._callback)

    def stop(self) -> None:
        """Leave nothing behind; a second call changes nothing."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._callback)


def allocation_retries(device: torch.device | None) -> int | None:
    """Times that the CUDA caching allocator had to free its cache and ask again; None for another device.

    ``num_alloc_retries`` of ``torch.cuda.memory_stats``: host-side counters, no wait.
    """
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():
        return None
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries")
    return None if retries is None else int(retries)


def cpu_wait_s_by_thread(tasks: Path = Path("/proc/self/task")) -> dict[int, float] | None:
    """Seconds that each thread of this process was ready to run and had to wait for a CPU; None without the figures.

    Second field of ``schedstat``, in nanoseconds: https://docs.kernel.org/scheduler/sched-stats.html.
    """
    waits: dict[int, float] = {}
    try:
        threads = list(tasks.iterdir())
    except OSError as error:
        if must_pass(error):
            raise
        return None
    for thread in threads:
        with ignored(OSError, ValueError, IndexError):  # a thread may end while we read
            waits[int(thread.name)] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waits or None


class TrainingProbes:
    """All meters of a training process, read at the edge of each window.

    Args:
        device: the device that the run uses; the CUDA allocator and NVML are asked for a CUDA device only.
        read_device: gives the device's clock, temperature and throttle reasons.
        device_interval_s: NVML is asked at most this often, as one query takes about a millisecond.
        clock: host clock.

    Example:
        >>> probes = TrainingProbes(device=torch.device("cuda"))
        >>> probes.start()
        >>> window = dataclasses.replace(window, **probes.take())  # at the end of each window
        >>> probes.stop()
    """

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        read_device: Callable[[torch.device], NvmlReading | None] = read_nvml,
        device_interval_s: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device = device
        self._read_device = read_device
        self._interval_s = device_interval_s
        self._clock = clock
        self._gc = GcPauseMeter(clock)
        self._nvml: Any = None
        self._device_state: NvmlReading | None = None
        self._device_read_s: float | None = None
        self._before = self._counters()
        self._paused_at: dict[str, Any] | None = None

    def start(self) -> None:
        """Begin to measure; what happened before is left out."""
        self._gc.start()
        self._nvml = _hold_nvml(self._device)
        self.discard()

    def stop(self) -> None:
        """Remove the callback from ``gc.callbacks`` and let NVML go."""
        self._gc.stop()
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with ignored(Exception):
                nvml.nvmlShutdown()

    def discard(self) -> None:
        """Leave out all that was measured since the last reading: after a counted step."""
        self._before, self._paused_at = self._counters(), None

    def pause(self) -> None:
        """Leave out what comes from here on (validation, saving); a second call changes nothing."""
        if self._paused_at is None:
            self._paused_at = self._counters()

    def resume(self) -> None:
        """Measure again; nothing happens where there was no pause."""
        if self._paused_at is not None:
            now, paused_at, self._paused_at = self._counters(), self._paused_at, None
            self._before = {name: _shifted(self._before[name], paused_at[name], now[name]) for name in now}

    def take(self) -> dict[str, Any]:
        """What was measured since the last call, by ``StepWindow``'s names; what is unknown is absent."""
        before, now = self._before, self._paused_at or self._counters()
        self._before = now
        found: dict[str, Any] = {
            "gc_pause_s": now["gc_pause_s"] - before["gc_pause_s"],
            "allocation_retries": _difference(before["allocation_retries"], now["allocation_retries"]),
            "cpu_wait_s": _longest_wait_s(before["cpu_wait_s"], now["cpu_wait_s"]),
            **self._device_fields(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _counters(self) -> dict[str, Any]:
        return {
            "gc_pause_s": self._gc.seconds,
            "allocation_retries": allocation_retries(self._device),
            "cpu_wait_s": cpu_wait_s_by_thread(),
        }

    def _device_fields(self) -> dict[str, Any]:
        if self._device is None or self._device.type != "cuda":
            return {}
        now_s = self._clock()
        if self._device_read_s is None or now_s - self._device_read_s >= self._interval_s:
            self._device_state, self._device_read_s = self._read_device(self._device), now_s
        state = self._device_state
        if state is None:
            return {}
        return {
            "sm_clock_mhz": state.sm_clock_mhz,
            "temperature_c": state.temperature_c,
            "throttle_reasons": state.throttle_reasons,
        }


def _hold_nvml(device: torch.device | None) -> Any:
    """Keep NVML initialised (it counts its users), so that each reading need not load the driver's state again."""
    if device is None or device.type != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # no extra, no driver: the readings will say unknown
        if must_pass(error):
            raise
        return None
    return nvml


def _shifted(before: Any, paused_at: Any, now: Any) -> Any:
    """The counter, or the counters by thread, as if nothing had happened since ``paused_at``."""
    if before is None or paused_at is None or now is None:
        return now
    if isinstance(now, dict):
        return {name: value - paused_at.get(name, 0.0) + before.get(name, 0.0) for name, value in now.items()}
    return now - paused_at + before


def _difference(before: int | None, now: int | None) -> int | None:
    """Growth of a counter; None where it is unknown or was reset in between."""
    return None if before is None or now is None or now < before else now - before


def _longest_wait_s(before: dict[int, float] | None, now: dict[int, float] | None) -> float | None:
    """The wait of the thread that waited longest: the others wait for it at the next barrier, so waits do not add up.

    Threads that appeared in between count from their own start.
    """
    if before is None or now is None:
        return None
    return max((seconds - before.get(thread, 0.0) for thread, seconds in now.items()), default=None)
