"""device_peak: the whole way from a name or a device to a peak or one warning."""

from __future__ import annotations

import types
import warnings
from pathlib import Path

import pytest
import torch

from mfu_monitor.errors import ConfigurationError, PeakUnknownWarning
from mfu_monitor.hardware import properties as properties_module
from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.properties import DeviceProperties, read_properties


def test_an_unknown_device_has_no_peak_and_one_warning_that_says_what_to_do() -> None:
    with pytest.warns(PeakUnknownWarning) as caught:
        assert device_peak("CocoNut 9000") is None
    assert len(caught) == 1
    text = str(caught[0].message)
    for words in ("'CocoNut 9000'", "no row of the table", "peak=989.4e12", "peak='measure'", "peak='derive'"):
        assert words in text
    assert caught[0].filename == __file__


def test_the_warning_names_the_nearest_devices() -> None:
    with pytest.warns(PeakUnknownWarning, match="Nearest names in the table: .*NVIDIA GeForce RTX 4090,"):
        device_peak("RTX 4090 X")


def test_a_known_device_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peak = device_peak("NVIDIA H100 80GB HBM3")
    assert peak is not None
    assert peak.source == "table: NVIDIA H100 datasheet + GH100 whitepaper"
    assert (peak.confidence, peak.key) == ("high", "h100-sxm5")


def test_warn_false_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_peak("CocoNut 9000", warn=False) is None


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_cpu_has_no_peak_by_the_table(device: torch.device | str) -> None:
    with pytest.warns(PeakUnknownWarning, match="CPU has no dense peak.*peak='measure'"):
        assert device_peak(device) is None


def test_a_device_that_is_not_there_has_no_peak() -> None:
    with pytest.warns(PeakUnknownWarning, match="could not be asked"):
        assert device_peak("xpu:7") is None


def test_anything_else_than_a_device_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a device name.*got 3.*example"):
        device_peak(3)  # type: ignore[arg-type]


def test_a_mig_slice_is_scaled_and_says_so() -> None:
    slice_ = DeviceProperties(name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", sm_count=14, compute_capability=(8, 0))
    peak = device_peak(slice_)
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(312e12 * 14 / 108)
    assert peak.bytes_per_s == pytest.approx(2.039e12 / 8)  # 10 of 80 GB: one of eight memory slices
    assert "scaled by SM count: 14 SMs where A100 SXM4 80GB has 108 (a MIG slice)" in peak.source


def test_a_part_with_other_sms_is_scaled_with_low_confidence_and_unknown_bandwidth() -> None:
    peak = device_peak("NVIDIA H100 PCIe", properties=DeviceProperties(name="NVIDIA H100 PCIe", sm_count=100))
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(756.5e12 * 100 / 114)
    assert peak.sparse_flops_per_s("bf16") == pytest.approx(2 * 756.5e12 * 100 / 114)
    assert peak.confidence == "low"
    assert peak.bytes_per_s is None


def test_a_core_of_a_chip_gets_its_share_and_says_so() -> None:
    peak = device_peak("TPU v3")
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(61.5e12)
    assert any("1/2 of the product" in note for note in peak.notes)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, hip: str | None = None, **attributes: object) -> None:
    found = types.SimpleNamespace(**attributes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", hip)


def test_a_cuda_device_is_read_through_its_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(
        monkeypatch, name="NVIDIA H100 80GB HBM2e", multi_processor_count=114, major=9, minor=0,
        total_memory=80 * 2**30, clock_rate=1_755_000,
    )  # fmt: skip
    assert read_properties(torch.device("cuda:0")) == DeviceProperties(
        name="NVIDIA H100 80GB HBM2e",
        sm_count=114,
        compute_capability=(9, 0),
        memory_bytes=80 * 2**30,
        clock_khz=1_755_000,
        device_type="cuda",
    )
    peak = device_peak("cuda:0")
    assert peak is not None
    assert peak.key == "h100-pcie"


def test_a_rocm_device_is_read_by_its_gfx_name_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(
        monkeypatch, hip="6.3", name="AMD Radeon Graphics", multi_processor_count=304, major=9, minor=4,
        total_memory=192 * 2**30, gcnArchName="gfx942:sramecc+:xnack-",
    )  # fmt: skip
    found = read_properties(torch.device("cuda:0"))
    assert found is not None
    assert (found.gcn_arch, found.compute_capability, found.clock_khz) == ("gfx942", None, None)
    peak = device_peak(torch.device("cuda:0"))
    assert peak is not None
    assert peak.key == "mi300x"


def test_an_intel_device_counts_its_xe_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.SimpleNamespace(
        name="Intel(R) Data Center GPU Max 1550", max_compute_units=512, total_memory=64 * 2**30
    )
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: found)
    peak = device_peak("xpu:0")
    assert peak is not None
    assert peak.key == "max-1550-tile"


