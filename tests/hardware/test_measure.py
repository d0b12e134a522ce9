"""Measuring: the arithmetic with a fake clock, politeness on the real CPU, and the cache."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mfu_monitor.errors import ConfigurationError, PeakUnknownWarning
from mfu_monitor.hardware import matmul_rate, measure
from mfu_monitor.hardware.matmul_rate import ProductRate, best_product_rate, copy_rate, product_rate
from mfu_monitor.hardware.measure import (
    cache_directory,
    cached_peak,
    load_measurement,
    measure_peak,
    save_measurement,
)
from mfu_monitor.hardware.nvml import NvmlReading

CPU = torch.device("cpu")
TINY = ((64, 64, 64),)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MFU_MONITOR_CACHE_DIR", str(tmp_path / "cache"))


class SlowDevice:
    """A clock that moves by what each call costs, longer for the first."""

    def __init__(self, seconds_per_call: list[float]) -> None:
        self.now_s = 0.0
        self.costs = iter(seconds_per_call)
        self.last_s = seconds_per_call[-1]

    def call(self) -> None:
        self.now_s += next(self.costs, self.last_s)

    def clock(self) -> float:
        return self.now_s


def test_the_least_seconds_a_call_are_taken_after_a_warm_up() -> None:
    device = SlowDevice([5.0, 0.4, 0.2, 0.1, 0.3])
    least_s, calls = matmul_rate._least_seconds(device.call, lambda: None, seconds=6.3, clock=device.clock)
    # 5.0 is the warm-up, then 0.4, 0.2, 0.1 and 0.3; at 6.0 another 0.4 as the first call took would pass 6.3.
    assert least_s == pytest.approx(0.1)
    assert calls == 4


def test_fast_calls_are_timed_in_batches_of_twenty_milliseconds() -> None:
    device = SlowDevice([0.001])
    least_s, calls = matmul_rate._least_seconds(device.call, lambda: None, seconds=0.1, clock=device.clock)
    assert least_s == pytest.approx(0.001)
    assert (calls - 1) % 20 in (0, 19)  # batches of 20 (19 where the division rounds down)


def test_the_rate_is_two_m_k_n_over_the_least_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_rate, "_least_seconds", lambda *args, **kwargs: (0.5, 3))
    rate = product_rate(CPU, "fp32", (10, 20, 30), seconds=1.0)
    assert rate == ProductRate(shape=(10, 20, 30), flops_per_s=2 * 10 * 20 * 30 / 0.5, calls=3)


def test_the_best_of_the_shapes_wins_and_a_hopelessly_long_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fake(
        device: torch.device, precision: str, shape: matmul_rate.Shape, *, seconds: float, clock: object
    ) -> ProductRate:
        tried.append(shape)
        return ProductRate(shape=shape, flops_per_s={8: 1e6, 16: 3e6, 32: 2e6}[shape[0]], calls=1)

    monkeypatch.setattr(matmul_rate, "product_rate", fake)
    shapes = ((8, 8, 8), (16, 16, 16), (32, 32, 32), (4096, 4096, 4096))
    best = best_product_rate(CPU, "fp32", seconds=1.0, shapes=shapes, clock=lambda: 0.0)
    assert best is not None
    assert best.shape == (16, 16, 16)
    assert (4096, 4096, 4096) not in tried  # 1.4e11 FLOPs at 2e6 a second


@pytest.fixture
def _settings() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_measuring_leaves_random_numbers_grad_mode_and_settings_as_they_were(precision: str) -> None:
    torch.manual_seed(7)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    random_state = torch.get_rng_state()
    threads = torch.get_num_threads()
    measure_peak("cpu", precision, cache=False, seconds=0.02, shapes=TINY)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_num_threads() == threads
    assert not torch.is_autocast_enabled("cpu")


def test_measuring_under_autocast_measures_what_was_asked() -> None:
    seen: list[torch.dtype] = []
    original = torch.mm

    def spy(a: torch.Tensor, b: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        seen.append(a.dtype)
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        return original(a, b, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16):
        patch.setattr(torch, "mm", spy)
        assert product_rate(CPU, "fp32", TINY[0], seconds=0.01) is not None
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("before", ["none", "tf32", "ieee"])
@pytest.mark.parametrize(("precision", "during"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_on_cuda_float32_is_measured_as_asked_and_the_switch_put_back(before: str, precision: str, during: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = before
    try:
        with matmul_rate._fp32_products_as(torch.device("cuda"), precision):
            assert torch.backends.cuda.matmul.fp32_precision == during
        assert torch.backends.cuda.matmul.fp32_precision == before
        with pytest.raises(KeyError), matmul_rate._fp32_products_as(torch.device("cuda"), precision):
            raise KeyError
        assert torch.backends.cuda.matmul.fp32_precision == before
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_a_measured_peak_is_labelled_and_holds_its_conditions() -> None:
    peak = measure_peak("cpu", torch.float32, seconds=0.05, shapes=TINY)
    assert peak is not None
    assert peak.source == "measured"
    assert peak.confidence == "measured"
    rate, bandwidth = peak.flops_per_s("fp32"), peak.bytes_per_s
    assert rate is not None
    assert bandwidth is not None
    assert 0 < rate < 1e15
    assert 0 < bandwidth < 1e14
    assert list(peak.flops_per_s_by_precision) == ["fp32"]
    assert "(64, 64) x (64, 64)" in peak.notes[0]
    assert torch.__version__ in peak.notes[0]


def test_float32_goes_by_the_setting_for_a_dtype_and_is_literal_for_a_name() -> None:
    cuda = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    try:
        assert measure.as_precision(torch.float32, cuda) == "tf32"
        assert measure.as_precision("fp32", cuda) == "fp32"
        assert measure.as_precision(torch.float32, CPU) == "fp32"
    finally:
        torch.set_float32_matmul_precision("highest")


def fake_measuring(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the measurements instead of making them."""
    made: list[str] = []

    def fake(device: torch.device, precision: str, **kwargs: object) -> ProductRate:
        made.append(precision)
        return ProductRate(shape=(8, 8, 8), flops_per_s=len(made) * 1e9, calls=1)

    monkeypatch.setattr(measure, "best_product_rate", fake)
    monkeypatch.setattr(measure, "copy_rate", lambda device, **kwargs: 1e9)
    return made


