"""How well alerts detect and name: synthetic series with known truth, and faults injected into real Lightning runs.

Run with ``make bench-alerts``; the figures of docs/alerts.md come from here.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mfu_monitor.alerts import Alert, AlertConfig, AlertDetector
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

PEAK = 1e14
FLOPS_PER_STEP = 10**12
STEPS = 10


def reading(index: int, mfu: float) -> UtilizationReading:
    """One window of a synthetic series: ten steps, with parts of the step in fixed proportion."""
    elapsed_s = STEPS * FLOPS_PER_STEP / (mfu * PEAK)
    parts = {"data_wait_s": 0.02, "forward_s": 0.3, "backward_s": 0.6, "optimizer_s": 0.05, "other_s": 0.03}
    seconds: dict[str, Any] = {name: share * elapsed_s for name, share in parts.items()}
    window = StepWindow(
        first_step=index * STEPS + 1,
        last_step=index * STEPS + STEPS,
        steps=STEPS,
        elapsed_s=elapsed_s,
        wall_s=elapsed_s,
        model_flops=STEPS * FLOPS_PER_STEP,
        hardware_flops=STEPS * FLOPS_PER_STEP,
        **seconds,
    )
    return UtilizationReading(window=window, mfu=mfu, precision="bf16", peak_flops_per_s=PEAK)


def healthy_series(rng: random.Random, windows: int) -> Iterator[float]:
    """MFU with noise (0.5% to 2.5%), lone spikes (1% of windows, 20% to 70% deep) and periodic dips.

    Dips last one or two windows, are 15% to 60% deep and come every 30 to 120 windows: an epoch's start.
    """
    level, sigma = rng.uniform(0.1, 0.6), rng.uniform(0.005, 0.025)
    period, length, depth = rng.randint(30, 120), rng.randint(1, 2), rng.uniform(0.15, 0.6)
    phase = rng.randrange(period)
    for index in range(windows):
        mfu = level * (1 + rng.gauss(0.0, sigma))
        if rng.random() < 0.01:
            mfu *= 1 - rng.uniform(0.2, 0.7)
        if (index + phase) % period < length:
            mfu *= 1 - depth
        yield mfu


def noisy_series(rng: random.Random, windows: int, sigma: float, correlation: float) -> list[float]:
    """Noise of a given size that may remember its past (autoregressive), and lone spikes in 1% of windows."""
    level, noise, levels = rng.uniform(0.1, 0.6), 0.0, []
    for _ in range(windows):
        noise = correlation * noise + rng.gauss(0.0, sigma * (1 - correlation**2) ** 0.5)
        spike = 1 - rng.uniform(0.2, 0.7) if rng.random() < 0.01 else 1.0
        levels.append(max(0.01, level * (1 + noise) * spike))
    return levels


def notices(series: Iterable[float]) -> list[tuple[int, Alert]]:
    """What the detector says, each with the window that led to it."""
    detector = AlertDetector()
    return [(index, alert) for index, mfu in enumerate(series) for alert in detector.update(reading(index, mfu))]


def false_alerts(series: int, windows: int, seed: int) -> int:
    rng = random.Random(seed)
    return sum(len(notices(healthy_series(rng, windows))) for _ in range(series))


def step_drop_delays(series: int, seed: int) -> list[int | None]:
    """Windows from a 10% step drop to its alert; None where there was none, or one before the drop."""
    rng, delays = random.Random(seed), []
    for _ in range(series):
        at = rng.randrange(60, 300)
        levels = [mfu * (0.9 if index >= at else 1.0) for index, mfu in enumerate(healthy_series(rng, at + 100))]
        found = [index for index, alert in notices(levels) if alert.kind == "drop"]
        delays.append(found[0] - at + 1 if found and found[0] >= at else None)
    return delays


def sag_kinds(series: int, windows: int, seed: int) -> list[tuple[str, ...]]:
    """Kinds of all alerts over a linear sag of 10% in so many windows, and 300 windows after it."""
    rng, kinds = random.Random(seed), []
    for _ in range(series):
        levels = healthy_series(rng, windows + 400)
        sagging = [mfu * (1 - 0.1 * min(1.0, max(0.0, (k - 100) / windows))) for k, mfu in enumerate(levels)]
        kinds.append(tuple(alert.kind for _, alert in notices(sagging)))
    return kinds


def report_synthetic(console: Console, series: int, seed: int) -> bool:
    """Print the acceptance figures; whether all hold."""
    start_s = time.perf_counter()
    false = false_alerts(series, 2000, seed)
    update_s = (time.perf_counter() - start_s) / (series * 2000)
    delays = step_drop_delays(series, seed + 1)
    limit = AlertConfig().sustain + 2
    found = sum(delay is not None and delay <= limit for delay in delays) / series
    known = [delay for delay in delays if delay is not None]
    table = Table(title=f"Synthetic series, seed {seed}")
    for column in ("claim", "measured", "wanted"):
        table.add_column(column)
    table.add_row(f"false alerts in {series} healthy series of 2,000 windows", str(false), "at most 1")
    table.add_row(f"10% step drop reported within sustain + 2 = {limit} windows", f"{found:.1%}", "99%")
    table.add_row("median and longest delay of a step drop", f"{statistics.median(known):g}, {max(known)} windows", "")
    holds = false <= 1 and found >= 0.99
    for windows in (200, 2000):
        kinds = sag_kinds(max(1, series // 5), windows, seed + 2)
        once = sum(kind == ("sag",) for kind in kinds) / len(kinds)
        holds &= once >= 0.99
        table.add_row(f"linear 10% sag over {windows} windows told once, as a sag", f"{once:.1%}", "once")
    table.add_row("time of one update", f"{update_s * 1e6:.0f} us", "")
    console.print(table)
    return holds


def report_noise(console: Console, seed: int) -> None:
    """Print what more noise than the acceptance series have does to false alerts and to the delay of a 10% drop."""
    table = Table(title=f"More noise, seed {seed}: 50 series of 2,000 windows, 100 step drops of 10%")
    for column in ("noise", "correlation", "false alerts per 10,000 windows", "told in 8 windows", "median delay"):
        table.add_column(column)
    for correlation in (0.0, 0.8):
        for sigma in (0.01, 0.02, 0.03, 0.05):
            rng = random.Random(seed)
            false = sum(
                alert.kind != "recovery"
                for _ in range(50)
                for _, alert in notices(noisy_series(rng, 2000, sigma, correlation))
            )
            delays = [_delay(noisy_series(rng, 260, sigma, correlation), at=120) for _ in range(100)]
            told = sum(delay <= 8 for delay in delays) / len(delays)
            cells = (
                f"{sigma:.0%}",
                f"{correlation}",
                f"{false / 10:.1f}",
                f"{told:.0%}",
                f"{statistics.median(delays):g}",
            )
            table.add_row(*cells)
    console.print(table)


def _delay(levels: Sequence[float], at: int) -> float:
    dropped = [mfu * (0.9 if index >= at else 1.0) for index, mfu in enumerate(levels)]
    found = [index for index, alert in notices(dropped) if alert.kind in ("drop", "sag") and index >= at]
    return found[0] - at + 1 if found else float("inf")


WANTED = {0.05: 0.95, 0.10: 0.95, 0.20: 0.90, 0.30: 0.80}
"""Noise of a window -> share of drops to be told within ``3 * sustain`` windows."""
DROPS = (0.30, 0.50, 0.80)
HEALTHY_WINDOWS = 1000


def power_bound(noise: float, drop: float) -> float:
    """What no test can do better: level and noise known, the sum of ``3 * sustain`` windows, one test in so many.

    The threshold is that of one false alert in 1,000 runs: z of 0.001 * 18 / 1,000.
    """
    windows = 3 * AlertConfig().sustain
    normal = statistics.NormalDist()
    z = -normal.inv_cdf(0.001 * windows / HEALTHY_WINDOWS)
    return normal.cdf((drop * windows**0.5 / noise - z) / (1 - drop))


def share_told(noise: float, drop: float, series: int, seed: int) -> float:
    """Share of drops, after a full baseline, that are told within ``3 * sustain`` windows and not before."""
    rng, told, within = random.Random(seed), 0, 3 * AlertConfig().sustain
    for _ in range(series):
        at = rng.randrange(260, 400)
        levels = noisy_series(rng, at + within, noise, 0.0)
        dropped = [mfu * (1 - drop if index >= at else 1.0) for index, mfu in enumerate(levels)]
        losses = [index for index, alert in notices(dropped) if alert.kind in ("drop", "sag")]
        told += bool(losses) and losses[0] >= at
    return told / series


def runs_with_false_alerts(noise: float, runs: int, seed: int) -> int:
    rng = random.Random(seed)
    return sum(
        any(alert.kind != "recovery" for _, alert in notices(noisy_series(rng, HEALTHY_WINDOWS, noise, 0.0)))
        for _ in range(runs)
    )


def irregular_delay(noise: float, seed: int) -> float:
    """Windows until five of each eight windows, 1.6 to 5 times slower at random, are told."""
    rng = random.Random(seed)
    levels = noisy_series(rng, 260 + 12 * 8, noise, 0.0)
    for start in range(260, len(levels), 8):
        for index in rng.sample(range(start, start + 8), 5):
            levels[index] /= rng.uniform(1.6, 5.0)
    losses = [index for index, alert in notices(levels) if alert.kind in ("drop", "sag")]
    return losses[0] - 259 if losses and losses[0] >= 260 else float("inf")


def hidden_part_delay(noise: float, seed: int) -> float:
    """Windows until a wait for data of 24 ms instead of 0.2 ms, in a step of 180 ms, is told by its own name."""
    rng, detector = random.Random(seed), AlertDetector()
    levels = noisy_series(rng, 350, noise, 0.0)
    usual = statistics.median(levels)
    for index, level in enumerate(levels):
        rest_s = 0.18 * STEPS / max(0.2, level / usual)
        wait_s = STEPS * rng.uniform(0.9, 1.1) * (0.024 if index >= 260 else 0.0002)
        window = StepWindow(
            first_step=index * STEPS + 1,
            last_step=index * STEPS + STEPS,
            steps=STEPS,
            elapsed_s=rest_s + wait_s,
            wall_s=rest_s + wait_s,
            model_flops=STEPS * FLOPS_PER_STEP,
            data_wait_s=wait_s,
            forward_s=0.4 * rest_s,
            backward_s=0.6 * rest_s,
        )
        mfu = STEPS * FLOPS_PER_STEP / ((rest_s + wait_s) * PEAK)
        found = detector.update(UtilizationReading(window=window, mfu=mfu, precision="bf16", peak_flops_per_s=PEAK))
        if any("waiting for data" in alert.message.lower() for alert in found) and index >= 260:
            return index - 259
    return float("inf")


def report_collapse(console: Console, seed: int, runs: int) -> bool:
    """Print what is told at each noise, beside the bound that the noise sets; whether all that is wanted holds."""
    series = max(1, runs // 5)
    table = Table(title=f"Collapses within 3 x sustain windows, seed {seed}: {series} series each, {runs} healthy runs")
    for column in ("noise", *(f"-{drop:.0%} (bound)" for drop in DROPS), "wanted", "runs with a false alert"):
        table.add_column(column)
    table.add_column("5 of 8 slow, longest delay")
    table.add_column("hidden data wait, longest delay")
    holds = True
    for noise, wanted in WANTED.items():
        told = [share_told(noise, drop, series, seed) for drop in DROPS]
        false = runs_with_false_alerts(noise, runs, seed)
        slow = max(irregular_delay(noise, seed + k) for k in range(max(1, series // 5)))
        hidden = max(hidden_part_delay(noise, seed + k) for k in range(max(1, series // 5)))
        bounds = [power_bound(noise, drop) for drop in DROPS]
        holds &= all(share >= wanted for share, bound in zip(told, bounds, strict=True) if bound >= wanted)
        holds &= false <= 1 and slow <= 2 * AlertConfig().long_windows
        shares = (f"{share:.1%} ({bound:.1%})" for share, bound in zip(told, bounds, strict=True))
        table.add_row(f"{noise:.0%}", *shares, f"{wanted:.0%}", str(false), f"{slow:g}", f"{hidden:g}")
    console.print(table)
    return holds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=1000, help="synthetic series; 0 leaves them out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="injected faults by name; none: leave them out")
    parser.add_argument("--attempts", type=int, default=3, help="runs of a fault until it is named right")
    parser.add_argument("--collapse-seeds", type=int, default=3, help="seeds of the table of collapses; 0: none")
    parser.add_argument("--noise", action="store_true", help="also measure noisier series")
    options = parser.parse_args(arguments)
    console = Console(width=150)
    holds = report_synthetic(console, options.series, options.seed) if options.series else True
    for seed in range(options.seed, options.seed + options.collapse_seeds):
        holds &= report_collapse(console, seed, options.series or 1000)
    if options.noise:
        report_noise(console, options.seed)
    if options.only is None or options.only:
        from injected_faults import report_injected

        holds &= report_injected(console, options.only, options.attempts)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
