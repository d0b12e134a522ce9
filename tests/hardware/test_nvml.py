"""NVML through a stand-in for its module."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from mfu_monitor.hardware.nvml import NvmlReading, read_nvml

CUDA = torch.device("cuda:0")


class FakeNvml(types.ModuleType):
    """Answers as the real module does: MHz, milliwatts, degrees, a bit mask."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.calls: list[str] = []
        self.answers = {
            "nvmlDeviceGetPowerUsage": 512_300,
            "nvmlDeviceGetEnforcedPowerLimit": 600_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetClockInfo": 1410,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4 | 0x1,
        }

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.calls.append(uuid)
        return "handle"

    def __getattr__(self, name: str) -> object:
        answers = self.__dict__["answers"]
        if name not in answers:
            raise AttributeError(name)
        return lambda handle, *arguments: answers[name]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="abc-1"))
    return fake


def test_the_state_is_read_in_plain_units_by_uuid(nvml: FakeNvml) -> None:
    reading = read_nvml(CUDA)
    assert reading == NvmlReading(
        sm_clock_mhz=1410,
        max_sm_clock_mhz=1980,
        power_w=512.3,
        power_limit_w=600,
        default_power_limit_w=700,
        temperature_c=71,
        clock_reasons=("gpu_idle", "sw_power_cap"),
    )
    assert nvml.calls == ["init", "GPU-abc-1", "shutdown"]


def test_idling_is_no_throttling(nvml: FakeNvml) -> None:
    reading = read_nvml(CUDA)
    assert reading is not None
    assert reading.throttle_reasons == ("sw_power_cap",)
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x1
    idle = read_nvml(CUDA)
    assert idle is not None
    assert idle.throttle_reasons == ()


def test_a_query_that_the_part_does_not_support_is_none(nvml: FakeNvml) -> None:
    del nvml.answers["nvmlDeviceGetTemperature"]
    reading = read_nvml(CUDA)
    assert reading is not None
    assert reading.temperature_c is None
    assert reading.power_w == 512.3


def test_a_device_that_nvml_does_not_know_is_none_and_nvml_is_shut_down(nvml: FakeNvml) -> None:
    def unknown(uuid: str) -> str:
        raise RuntimeError("not found")

    nvml.__dict__["nvmlDeviceGetHandleByUUID"] = unknown
    assert read_nvml(CUDA) is None
    assert nvml.calls == ["init", "shutdown"]


def test_without_the_extra_or_on_another_device_there_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml(CUDA) is None
    assert read_nvml(torch.device("cpu")) is None


def test_a_reading_goes_into_json_as_plain_types(nvml: FakeNvml) -> None:
    reading = read_nvml(CUDA)
    assert reading is not None
    assert reading.to_dict()["clock_reasons"] == ["gpu_idle", "sw_power_cap"]
