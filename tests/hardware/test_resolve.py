"""The ``peak=`` argument: every kind that is allowed, and every kind that is not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import yaml

from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning, PeakUnknownWarning
from mfu_monitor.hardware import derive, measure
from mfu_monitor.hardware.custom import load_custom_devices
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.precision import PRECISIONS
from mfu_monitor.hardware.resolve import PeakSpec, resolve_peak, validate_peak_spec

H100 = "NVIDIA H100 80GB HBM3"
EXAMPLE = Path(__file__).parents[2] / "configs" / "custom_device.yaml"


def test_auto_takes_the_table() -> None:
    peak = resolve_peak("auto", H100)
    assert peak is not None
    assert peak.key == "h100-sxm5"


def test_auto_on_a_cpu_is_none_with_one_warning() -> None:
    with pytest.warns(PeakUnknownWarning, match="peak='measure'") as caught:
        assert resolve_peak("auto", "cpu") is None
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_peak("auto", "cpu", warn=False) is None


def test_measure_and_derive_go_to_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def fake_measure(device: object, precision: object, *, cache: bool, warn: bool) -> DevicePeak:
        asked.extend((device, precision, cache))
        return DevicePeak(device_name="m")

    monkeypatch.setattr(measure, "measure_peak", fake_measure)
    monkeypatch.setattr(derive, "derive_peak", lambda device, *, warn: DevicePeak(device_name="d"))
    measured, derived = resolve_peak("measure", "cpu", torch.bfloat16, use_cache=False), resolve_peak("derive", "cpu")
    assert measured is not None
    assert derived is not None
    assert (measured.device_name, derived.device_name) == ("m", "d")
    assert asked == ["cpu", torch.bfloat16, False]


@pytest.mark.parametrize("number", [123e12, 123 * 10**12, "123e12"])
def test_a_number_is_the_peak_at_whatever_precision_is_active(number: PeakSpec) -> None:
    peak = resolve_peak(number, "cpu")
    assert peak is not None
    assert {p: peak.flops_per_s(p) for p in PRECISIONS} == dict.fromkeys(PRECISIONS, 123e12)
    assert peak.source == "user"
    assert peak.bytes_per_s is None


def test_a_users_number_is_kept_although_it_is_the_sparse_figure_and_the_dense_one_stays_known_to_diagnosis() -> None:
    peak = resolve_peak({"bf16": 1979e12}, H100)
    assert peak is not None
    assert peak.flops_per_s(torch.bfloat16) == 1979e12
    assert peak.source.startswith("user (bf16)")
    assert peak.sparse_flops_per_s("bf16") == pytest.approx(1978.8e12)
    assert peak.key == "h100-sxm5"


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_mapping_takes_precisions_and_dtypes_by_any_of_their_names(name: object) -> None:
    peak = resolve_peak({name: 5e12}, "cpu")
    assert peak is not None
    assert dict(peak.flops_per_s_by_precision) == {"bf16": 5e12}
    assert peak.source == "user"


def test_what_a_mapping_leaves_out_comes_from_the_table_and_says_so() -> None:
    peak = resolve_peak({"bf16": 900e12, "bytes_per_s": 3e12}, H100)
    assert peak is not None
    assert (peak.flops_per_s("bf16"), peak.flops_per_s("fp8")) == (900e12, 1978.9e12)
    assert peak.bytes_per_s == 3e12
    assert peak.source.startswith("user (bf16); table: NVIDIA H100 datasheet")


def test_the_shipped_example_of_a_device_file_works() -> None:
    peak = resolve_peak(str(EXAMPLE), "Example Accelerator X1 96GB")
    assert peak is not None
    assert peak.flops_per_s("bf16") == 480e12
    assert peak.ridge_point("bf16") == pytest.approx(150)
    assert peak.flops_per_s("fp64") is None
    assert resolve_peak(EXAMPLE, H100) == resolve_peak("auto", H100)


def test_a_ready_peak_and_none_are_passed_through() -> None:
    peak = DevicePeak(device_name="mine")
    assert resolve_peak(peak, "cpu") is peak
    assert resolve_peak(None, "cpu") is None


@pytest.mark.parametrize(
    "spec",
    ["fast", "", "Auto ", -1, 0, 0.0, float("nan"), float("inf"), True, False, "-5e12", [1e12], object(), b"auto"],
)
def test_anything_else_is_refused_with_what_was_given_what_is_allowed_and_an_example(spec: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        validate_peak_spec(spec)  # type: ignore[arg-type]
    text = str(error.value)
    assert repr(spec) in text
    for words in ("'auto'", "'measure'", "'derive'", "FLOP/s", "YAML", "peak=989.4e12"):
        assert words in text
    with pytest.raises(ConfigurationError):
        resolve_peak(spec, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "names no precision"),
        ({"bf61": 1e12}, "unknown precision 'bf61'"),
        ({"bf16": 0}, r"peak\['bf16'\].*above zero.*got 0"),
        ({"bf16": "fast"}, r"peak\['bf16'\].*got 'fast'"),
        ({torch.int64: 1e12}, "unknown precision 'torch.int64'"),
        ({"bytes_per_s": 1e12}, "no FLOP/s"),
    ],
)
def test_a_wrong_mapping_names_the_entry(spec: PeakSpec, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        validate_peak_spec(spec)


def test_a_number_in_tflops_is_kept_but_questioned() -> None:
    with pytest.warns(MFUMonitorWarning, match=r"989.4 is less than a megaflop.*TFLOP/s"):
        validate_peak_spec(989.4)


def test_every_allowed_kind_passes_validation_without_a_device() -> None:
    for spec in (
        "auto",
        "measure",
        "derive",
        1e12,
        "1e12",
        {"bf16": 1e12},
        str(EXAMPLE),
        EXAMPLE,
        DevicePeak(device_name="x"),
    ):
        validate_peak_spec(spec)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the device file"),
        ("devices: [", "cannot read the device file"),
        ("[]", "expected a list under 'devices'"),
        ("devices: []", "expected a list under 'devices'"),
        ("devices: [3]", "device 1: expected a mapping"),
        ("devices: [{device_names: [X]}]", r"missing keys \['flops_per_s'\]"),
        ("devices: [{device_names: [X], flops_per_s: {bf16: 1e12}, tflops: 3}]", r"unknown keys \['tflops'\]"),
        ("devices: [{device_names: X, flops_per_s: {bf16: 1e12}}]", "device_names must be a list"),
        ("devices: [{device_names: [X], flops_per_s: 1e12}]", "must map precisions"),
        ("devices: [{device_names: [X], flops_per_s: {bf16: -1}}]", "device 1, bf16: expected a finite number"),
        ("devices: [{device_names: [X], flops_per_s: {bf61: 1e12}}]", "unknown precision 'bf61'"),
    ],
)
def test_a_wrong_device_file_says_where_and_shows_an_example(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=words):
        validate_peak_spec(str(file))


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 takes 989.4e12 for a string: its exponents need a sign."""
    assert yaml.safe_load("989.4e12") == "989.4e12"
    file = tmp_path / "mine.yml"
    file.write_text("devices: [{device_names: [X], flops_per_s: {bf16: 989.4e12}}]", encoding="utf-8")
    ((names, peak),) = load_custom_devices(file)
    assert names == ("X",)
    assert peak.flops_per_s("bf16") == 989.4e12


@pytest.mark.parametrize("content", ["[" * 5000, "a: " + "x" * 2**20, "a: &a [1]\nb: [*a, *a]\n"])
def test_a_device_file_that_is_deep_or_large_is_one_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError) as error:
        resolve_peak(path, "cpu")
    assert len(str(error.value)) < 2000


def test_a_file_of_aliases_of_aliases_is_refused_and_not_written_out(tmp_path: Path) -> None:
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    path = tmp_path / "devices.yaml"
    path.write_text(
        f"a0: &a0 x\n{levels}\ndevices: [{{device_names: [y], flops_per_s: {{bf16: 1.0e+12}}, notes: *a11}}]\n"
    )
    with pytest.raises(ConfigurationError, match="notes must be a text"):
        load_custom_devices(path)
    path.write_text(f"devices: [{{device_names: [{'y' * 1000}], flops_per_s: {{bf16: 1.0e+12}}}}]\n")
    with pytest.raises(ConfigurationError, match="names of up to 200 characters"):
        load_custom_devices(path)
