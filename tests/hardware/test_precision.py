"""What a dtype is called, and when float32 means tf32."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware import precision
from mfu_monitor.hardware.precision import PRECISIONS, has_tf32, literal_precision, matmul_precision, precision_of


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined,unused-ignore]
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float64, "fp64"),
        (torch.complex128, "fp64"),
        (torch.float32, "fp32"),
        (torch.complex64, "fp32"),
        (torch.float16, "fp16"),
        (torch.complex32, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.float8_e5m2, "fp8"),
        (torch.float4_e2m1fn_x2, "fp4"),
        (torch.int8, "int8"),
        (torch.bool, None),
        (torch.int64, None),
        (torch.float8_e8m0fnu, None),  # a format of scales, not of operands
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("Half", "fp16"),
        ("tf32", "tf32"),
        ("mixed", None),
    ],
)
def test_a_dtype_has_one_name(dtype: torch.dtype | str, precision: str | None) -> None:
    assert precision_of(dtype) == precision


def test_every_precision_names_itself() -> None:
    assert [precision_of(name) for name in PRECISIONS] == list(PRECISIONS)


def test_an_unknown_precision_says_what_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown precision 'bf61'.*fp64, fp32, tf32.*example: 'bf16'"):
        literal_precision("bf61")


@pytest.mark.parametrize(("setting", "precision"), [("highest", "fp32"), ("high", "tf32"), ("medium", "tf32")])
def test_float32_products_on_cuda_follow_torchs_setting(setting: str, precision: str) -> None:
    torch.set_float32_matmul_precision(setting)
    assert matmul_precision(torch.float32, "cuda") == precision
    assert matmul_precision(torch.complex64, "cuda") == precision


def test_the_older_and_the_newer_switch_both_count() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    assert matmul_precision(torch.float32, "cuda") == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = False
    assert matmul_precision(torch.float32, "cuda") == "fp32"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert matmul_precision(torch.float32, "cuda") == "tf32"


def test_convolutions_obey_cudnns_switch_which_allows_tf32_by_default() -> None:
    assert matmul_precision(torch.float32, "cuda", is_convolution=True) == "tf32"
    assert matmul_precision(torch.float32, "cuda") == "fp32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined,unused-ignore]
    assert matmul_precision(torch.float32, "cuda", is_convolution=True) == "fp32"


def test_a_part_without_tf32_units_runs_fp32_whatever_is_allowed() -> None:
    torch.set_float32_matmul_precision("high")
    assert matmul_precision(torch.float32, "cuda", has_tf32=False) == "fp32"
    assert matmul_precision(torch.float32, "cuda", is_convolution=True, has_tf32=False) == "fp32"


def test_a_cpu_stays_at_fp32_and_other_dtypes_never_change() -> None:
    torch.set_float32_matmul_precision("high")
    assert matmul_precision(torch.float32, "cpu") == "fp32"
    assert matmul_precision(torch.bfloat16, "cuda") == "bf16"
    assert matmul_precision(torch.float64, "cuda") == "fp64"
    assert matmul_precision(torch.int64, "cuda") is None
    assert not has_tf32(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "hip", "architecture", "expected"),
    [
        ((7, 5), None, "", False),  # Turing
        ((8, 0), None, "", True),  # Ampere
        ((8, 9), None, "", True),
        ((10, 0), None, "", True),
        ((9, 4), "6.4", "gfx942:sramecc+:xnack-", True),  # MI300X
        ((9, 5), "7.0", "gfx950:sramecc+:xnack-", False),  # MI355X has none again
        ((9, 0), "6.4", "gfx90a:sramecc+:xnack-", False),  # MI250X, whatever its number
    ],
)
def test_the_part_says_whether_it_has_tf32_units(
    capability: tuple[int, int], hip: str | None, architecture: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = SimpleNamespace(major=capability[0], minor=capability[1], gcnArchName=architecture)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: part)
    precision._device_has_tf32.cache_clear()
    try:
        assert has_tf32(torch.device("cuda")) is has_tf32(torch.device("cuda:1")) is expected
        assert precision.current_device_has_tf32() is expected
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        if hip is None:
            assert matmul_precision(torch.float32, "cuda") == ("tf32" if expected else "fp32")
    finally:
        precision._device_has_tf32.cache_clear()


def test_without_a_cuda_device_no_part_has_tf32_units_and_a_fake_one_is_taken_to_have_them() -> None:
    assert not has_tf32(torch.device("cuda:0")) or torch.cuda.is_available()
    assert not has_tf32(torch.device("mps"))
    if not torch.cuda.is_available():
        assert precision.current_device_has_tf32()