def test_clock_power_limit_and_temperature_go_with_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measuring(monkeypatch)
    state = NvmlReading(sm_clock_mhz=1755, power_limit_w=600, temperature_c=64, clock_reasons=("sw_power_cap",))
    monkeypatch.setattr(measure, "read_nvml", lambda device: state)
    for _ in ("measured", "from the cache"):
        peak = measure_peak("cpu", "bf16")
        assert peak is not None
        assert {
            "sm_clock_mhz: 1755",
            "power_limit_w: 600",
            "temperature_c: 64",
            "clock_reasons: ['sw_power_cap']",
        } <= set(peak.notes)
        assert not any("max_sm_clock_mhz" in note for note in peak.notes)  # unknown is left out


def test_a_second_call_reads_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_measuring(monkeypatch)
    first, second = measure_peak("cpu", "bf16"), measure_peak("cpu", "bf16")
    assert first == second
    assert made == ["bf16"]
    assert cached_peak("cpu", torch.bfloat16) == first
    assert cached_peak("cpu", "fp64") is None


def test_cache_false_neither_reads_nor_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_measuring(monkeypatch)
    measure_peak("cpu", "bf16", cache=False)
    measure_peak("cpu", "bf16", cache=False)
    assert made == ["bf16", "bf16"]
    assert not cache_directory().exists()


def test_precision_torch_version_and_thread_count_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_measuring(monkeypatch)
    measure_peak("cpu", "bf16")
    measure_peak("cpu", "fp32")
    monkeypatch.setattr(torch, "__version__", "99.0")
    measure_peak("cpu", "bf16")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    measure_peak("cpu", "bf16")
    assert made == ["bf16", "fp32", "bf16", "bf16"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"key": {}}', '{"key": {"a": 1}, "flops_per_s": -1}', '{"flops_per_s": null}']
)
def test_a_broken_cache_file_is_measured_again(content: str) -> None:
    assert save_measurement({"a": 1}, {"flops_per_s": 1e9})
    (file,) = cache_directory().glob("*.json")
    file.write_text(content, encoding="utf-8")
    assert load_measurement({"a": 1}) is None


SOUND = {"flops_per_s": 1e11, "shape": [64, 64, 64], "bytes_per_s": None, "measured_at": "2026", "conditions": None}
KEY = {"device_name": "NVIDIA H100 80GB HBM3", "precision": "bf16", "threads": None}  # datasheet: 989.4e12 dense


