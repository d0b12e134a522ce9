"""DevicePeak, the weighted peak and the world's peak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.device_peak import DevicePeak, weighted_flops_per_s, world_peak_flops_per_s

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def _restore_matmul_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def peak_of(name: str) -> DevicePeak:
    peak = device_peak(name)
    assert peak is not None
    return peak


@pytest.mark.parametrize(
    ("name", "bf16_tflops"),
    [
        (H100, 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71.2),
        ("NVIDIA RTX A6000", 154.8),
    ],
)
def test_bf16_peaks_are_dense_with_fp32_accumulation(name: str, bf16_tflops: float) -> None:
    assert peak_of(name).flops_per_s(torch.bfloat16) == pytest.approx(bf16_tflops * 1e12)
    assert peak_of(name).flops_per_s("bf16") == pytest.approx(bf16_tflops * 1e12)


@pytest.mark.parametrize(("setting", "tflops"), [("highest", 67), ("high", 494.7)])
def test_float32_on_an_h100_is_fp32_or_tf32_by_torchs_setting_at_that_moment(setting: str, tflops: float) -> None:
    torch.set_float32_matmul_precision(setting)
    assert peak_of(H100).flops_per_s(torch.float32) == pytest.approx(tflops * 1e12, rel=0.002)


def test_the_strings_fp32_and_tf32_are_literal() -> None:
    torch.set_float32_matmul_precision("high")
    assert peak_of(H100).flops_per_s("fp32") == pytest.approx(66.9e12)
    torch.set_float32_matmul_precision("highest")
    assert peak_of(H100).flops_per_s("tf32") == pytest.approx(494.7e12)


def test_a_part_without_tf32_stays_at_fp32() -> None:
    torch.set_float32_matmul_precision("high")
    assert peak_of("AMD Instinct MI355X").flops_per_s(torch.float32) == pytest.approx(157.3e12)
    assert peak_of("Tesla T4").flops_per_s(torch.float32) == pytest.approx(8.1e12)


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA GeForce RTX 2080 Ti"])
def test_a_part_without_a_bf16_unit_has_no_bf16_peak_and_says_why(name: str) -> None:
    peak = peak_of(name)
    assert peak.flops_per_s(torch.bfloat16) is None
    assert peak.ridge_point(torch.bfloat16) is None
    reason = peak.missing_reason(torch.bfloat16)
    assert reason is not None
    assert "no bf16 unit" in reason
    assert "needs 8.0" in reason
    assert peak.missing_reason(torch.float16) is None


def test_a_dtype_without_products_has_no_peak() -> None:
    assert peak_of(H100).flops_per_s(torch.int64) is None
    assert "no precision" in str(peak_of(H100).missing_reason(torch.int64))


def test_the_ridge_point_is_flops_over_bytes() -> None:
    # 989.4e12 / 3.35e12 and 1978.9e12 / 3.35e12
    assert peak_of(H100).ridge_point("bf16") == pytest.approx(295.34, abs=0.01)
    assert peak_of(H100).ridge_point("fp8") == pytest.approx(590.72, abs=0.01)
    assert DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": 1e12}).ridge_point("bf16") is None


def test_the_sparse_figure_and_the_clock_ratio_are_there_for_diagnosis() -> None:
    peak = peak_of(H100)
    assert peak.is_dense
    assert peak.sparse_flops_per_s("bf16") == pytest.approx(2 * 989.4e12)
    assert peak.sparse_flops_per_s("fp32") is None
    assert peak.max_clock_ratio == pytest.approx(1980 / 1830)


def test_the_weighted_peak_is_harmonic() -> None:
    # 0.7 / 1979 + 0.3 / 989.5 = 0.000656898 per TFLOP/s; the arithmetic mean would say 1682.
    peaks = {"fp8": 1979e12, "bf16": 989.5e12}
    assert weighted_flops_per_s({"fp8": 0.7, "bf16": 0.3}, peaks) == pytest.approx(1522e12, rel=5e-4)
    assert weighted_flops_per_s({"bf16": 5.0, "fp8": 0.0}, peaks) == pytest.approx(989.5e12)


def test_the_weighted_peak_is_unknown_where_a_part_of_it_is() -> None:
    assert weighted_flops_per_s({"fp8": 0.7, "bf16": 0.3}, {"bf16": 989.5e12}) is None
    assert weighted_flops_per_s({}, {"bf16": 989.5e12}) is None
    assert peak_of(H100).weighted_flops_per_s({"bf16": 0.7, "fp4": 0.3}) is None


@given(
    st.dictionaries(st.sampled_from(["fp32", "bf16", "fp8"]), st.floats(1e3, 1e18), min_size=1),
    st.fixed_dictionaries({p: st.floats(1e9, 1e16) for p in ("fp32", "bf16", "fp8")}),
)
def test_the_weighted_peak_lies_between_the_peaks_it_mixes(flops: dict[str, float], peaks: dict[str, float]) -> None:
    weighted = weighted_flops_per_s(flops, peaks)
    used = [peaks[p] for p in flops]
    assert weighted is not None
    assert min(used) * (1 - 1e-9) <= weighted <= max(used) * (1 + 1e-9)


def test_the_worlds_peak_is_the_sum_of_each_ranks_own_or_unknown() -> None:
    assert world_peak_flops_per_s([989.4e12, 989.4e12, 756.5e12]) == pytest.approx(2735.3e12)
    assert world_peak_flops_per_s([989.4e12, None]) is None
    assert world_peak_flops_per_s([989.4e12, 0.0]) is None
    assert world_peak_flops_per_s([]) is None
