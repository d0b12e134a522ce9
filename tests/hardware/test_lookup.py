"""From a device to its row: every trap of device names, and what must not match."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.hardware.lookup import find_row, parse_name, rows_by_name
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow, load_table

ROWS = load_table()
GIB = 2**30


def device_of(row: PeakRow, name: str) -> DeviceProperties:
    """The device that the row describes, under one of its names."""
    return DeviceProperties(
        name=name,
        sm_count=row.sm_count,
        compute_capability=row.compute_capability,
        gcn_arch=row.gfx,
        memory_bytes=int(row.memory_gb * GIB) if row.memory_gb else None,
        clock_khz=int(row.boost_clock_mhz * 1000) if row.boost_clock_mhz else None,
    )


def key_of(name: str, **properties: object) -> str | None:
    row = find_row(dataclasses.replace(DeviceProperties(name=name), **properties)).row  # type: ignore[arg-type]
    return row.key if row is not None else None


def test_every_row_is_found_by_each_of_its_names_and_by_no_other_rows_name() -> None:
    """All names crossed with all rows: a second match fails."""
    for row in ROWS:
        for name in row.device_names:
            assert row in rows_by_name(name), name
            match = find_row(device_of(row, name))
            if row.flops_per_s_by_precision():
                assert match.row == row, (name, match.reason)
                assert match.sm_ratio == 1.0
            for other in rows_by_name(name):
                assert name in other.device_names, f"{name!r} also finds {other.key}"


@pytest.mark.parametrize(
    "row", [row for row in ROWS if len(rows_by_name(row.device_names[0])) == 1], ids=lambda r: r.key
)
def test_a_name_of_one_row_needs_nothing_but_the_name(row: PeakRow) -> None:
    for name in row.device_names:
        if len(rows_by_name(name)) > 1 or not row.flops_per_s_by_precision():
            continue
        assert find_row(DeviceProperties(name=name)).row == row


LOOK_ALIKES = [
    "NVIDIA A100X",
    "NVIDIA A1000",
    "NVIDIA RTX A1000",
    "NVIDIA RTX A2000 12GB",
    "NVIDIA RTX A3000 Laptop GPU",
    "NVIDIA RTX A400",
    "NVIDIA RTX A40",
    "NVIDIA A10M",
    "NVIDIA A2 PCIe",
    "NVIDIA A30X",
    "NVIDIA L40G",
    "NVIDIA L4 24GB",
    "NVIDIA L2",
    "NVIDIA H100 CNX",
    "NVIDIA H100 80GB",
    "NVIDIA H200 PCIe",
    "NVIDIA H20 NVL16",
    "NVIDIA GH200",
    "NVIDIA GB200 NVL72",
    "NVIDIA B20",
    "NVIDIA B300A",
    "NVIDIA T400 4GB",
    "NVIDIA T4G",
    "Quadro T1000",
    "Quadro P1000",
    "Tesla V100-FHHL-16GB",
    "Tesla V100-SXM3-32GB",
    "Tesla V100-DGXS-32GB",
    "NVIDIA RTX 6000",
    "NVIDIA RTX PRO 6000",
    "Quadro RTX 6000 with Max-Q Design",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4080 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D v2",
    "NVIDIA GeForce RTX 5090DV2",
    "NVIDIA RTX PRO 6000D",
    "NVIDIA RTX 6000D",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 D",
    "NVIDIA GeForce RTX 3070 Ti Laptop GPU",
    "NVIDIA GeForce RTX 2080",
    "NVIDIA GeForce RTX 2080 SUPER",
    "NVIDIA GeForce GTX 1080",
    "NVIDIA GeForce RTX 4070 Ti D",
    "NVIDIA TITAN Xp",
    "AMD Radeon RX 7900 GRE",
    "AMD Instinct MI300",
    "AMD Instinct MI250 X",
    "AMD Instinct MI355",
    "AMD Instinct MI60",
    "TPU v5 pod",
    "TPU",
    "Apple M1 Max Pro",
    "Ascend910B",
    "Intel(R) Data Center GPU Max 1100",
    "GAUDI",
    "NVIDIA Graphics Device",
    "CocoNut 9000",
    "",
]


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_matches_nothing(name: str) -> None:
    assert len(LOOK_ALIKES) >= 40
    match = find_row(DeviceProperties(name=name))
    assert match.row is None
    assert match.reason


# Trap 1: substrings.
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A4000", "rtx-a4000"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H20-3e", "h20-3e"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("Tesla T4", "t4"),
        ("Tesla V100S-PCIE-32GB", "v100s-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090-d"),
        ("NVIDIA GeForce RTX 4090D", "rtx-4090-d"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 5090 D", "rtx-5090-d"),
        ("AMD Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5 lite", "tpu-v5e"),
        # Trap 2: the four 6000s.
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-bw-ws"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-bw-maxq"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-bw-server"),
        # Traps 3 and 4: H100, H200.
        ("NVIDIA H100 80GB HBM3", "h100-sxm5"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        # Trap 5: word orders and old drivers.
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("NVIDIA A100-SXM-64GB", "a100-sxm-64gb"),
        ("NVIDIA Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("  nvidia   a100-sxm4-80gb ", "a100-sxm4-80gb"),
        # Traps 6 and 7: the number is CPU memory; driver names.
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300 NVL", "gb300"),
        # Trap 10: AMD suffixes.
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("AMD Instinct MI300X HF", "mi300x"),
        ("AMD Instinct MI325X OAM", "mi325x"),
        ("AMD Instinct MI300A", "mi300a"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
        ("AMD Instinct MI250", "mi250-gcd"),
    ],
)
def test_a_name_finds_its_own_row_and_not_one_it_contains(name: str, key: str) -> None:
    assert key_of(name) == key


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM2e", "NVIDIA H100"])
def test_the_ambiguous_h100_is_told_by_its_sm_count_or_not_at_all(name: str) -> None:
    assert key_of(name, sm_count=114) == "h100-pcie"
    assert key_of(name, sm_count=132) == "h100-sxm5-hbm2e"
    unknown = find_row(DeviceProperties(name=name))
    assert unknown.row is None
    assert "shared by different parts" in unknown.reason
    assert "114 SMs" in unknown.reason
    assert "132 SMs" in unknown.reason


def test_leonardos_a100_has_more_sms_than_any_other() -> None:
    assert key_of("NVIDIA A100-SXM-64GB", sm_count=124, compute_capability=(8, 0)) == "a100-sxm-64gb"
    match = find_row(DeviceProperties(name="NVIDIA A100-SXM4-80GB", sm_count=124))
    assert match.sm_ratio == pytest.approx(124 / 108)
    assert "124 SMs where A100 SXM4 80GB has 108" in match.notes[0]


# Trap 8: MIG and vGPU.
def test_a_mig_slice_is_its_parent_scaled_by_sms_and_says_so() -> None:
    match = find_row(DeviceProperties(name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", sm_count=14, compute_capability=(8, 0)))
    assert match.row is not None
    assert match.row.key == "a100-sxm4-80gb"
    assert match.sm_ratio == pytest.approx(14 / 108)
    assert match.mig_profile == "1G.10GB"
    assert "MIG slice" in match.notes[0]


@pytest.mark.parametrize(
    ("name", "sms", "whole"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 16, 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 26, 132),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", 32, 132),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 132),
        ("NVIDIA H200 MIG 1g.18gb", 16, 132),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 108),
        ("NVIDIA A30 MIG 2g.12gb", 28, 56),
    ],
)
def test_a_mig_slice_is_known_by_its_profile_where_the_driver_gives_no_sms(name: str, sms: int, whole: int) -> None:
    match = find_row(DeviceProperties(name=name))
    assert match.row is not None
    assert match.sm_ratio == pytest.approx(sms / whole)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG",
        "NVIDIA H100 80GB HBM3 MIG 5g.20gb",
        "NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb",
        "NVIDIA B200 MIG 1g.23gb",
    ],
)
def test_a_mig_slice_of_unknown_size_has_no_peak(name: str) -> None:
    match = find_row(DeviceProperties(name=name))
    assert match.row is None
    assert "SM count is not known" in match.reason


@pytest.mark.parametrize(
    "name", ["GRID A100-40C", "NVIDIA A10-24Q", "NVIDIA A16-4A", "NVIDIA L40S-48Q", "GRID V100DX-32Q", "NVIDIA A40-8B"]
)
def test_a_vgpu_profile_has_no_peak(name: str) -> None:
    match = find_row(DeviceProperties(name=name, sm_count=72))
    assert match.row is None
    assert "vGPU" in match.reason


# Trap 9: same name, different silicon.
@pytest.mark.parametrize(
    ("name", "properties", "key"),
    [
        ("NVIDIA GeForce RTX 3080", {"sm_count": 68}, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", {"sm_count": 70}, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3080", {}, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 2080 Ti", {"sm_count": 68, "clock_khz": 1_545_000}, "rtx-2080-ti"),
        ("NVIDIA GeForce RTX 2080 Ti", {"sm_count": 68, "clock_khz": 1_635_000}, "rtx-2080-ti-fe"),
        ("NVIDIA GeForce RTX 2080 Ti", {"sm_count": 68, "clock_khz": 1_710_000}, "rtx-2080-ti"),  # a partner's card
        ("NVIDIA GeForce RTX 2080 Ti", {}, "rtx-2080-ti"),
        ("AMD Instinct MI250X / MI250", {"sm_count": 104, "gcn_arch": "gfx90a"}, "mi250-gcd"),
        ("AMD Instinct MI250X / MI250", {"sm_count": 110, "gcn_arch": "gfx90a"}, "mi250x-gcd"),
        ("AMD Instinct MI250X / MI250", {}, None),
        ("Intel(R) Data Center GPU Max 1550", {"sm_count": 64}, "max-1550-tile"),
        ("Intel(R) Data Center GPU Max 1550", {"sm_count": 128}, "max-1550-card"),
        ("Intel(R) Data Center GPU Max 1550", {"sm_count": 56, "memory_bytes": 64 * GIB}, "max-1550-tile"),
        ("Intel(R) Data Center GPU Max 1550", {}, None),
    ],
)
def test_parts_that_share_a_name_are_told_apart_by_silicon(
    name: str, properties: dict[str, object], key: str | None
) -> None:
    assert key_of(name, **properties) == key


# Trap 10: AMD without a table of names, and partitions.
@pytest.mark.parametrize(
    ("gcn_arch", "sm_count", "memory_gib", "clock_khz", "key"),
    [
        ("gfx942", 304, 192, None, "mi300x"),
        ("gfx942", 304, 256, None, "mi325x"),
        ("gfx942", 228, 128, None, "mi300a"),
        ("gfx942", 80, 192, None, None),  # MI308X: no figure is published
        ("gfx942", 304, None, None, None),
        ("gfx950", 256, 288, 2_200_000, "mi350x"),
        ("gfx950", 256, 288, 2_400_000, "mi355x"),
        ("gfx950", 256, 288, None, None),
        ("gfx90a", 110, 64, None, "mi250x-gcd"),
        ("gfx90a", 104, 64, None, "mi210"),  # one GCD of an MI250 has the same figures
        ("gfx908", 120, 32, None, "mi100"),
        ("gfx1100", 96, 24, None, None),  # also a W7900, at another clock
        ("gfx906", 60, 16, None, None),  # also a Radeon VII
    ],
)
@pytest.mark.parametrize("name", ["", "AMD Radeon Graphics", "AMD Instinct", "0x74a1"])
def test_a_generic_amd_name_falls_back_to_gfx_name_cu_count_and_memory(
    name: str, gcn_arch: str, sm_count: int, memory_gib: int | None, clock_khz: int | None, key: str | None
) -> None:
    memory = memory_gib * GIB if memory_gib else None
    properties = {"gcn_arch": gcn_arch, "sm_count": sm_count, "memory_bytes": memory, "clock_khz": clock_khz}
    assert key_of(name, **properties) == key


def test_an_unknown_amd_model_is_not_taken_for_one_with_the_same_gfx_name() -> None:
    assert key_of("AMD Instinct MI399X", gcn_arch="gfx942", sm_count=304, memory_bytes=192 * GIB) is None


def test_a_partition_of_an_mi300x_is_scaled_by_its_cus() -> None:
    match = find_row(DeviceProperties(name="AMD Instinct MI300X", gcn_arch="gfx942", sm_count=38))
    assert match.sm_ratio == pytest.approx(38 / 304)
    assert "partition" in match.notes[0]


# Trap 11: laptops.
def test_a_laptop_part_says_why_it_has_no_peak() -> None:
    match = find_row(
        DeviceProperties(name="NVIDIA GeForce RTX 4090 Laptop GPU", sm_count=76, compute_capability=(8, 9))
    )
    assert match.row is None
    assert "laptop" in match.reason


# Cross-checks against the silicon.
def test_a_name_that_contradicts_the_compute_capability_is_refused_with_both() -> None:
    match = find_row(DeviceProperties(name="NVIDIA A100-SXM4-80GB", compute_capability=(9, 0), sm_count=132))
    assert match.row is None
    assert "8.0" in match.reason
    assert "9.0" in match.reason


def test_a_name_that_contradicts_the_gfx_name_is_refused() -> None:
    match = find_row(DeviceProperties(name="AMD Instinct MI300X", gcn_arch="gfx90a", sm_count=110))
    assert match.row is None
    assert "gfx90a" in match.reason


def test_an_export_capped_part_is_known_by_its_exact_name_and_never_scaled() -> None:
    assert key_of("NVIDIA H20", sm_count=78, compute_capability=(9, 0)) == "h20"
    assert key_of("NVIDIA H20", sm_count=60, compute_capability=(9, 0)) is None
    assert key_of("NVIDIA H20Z") is None
    assert key_of("AMD Instinct MI308X", gcn_arch="gfx942", sm_count=80) is None


def test_a_driver_that_reports_no_sms_leaves_the_sheets_figure_and_never_a_peak_of_zero() -> None:
    match = find_row(DeviceProperties(name="NVIDIA A100-SXM4-80GB", sm_count=0))
    assert (match.row.key if match.row else None, match.sm_ratio) == ("a100-sxm4-80gb", 1.0)
    of_profile = find_row(DeviceProperties(name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", sm_count=0))
    assert of_profile.sm_ratio == pytest.approx(14 / 108)


def test_a_chip_much_larger_than_the_row_is_another_product() -> None:
    assert key_of("NVIDIA L4", sm_count=142, compute_capability=(8, 9)) is None


@given(st.sampled_from([(r, n) for r in ROWS for n in r.device_names]), st.text("XYZ", min_size=1, max_size=3))
def test_no_name_matches_with_a_letter_more(row_and_name: tuple[PeakRow, str], suffix: str) -> None:
    """A10 + G is an A10G and MI250 + X an MI250X: the words must be a row's own, never a prefix of them."""
    _, name = row_and_name
    for found in rows_by_name(name + suffix):
        own = {parse_name(known).words for known in (*found.device_names, found.name)}
        assert parse_name(name + suffix).words in own


@given(st.permutations(["A100", "80GB", "PCIe", "NVIDIA"]), st.sampled_from([" ", "-", "  "]))
def test_word_order_case_and_separators_do_not_matter(words: list[str], separator: str) -> None:
    assert [row.key for row in rows_by_name(separator.join(words).lower())] == ["a100-pcie-80gb"]
