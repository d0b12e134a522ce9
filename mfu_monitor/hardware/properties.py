"""What a torch device says of itself, as a small frozen record, so that lookups can be tested without it."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from mfu_monitor.errors import must_pass

__all__ = ["DeviceProperties", "read_properties"]

_XE_VECTOR_ENGINES_PER_CORE = (
    8  # Xe-HPC and Xe2; https://www.intel.com/content/www/us/en/docs/oneapi/optimization-guide-gpu/
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """One torch device as its driver describes it; None where the driver does not say.

    Example:
        >>> DeviceProperties(name="NVIDIA H100 80GB HBM3", sm_count=132, compute_capability=(9, 0))
    """

    name: str
    sm_count: int | None = None
    """Streaming multiprocessors (NVIDIA), compute units (AMD) or Xe cores (Intel) that this torch device sees."""
    compute_capability: tuple[int, int] | None = None
    """NVIDIA only: ``(9, 0)``."""
    gcn_arch: str | None = None
    """AMD only: ``"gfx942"``, feature flags cut."""
    memory_bytes: int | None = None
    clock_khz: int | None = None
    """Maximum SM clock by the driver's device attribute; not the current clock."""
    device_type: str = ""


def read_properties(device: torch.device) -> DeviceProperties | None:
    """Ask torch what the device is; None if the device cannot be asked (no driver, no such index, no name).

    Never initialises another backend than the device's own, moves no tensor and waits for nothing.
    """
    readers = {"cuda": _read_cuda, "xpu": _read_xpu, "mps": _read_mps, "cpu": _read_cpu}
    try:
        return readers.get(device.type, _read_other)(device)
    except Exception as error:  # a broken driver raises whatever it likes; unknown is None
        if must_pass(error):
            raise
        return None


def _read_cuda(device: torch.device) -> DeviceProperties:
    found: Any = torch.cuda.get_device_properties(device)
    is_rocm = torch.version.hip is not None
    arch = str(getattr(found, "gcnArchName", "") or "").split(":")[0]
    return DeviceProperties(
        name=str(found.name),
        sm_count=int(found.multi_processor_count),
        compute_capability=None if is_rocm else (int(found.major), int(found.minor)),
        gcn_arch=arch or None if is_rocm else None,
        memory_bytes=int(found.total_memory),
        clock_khz=getattr(found, "clock_rate", None),
        device_type="cuda",
    )


def _read_xpu(device: torch.device) -> DeviceProperties:
    found: Any = torch.xpu.get_device_properties(device)
    engines = getattr(found, "max_compute_units", None)
    return DeviceProperties(
        name=str(found.name),
        sm_count=int(engines) // _XE_VECTOR_ENGINES_PER_CORE if engines else None,
        memory_bytes=getattr(found, "total_memory", None),
        device_type="xpu",
    )


def _read_mps(device: torch.device) -> DeviceProperties:
    """MPS has no name of its own: the chip's brand string names the GPU too."""
    answer = subprocess.run(
        ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, timeout=5, check=True
    )
    return DeviceProperties(name=answer.stdout.strip(), device_type=device.type)


def _read_cpu(device: torch.device) -> DeviceProperties:
    return DeviceProperties(name=_cpu_model_name(), device_type=device.type)


def _cpu_model_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError as error:
        if must_pass(error):
            raise
    return platform.processor() or platform.machine() or "CPU"


def _read_other(device: torch.device) -> DeviceProperties | None:
    """Backends that come as extensions: ``torch.hpu``, ``torch.npu``; XLA names its device itself."""
    if device.type == "xla":
        from torch_xla.core import xla_model  # type: ignore[import-not-found,unused-ignore]

        return DeviceProperties(name=str(xla_model.xla_device_hw(device)), device_type="xla")
    backend = getattr(torch, device.type, None)
    if backend is None or not hasattr(backend, "get_device_name"):
        return None
    return DeviceProperties(name=str(backend.get_device_name(device)), device_type=device.type)
