"""The packaged table: its schema, and figures derived by hand from vendors' own arithmetic."""

from __future__ import annotations

import csv
import importlib.resources

import pytest

from mfu_monitor.hardware.lookup import parse_name
from mfu_monitor.hardware.precision import PRECISIONS
from mfu_monitor.hardware.table import load_table, nearest_names, neighbours, row_by_key, rows_with_rate

COLUMNS = [
    "key",
    "vendor",
    "architecture",
    "name",
    "device_names",
    "variant_of",
    "compute_capability",
    "gfx",
    "sm_count",
    "boost_clock_mhz",
    "tensor_clock_mhz",
    "fma16_per_clk_sm",
    "fp64_tflops",
    "fp64_matrix_tflops",
    "fp32_tflops",
    "fp32_matrix_tflops",
    "tf32_tflops",
    "fp16_tflops",
    "fp16_vector_tflops",
    "fp16_accumulate_fp16_tflops",
    "bf16_tflops",
    "fp8_tflops",
    "fp4_tflops",
    "int8_tops",
    "sparsity_factor",
    "sparsity_exceptions",
    "memory_gb",
    "memory_bandwidth_tb_s",
    "nvlink_gb_s",
    "tdp_w",
    "torch_devices",
    "torch_device_unit",
    "export_capped",
    "source",
    "verified_by",
    "confidence",
    "notes",
]
ROWS = load_table()


def cells() -> list[dict[str, str]]:
    text = importlib.resources.files("mfu_monitor.hardware").joinpath("peaks.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_the_table_has_exactly_the_columns_of_the_schema() -> None:
    assert list(cells()[0]) == COLUMNS
    assert all(None not in row and None not in row.values() for row in cells())


def test_keys_are_unique_and_rows_are_complete() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS) >= 122
    for row in ROWS:
        assert row.key == row.key.lower().replace(" ", "-")
        assert row.name, row.key
        assert row.source, row.key
        assert all(row.device_names), row.key
        assert row.confidence in ("high", "medium", "low"), row.key
        assert row.torch_devices in (1, 2, 4), row.key
        assert row.vendor in ("NVIDIA", "AMD", "Intel", "Google", "AWS", "Apple", "Huawei"), row.key
        assert row.variant_of is None or row_by_key(row.variant_of) is not None


def test_every_rate_is_positive_and_of_a_plausible_size() -> None:
    for row in ROWS:
        for name, rate in row.tflops.items():
            assert 0.1 <= rate <= 20_000, (row.key, name)
        assert row.memory_bandwidth_tb_s is None or 0.05 <= row.memory_bandwidth_tb_s <= 10, row.key
        assert set(row.flops_per_s_by_precision()) <= set(PRECISIONS)


def test_only_the_part_without_published_figures_has_none() -> None:
    assert [row.key for row in ROWS if not row.flops_per_s_by_precision()] == ["mi308x"]


def test_nvidia_rows_name_a_compute_capability_and_amd_rows_a_gfx_name() -> None:
    for row in ROWS:
        assert (row.compute_capability is not None) == (row.vendor == "NVIDIA"), row.key
        assert (row.gfx is not None) == (row.vendor == "AMD"), row.key


@pytest.mark.parametrize(
    ("key", "precision", "sms", "clock_mhz", "fma_per_clk_sm"),
    [
        ("a100-sxm4-80gb", "bf16", 108, 1410, 1024),  # GA100 whitepaper, table 1
        ("a100-sxm4-80gb", "tf32", 108, 1410, 512),
        ("a100-sxm4-80gb", "fp64", 108, 1410, 64),  # FP64 tensor cores
        ("h100-sxm5", "bf16", 132, 1830, 2048),  # GH100 whitepaper: the tensor figures' clock
        ("h100-sxm5", "fp8", 132, 1830, 4096),
        ("h100-sxm5", "fp32", 132, 1980, 128),
        ("h100-pcie", "bf16", 114, 1620, 2048),
        ("rtx-4090", "bf16", 128, 2520, 256),  # Ada whitepaper: FP32 accumulation at half rate
        ("rtx-3090", "bf16", 82, 1695, 256),
        ("rtx-a6000", "bf16", 84, 1800, 512),
        ("t4", "fp16", 40, 1590, 512),
        ("l4", "fp8", 58, 2040, 1024),
        ("mi300x", "bf16", 304, 2100, 1024),  # CDNA3 whitepaper: 2048 FLOP per clock and CU
        ("mi300x", "fp32", 304, 2100, 128),
        ("mi100", "fp32", 120, 1502, 128),  # FP32 matrix cores, 256 FLOP per clock and CU
        ("mi100", "bf16", 120, 1502, 256),  # half of FP16 on this part only
    ],
)
def test_figures_are_sms_times_clock_times_fma_times_two(
    key: str, precision: str, sms: int, clock_mhz: float, fma_per_clk_sm: int
) -> None:
    row = row_by_key(key)
    assert row is not None
    assert row.flops_per_s_by_precision()[precision] == pytest.approx(
        sms * clock_mhz * 1e6 * fma_per_clk_sm * 2, rel=0.005
    )