def test_a_driver_that_fails_leaves_the_device_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> DeviceProperties:
        raise RuntimeError("driver gone")

    monkeypatch.setattr(properties_module, "_read_cuda", fail)
    assert read_properties(torch.device("cuda:0")) is None


def test_a_users_file_is_searched_first(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(
        "devices: [{device_names: ['NVIDIA L4'], flops_per_s: {bf16: 100e12}, source: lab}]", encoding="utf-8"
    )
    mine = device_peak("L4", custom_devices=file)
    assert mine is not None
    assert (mine.flops_per_s("bf16"), mine.source) == (100e12, "user file: lab")
    others = device_peak("NVIDIA L40", custom_devices=file)
    assert others is not None
    assert others.key == "l40"


@pytest.mark.parametrize(
    ("device", "chip", "devices"),
    [
        ("TPU v2", "TPU v2 chip", 2),
        ("TPU v3", "TPU v3 (chip)", 2),
        ("TPU7x", "TPU7x Ironwood (chip)", 2),
        ("trn1", "Trainium1 (chip)", 2),
        ("trn2", "Trainium2 chip", 4),
        ("trn3", "Trainium3 (chip)", 4),
    ],
)
def test_a_device_and_the_chip_that_holds_several_are_both_known_by_name(device: str, chip: str, devices: int) -> None:
    one, whole = device_peak(device), device_peak(chip)
    assert one is not None
    assert whole is not None
    assert whole.flops_per_s("bf16") == pytest.approx(devices * one.flops_per_s("bf16"))
    assert whole.bytes_per_s == pytest.approx(devices * one.bytes_per_s)


@pytest.mark.parametrize(
    ("name", "bf16"),  # TFLOP/s: SMs x GHz x FMA per clock and SM x 2
    [
        ("NVIDIA GeForce RTX 3060 Ti", 38 * 1.665 * 256 * 2 / 1e3),
        ("NVIDIA GeForce RTX 4060", 24 * 2.460 * 256 * 2 / 1e3),
        ("NVIDIA GeForce RTX 5060 Ti", 36 * 2.572 * 256 * 2 / 1e3),
        ("NVIDIA RTX 4500 Ada Generation", 60 * 2.580 * 512 * 2 / 1e3),
        ("NVIDIA RTX 4000 Ada Generation", 48 * 2.175 * 512 * 2 / 1e3),
        ("NVIDIA RTX 4000 SFF Ada Generation", 48 * 1.560 * 512 * 2 / 1e3),
        ("AMD Radeon RX 7900 XT", 84 * 2.4 * 256 * 2 / 1e3),
        ("AMD Radeon RX 9070 XT", 64 * 2.97 * 512 * 2 / 1e3),
    ],
)
def test_cards_that_people_train_on_at_home(name: str, bf16: float) -> None:
    peak = device_peak(name)
    assert peak is not None
    assert peak.flops_per_s("bf16") == pytest.approx(bf16 * 1e12, rel=0.003)


def test_a_device_name_without_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="300 characters"):
        device_peak("A" * 300)


def test_a_products_name_means_the_same_as_its_drivers_name() -> None:
    by_product, by_driver = device_peak("H100 SXM"), device_peak("NVIDIA H100 80GB HBM3")
    assert by_product is not None
    assert by_driver is not None
    assert by_product.flops_per_s_by_precision == by_driver.flops_per_s_by_precision
    assert (by_product.key, by_product.device_name) == ("h100-sxm5", "H100 SXM5 80GB")


def test_a_name_of_several_products_gives_what_they_have_in_common() -> None:
    peak = device_peak("A100")
    assert peak is not None
    assert (peak.flops_per_s("bf16"), peak.bytes_per_s, peak.key) == (312e12, None, "")
    with pytest.warns(PeakUnknownWarning, match="products of that name differ, choose one of: H100 SXM5 80GB, H100 PC"):
        assert device_peak("H100") is None


@pytest.mark.parametrize(
    "name", ["GTX 1080", "RTX 5000", "RTX 2080", "RTX 6000", "TITAN", "Instinct", "TPU", "GPU", "80GB"]
)
def test_a_products_name_is_not_completed_to_another_products(name: str) -> None:
    assert device_peak(name, warn=False) is None


def test_what_a_driver_reports_is_not_read_as_words_of_a_product() -> None:
    reported = DeviceProperties(name="H100 SXM", device_type="cuda")
    assert device_peak(reported, warn=False) is None
