"""The achievable peak: what is measured, what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware import bench as bench
from mfu_monitor.hardware.bench import bench_shapes, run_bench, write_report
from mfu_monitor.hardware.matmul_rate import ProductRate, Shape
from mfu_monitor.hardware.measure import cached_peak

RATES = {(8, 8, 8): 1e9, (16, 16, 16): 3e9, (8, 16, 32): 2e9}


@pytest.fixture
def given_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fixed rates instead of products; fp16 cannot run. Collects the seconds that each product was given."""
    given_s: list[float] = []

    def fake(device: object, precision: str, shape: Shape, *, seconds: float) -> ProductRate | None:
        given_s.append(seconds)
        factor = {"fp32": 1, "bf16": 2}.get(precision)
        return ProductRate(shape=shape, flops_per_s=RATES[shape] * factor, calls=5) if factor else None

    monkeypatch.setenv("MFU_MONITOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "product_rate", fake)
    monkeypatch.setattr(bench, "copy_rate", lambda device, seconds: 25e9)
    return given_s


def test_the_best_product_of_each_precision_is_kept_and_saved_for_later_runs(given_s: list[float]) -> None:
    report = run_bench("cpu", ["fp32", "bf16", "fp16"], seconds=9.0, shapes=tuple(RATES))
    best = {b.precision: b.best for b in report.precisions}
    assert best["bf16"] == ProductRate(shape=(16, 16, 16), flops_per_s=6e9, calls=5)
    assert best["fp16"] is None
    assert given_s == [1.0] * 9  # nine seconds over three precisions and three shapes
    saved = cached_peak("cpu", "bf16")
    assert saved is not None
    assert (saved.flops_per_s("bf16"), saved.bytes_per_s, saved.source) == (6e9, 25e9, "measured")
    assert cached_peak("cpu", "fp16") is None


@pytest.mark.usefixtures("given_s")
def test_progress_is_told_before_every_product() -> None:
    told: list[str] = []
    run_bench("cpu", ["fp32"], seconds=1.0, shapes=tuple(RATES), on_progress=told.append)
    assert told == ["fp32 8 x 8 x 8", "fp32 16 x 16 x 16", "fp32 8 x 16 x 32"]


@pytest.mark.usefixtures("given_s")
def test_the_report_is_plain_json_with_every_product(tmp_path: Path) -> None:
    report = run_bench("cpu", ["fp32", "fp16"], seconds=1.0, shapes=tuple(RATES))
    write_report(report, tmp_path / "new" / "bench.json")
    content = json.loads((tmp_path / "new" / "bench.json").read_text(encoding="utf-8"))
    assert content["bytes_per_s"] == 25e9
    assert content["precisions"]["fp32"]["flops_per_s"] == 3e9
    assert content["precisions"]["fp32"]["products"][2] == {"shape_m_k_n": [8, 16, 32], "flops_per_s": 2e9, "calls": 5}
    assert content["precisions"]["fp16"]["flops_per_s"] is None


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="seconds=-1"):
        run_bench("cpu", ["fp32"], seconds=-1)
    with pytest.raises(ConfigurationError, match="unknown precision 'fp33'"):
        run_bench("cpu", ["fp33"])
    with pytest.raises(ConfigurationError, match="cannot measure on 'toaster'"):
        run_bench("toaster")


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path, given_s: list[float]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    report = run_bench("cpu", ["fp32"], seconds=1.0, shapes=tuple(RATES))
    with pytest.raises(ConfigurationError, match=r"cannot write the report.*--output"):
        write_report(report, tmp_path / "file" / "bench.json")


def test_every_kind_of_device_has_several_shapes_squares_and_not() -> None:
    for device_type in ("cpu", "cuda"):
        shapes = bench_shapes(device_type)
        assert len(set(shapes)) == len(shapes) >= 6
        assert any(len(set(shape)) == 1 for shape in shapes)
        assert any(len(set(shape)) > 1 for shape in shapes)