def test_fp64_is_kept_with_and_without_matrix_unit_and_products_use_the_matrix_unit() -> None:
    row = row_by_key("h100-sxm5")
    assert row is not None
    assert (row.tflops["fp64"], row.tflops["fp64_matrix"]) == (33.5, 66.9)
    assert row.flops_per_s_by_precision()["fp64"] == pytest.approx(66.9e12)


def test_parts_without_matrix_units_use_their_vector_rate_for_fp16() -> None:
    p100, gtx = row_by_key("p100-sxm2"), row_by_key("gtx-1080-ti")
    assert p100 is not None
    assert gtx is not None
    assert p100.flops_per_s_by_precision()["fp16"] == pytest.approx(21.2e12)
    # On 6.1 native FP16 is 1/64 of FP32, and products in fp16 go through FP32.
    assert gtx.flops_per_s_by_precision()["fp16"] == pytest.approx(11.3e12)


def test_a_row_whose_torch_device_is_part_of_the_product_is_divided() -> None:
    rates = {
        key: row.flops_per_s_by_precision()["bf16"]
        for key in ("tpu-v3", "trainium2", "mi250-gcd")
        if (row := row_by_key(key))
    }
    # A TPU v3 chip does 123 on two cores, a Trainium2 chip 667 on four logical cores; the MI250 row is one GCD already.
    assert rates == {"tpu-v3": 61.5e12, "trainium2": 166.75e12, "mi250-gcd": 181.0e12}


@pytest.mark.parametrize(
    ("key", "precision", "sparse_tflops"),
    [
        ("h100-sxm5", "bf16", 2 * 989.4),
        ("h100-sxm5", "fp8", 2 * 1978.9),
        ("b300", "fp4", 13_500 * 4 / 3),  # 144 over 108 PFLOP/s on the HGX sheet
        ("rtx-4090", "bf16", 2 * 165.2),
    ],
)
def test_the_sparse_figure_is_derivable(key: str, precision: str, sparse_tflops: float) -> None:
    row = row_by_key(key)
    assert row is not None
    assert row.sparse_flops_per_s_by_precision()[precision] == pytest.approx(sparse_tflops * 1e12, rel=1e-3)


@pytest.mark.parametrize(("key", "precision"), [("v100-sxm2-16gb", "fp16"), ("h100-sxm5", "fp32"), ("mi355x", "fp4")])
def test_no_sparse_figure_where_the_part_has_none(key: str, precision: str) -> None:
    row = row_by_key(key)
    assert row is not None
    assert precision in row.flops_per_s_by_precision()
    assert precision not in row.sparse_flops_per_s_by_precision()


def test_a_wrong_peak_can_be_traced_to_the_row_it_belongs_to() -> None:
    assert "h100-sxm5" in {row.key for row in rows_with_rate(1979e12, "bf16", is_sparse=True)}
    dense = {row.key for row in rows_with_rate(312e12, "bf16")}
    assert {"a100-sxm4-40gb", "a100-sxm4-80gb", "a100-pcie-40gb"} <= dense
    assert "h100-sxm5" not in dense
    assert rows_with_rate(1.0, "bf16") == ()


def test_neighbours_are_the_rows_a_substring_search_confuses() -> None:
    assert {"l40", "l4"} <= {row.key for row in neighbours("l40s")}
    assert {"h200-sxm", "h20"} <= {row.key for row in neighbours("gh200-96gb")}
    assert {"h100-pcie", "h100-nvl"} <= {row.key for row in neighbours("h100-sxm5")}
    assert "mi250-gcd" in {row.key for row in neighbours("mi250x-gcd")}
    assert "a100-sxm4-80gb" not in {row.key for row in neighbours("h100-sxm5")}
    assert neighbours("no-such-key") == ()


def test_nearest_names_put_the_same_model_number_first() -> None:
    assert nearest_names("RTX 4090")[0] == "NVIDIA GeForce RTX 4090"
    assert all("A100" in name for name in nearest_names("A100"))
    assert nearest_names("zzzzzz") == []


def test_no_two_rows_share_a_name_but_those_that_silicon_tells_apart() -> None:
    by_words: dict[tuple[str, ...], set[str]] = {}
    for row in ROWS:
        for name in row.device_names:
            by_words.setdefault(parse_name(name).words, set()).add(row.key)
    assert sorted(map(sorted, (keys for keys in by_words.values() if len(keys) > 1))) == [
        ["h100-pcie", "h100-sxm5-hbm2e"],
        ["h100-pcie", "h100-sxm5-hbm2e"],
        ["max-1550-card", "max-1550-tile"],
        ["mi250-gcd", "mi250x-gcd"],
        ["rtx-2080-ti", "rtx-2080-ti-fe"],
        ["rtx-3080-10gb", "rtx-3080-12gb"],
    ]
