"""A peak from SM count, clock and architecture: every row it can be checked on, and what it must refuse."""

from __future__ import annotations

import dataclasses

import pytest

from mfu_monitor.errors import PeakUnknownWarning
from mfu_monitor.hardware import derive as derive_module
from mfu_monitor.hardware.cpu import CpuDescription
from mfu_monitor.hardware.derive import derive_from_properties, derive_peak
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow, load_table

TOLERANCE = 0.03
# Rows that the derivation misses by more than 3%, and why. `None` as precision: it gives nothing at all.
EXPLAINED: dict[tuple[str, str | None], str] = {
    ("titan-v", "fp16"): "the vendor's page rounds 119 down to 110",
    ("a10", "fp64"): "the sheet's 1/32 of FP32, where every other 8.6 part has 1/64",
    ("a16", "fp64"): "the sheet's 1/32 of FP32",
    ("a2", "fp64"): "the sheet's 1/32 of FP32",
    ("h800-sxm5", "fp64"): "FP64 is capped for export",
    ("h800-pcie", "fp64"): "FP64 is capped for export",
    ("rx-7900-xt", "fp64"): "FP64 is no training precision on RDNA3 and is not derived",
    ("rx-7900-xtx", "fp64"): "FP64 is no training precision on RDNA3 and is not derived",
    **{
        (key, precision): "NVL cards rate tensor cores at 1545 of 1785 MHz, other Hopper parts at 0.92 of the maximum"
        for key in ("h100-nvl", "h200-nvl")
        for precision in ("tf32", "fp16", "bf16", "fp8", "int8")
    },
    ("h20", None): "capped for export: refused",
    ("h20-3e", None): "capped for export: refused",
    ("rtx-5090-d", None): "capped for export: refused",
    ("mi308x", None): "capped for export: refused",
    ("b100", None): "no clock is known",
    ("gb300", None): "no clock is known",
    ("gb10", None): "the 16-bit rate of 12.1 is contested and not published",
    ("mi50", None): "gfx906 is many products",
}


def device_of(row: PeakRow) -> DeviceProperties:
    return DeviceProperties(
        name=row.device_names[0],
        sm_count=row.sm_count,
        compute_capability=row.compute_capability,
        gcn_arch=row.gfx,
        clock_khz=int(row.boost_clock_mhz * 1000) if row.boost_clock_mhz else None,
    )


NVIDIA_AND_AMD = [row for row in load_table() if row.vendor in ("NVIDIA", "AMD")]


@pytest.mark.parametrize("row", NVIDIA_AND_AMD, ids=lambda row: row.key)
def test_the_derivation_reproduces_the_sheet_within_3_percent_or_the_reason_is_listed(row: PeakRow) -> None:
    peak, _ = derive_from_properties(device_of(row))
    if peak is None:
        assert (row.key, None) in EXPLAINED
        return
    for precision, sheet in row.flops_per_s_by_precision().items():
        derived = peak.flops_per_s(precision)
        agrees = derived is not None and abs(derived / sheet - 1) <= TOLERANCE
        assert agrees != ((row.key, precision) in EXPLAINED), (precision, derived, sheet)
    assert set(peak.flops_per_s_by_precision) <= set(row.flops_per_s_by_precision())


def test_no_explanation_is_left_over() -> None:
    keys = {row.key for row in NVIDIA_AND_AMD}
    assert {key for key, _ in EXPLAINED} <= keys


def test_a_laptop_part_is_derived_with_its_assumptions_in_the_source() -> None:
    # AD103 with 76 SMs at 2.010 GHz, GeForce: 256 FMA per clock and SM.
    laptop = DeviceProperties(
        name="NVIDIA GeForce RTX 4090 Laptop GPU", sm_count=76, compute_capability=(8, 9), clock_khz=2_010_000
    )
    peak = derive_peak(laptop)
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(76 * 2.010e9 * 256 * 2)
    assert peak.confidence == "low"
    for words in ("derived: 76 SMs x 2.010 GHz", "8.9", "half-rate FP32 accumulation", "laptop part depends"):
        assert words in peak.source


def test_a_full_rate_part_says_that_it_assumes_so() -> None:
    card = DeviceProperties(
        name="NVIDIA RTX 4500 Ada Generation", sm_count=60, compute_capability=(8, 9), clock_khz=2_580_000
    )
    peak = derive_peak(card)
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(60 * 2.58e9 * 512 * 2)
    assert "full-rate FP32 accumulation assumed" in peak.source