@pytest.mark.parametrize(
    "value", ["1e1000", "1" + "0" * 400, "1e300", '"1e12"', "true", "Infinity", "NaN", "1e-9", "2e15"]
)
def test_a_figure_that_the_device_cannot_have_measured_is_not_read(value: str) -> None:
    assert save_measurement(KEY, SOUND)
    (file,) = cache_directory().glob("*.json")
    file.write_text(file.read_text().replace("100000000000.0", value))
    assert load_measurement(KEY) is None
    file.write_text("[" * 200_000)
    assert load_measurement(KEY) is None


def test_a_shorter_benchmark_does_not_replace_a_better_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert save_measurement(KEY, SOUND)
    assert not save_measurement(KEY, {**SOUND, "flops_per_s": 9e10})
    assert "1e+11 FLOP/s, of 2026; this one measured 9e+10" in caplog.text
    assert save_measurement(KEY, {**SOUND, "flops_per_s": 2e11})
    found = load_measurement(KEY)
    assert found is not None
    assert found["flops_per_s"] == 2e11


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MFU_MONITOR_CACHE_DIR", str(tmp_path / "file" / "below"))
    fake_measuring(monkeypatch)
    assert not save_measurement({"a": 1}, {"flops_per_s": 1e9})
    assert measure_peak("cpu", "bf16") is not None


def test_a_saved_measurement_is_complete_json_and_leaves_no_temporary_file() -> None:
    assert save_measurement({"a": 1}, {"flops_per_s": 1e9})
    (file,) = cache_directory().iterdir()
    assert json.loads(file.read_text(encoding="utf-8")) == {"flops_per_s": 1e9, "key": {"a": 1}}


@pytest.mark.parametrize("precision", ["fp4", "tf32"])
def test_what_a_cpu_cannot_run_has_no_peak_and_one_warning(precision: str) -> None:
    with pytest.warns(PeakUnknownWarning, match=f"{precision} products cannot be measured.*no such kernel") as caught:
        assert measure_peak("cpu", precision, seconds=0.01) is None
    assert len(caught) == 1


def test_a_kernel_that_fails_is_not_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(matmul_rate, "_product", out_of_memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PeakUnknownWarning)
        assert measure_peak("cpu", "fp32", seconds=0.01) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "gpu"}, r"cannot measure on 'gpu'.*'cpu' or 'cuda:0'"),
        ({"device": "cpu", "precision": "fp31"}, r"unknown precision 'fp31'"),
        ({"device": "cpu", "seconds": 0}, r"seconds=0.*above zero"),
        ({"device": "cpu", "seconds": float("nan")}, r"seconds=nan"),
    ],
)
def test_wrong_arguments_say_what_is_expected(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        measure_peak(**arguments)  # type: ignore[arg-type]


def test_bandwidth_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_rate, "_CPU_COPY_BYTES", 1000)
    monkeypatch.setattr(matmul_rate, "_least_seconds", lambda *args, **kwargs: (0.5, 1))
    assert copy_rate(CPU) == 2 * 1000 / 0.5


def test_a_default_measurement_finds_a_rate_on_a_cpu() -> None:
    peak = measure_peak("cpu", "fp32", cache=False)
    assert peak is not None
    rate = peak.flops_per_s("fp32")
    assert rate is not None
    assert rate > 0


def test_measuring_again_keeps_the_better_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([100e9, 80e9, 150e9])

    def best(*args: object, **kwargs: object) -> ProductRate:
        return ProductRate(shape=(64, 64, 64), flops_per_s=next(rates), calls=3)

    monkeypatch.setattr(measure, "best_product_rate", best)
    monkeypatch.setattr(measure, "copy_rate", lambda *args, **kwargs: 1e10)
    first = measure_peak(CPU, "fp32")
    assert first is not None
    assert first.flops_per_s("fp32") == 100e9
    for expected in (100e9, 150e9):
        again = measure.remeasure_peak(CPU, "fp32")
        saved = cached_peak(CPU, "fp32")
        assert again is not None
        assert saved is not None
        assert again.flops_per_s("fp32") == saved.flops_per_s("fp32") == expected


def test_measuring_again_gives_none_where_nothing_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "best_product_rate", lambda *args, **kwargs: None)
    assert measure.remeasure_peak(CPU, "fp32") is None