def test_an_unknown_hopper_is_not_rated_at_its_maximum_clock() -> None:
    card = DeviceProperties(name="NVIDIA H100 CNX", sm_count=114, compute_capability=(9, 0), clock_khz=1_755_000)
    peak = derive_peak(card)
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(114 * 1.755e9 * 0.92 * 2048 * 2)
    assert peak.flops_per_s("fp32") == pytest.approx(114 * 1.755e9 * 128 * 2)
    assert "0.92 of the maximum" in peak.source
    assert peak.max_clock_ratio == pytest.approx(1 / 0.92)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA H20-3e",
        "NVIDIA H20Z",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 D v2",
        "NVIDIA GeForce RTX 5080 D",
        "NVIDIA GeForce RTX 5090D",
        "NVIDIA GeForce RTX 5090DV2",
        "NVIDIA RTX PRO 6000D",
        "NVIDIA B30A",
        "NVIDIA RTX 5880 Ada Generation",
        "NVIDIA A10-24Q",
    ],
)
def test_capped_and_virtual_parts_are_never_derived(name: str) -> None:
    device = DeviceProperties(name=name, sm_count=78, compute_capability=(9, 0), clock_khz=1_980_000)
    peak, reason = derive_from_properties(device)
    assert peak is None
    assert "capped for export" in reason or "vGPU" in reason


@pytest.mark.parametrize(
    ("device", "capped"),
    [
        (DeviceProperties(name="NVIDIA H20B", sm_count=78, compute_capability=(9, 0), clock_khz=1_980_000), "H20"),
        (DeviceProperties(name="NVIDIA Graphics Device", sm_count=78, compute_capability=(9, 0), clock_khz=1), "H20"),
        (DeviceProperties(name="AMD Radeon Graphics", sm_count=80, gcn_arch="gfx942", clock_khz=2_100_000), "MI308X"),
    ],
)
def test_an_unknown_name_on_a_capped_parts_silicon_is_not_derived(device: DeviceProperties, capped: str) -> None:
    peak, reason = derive_from_properties(device)
    assert peak is None
    assert capped in reason
    assert "capped for export" in reason
    other = dataclasses.replace(device, sm_count=(device.sm_count or 0) + 2, clock_khz=2_000_000)
    assert derive_from_properties(other)[0] is not None


def test_a_d_variant_with_the_full_rate_is_derived() -> None:
    device = DeviceProperties(
        name="NVIDIA GeForce RTX 4090 D", sm_count=114, compute_capability=(8, 9), clock_khz=2_520_000
    )
    peak, _ = derive_from_properties(device)
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(147.1e12, rel=0.001)


@pytest.mark.parametrize(
    "device",
    [
        DeviceProperties(name="NVIDIA X", sm_count=10, compute_capability=(8, 9)),
        DeviceProperties(name="NVIDIA X", compute_capability=(8, 9), clock_khz=1_000_000),
        DeviceProperties(name="NVIDIA X", sm_count=10, compute_capability=(13, 0), clock_khz=1_000_000),
        DeviceProperties(name="AMD X", sm_count=10, gcn_arch="gfx9999", clock_khz=1_000_000),
        DeviceProperties(name="X"),
    ],
)
def test_nothing_is_derived_from_too_little(device: DeviceProperties) -> None:
    with pytest.warns(PeakUnknownWarning, match="nothing can be derived"):
        assert derive_peak(device) is None


def test_a_cpu_is_derived_as_the_upper_end_of_its_range_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = CpuDescription(
        model_name="Intel Xeon 8480+", vendor="GenuineIntel", flags=frozenset({"amx_bf16", "avx512f"}),
        cores=4, low_clock_hz=2.0e9, high_clock_hz=3.8e9,
    )  # fmt: skip
    monkeypatch.setattr(derive_module, "read_cpu", lambda: cpu)
    peak = derive_peak("cpu")
    assert peak is not None
    assert peak.flops_per_s("fp32") == pytest.approx(4 * 3.8e9 * 64)
    assert peak.confidence == "low"
    assert "range that starts at" in peak.notes[0]


def test_a_cpu_whose_boost_clock_is_unknown_is_not_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nominal clock of a virtual machine gave 116% of "peak" on a real one."""
    cpu = CpuDescription(vendor="AuthenticAMD", flags=frozenset({"avx512_bf16"}), cores=2, low_clock_hz=2.6e9)
    monkeypatch.setattr(derive_module, "read_cpu", lambda: cpu)
    with pytest.warns(PeakUnknownWarning, match="boost clock"):
        assert derive_peak("cpu") is None
