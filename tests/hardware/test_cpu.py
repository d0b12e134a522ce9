"""A CPU's range: cores x clock x FLOP per cycle, read off /proc/cpuinfo."""

from __future__ import annotations

import dataclasses

import pytest

from mfu_monitor.hardware.cpu import CpuDescription, cpu_peak_range, describe_cpu, read_cpu

XEON = """processor\t: {n}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) {sku} CPU @ 2.50GHz
cpu MHz\t\t: 3100.000
physical id\t: 0
core id\t\t: {core}
flags\t\t: fpu avx2 fma avx512f avx512_vnni
"""


def xeon(sku: str = "Platinum 8259CL", threads: int = 4) -> str:
    """Two threads a core, as /proc/cpuinfo lists them."""
    return "\n".join(XEON.format(n=n, sku=sku, core=n % (threads // 2)) for n in range(threads))


def test_smt_siblings_count_as_one_core_and_only_allowed_ones_count() -> None:
    assert describe_cpu(xeon(), allowed_cpus={0, 1, 2, 3}).cores == 2
    assert describe_cpu(xeon(), allowed_cpus={0, 2}).cores == 1
    assert describe_cpu(xeon(), allowed_cpus=set()).cores is None


def test_the_range_goes_from_base_to_boost_clock() -> None:
    cpu = describe_cpu(xeon(), allowed_cpus={0, 1}, high_clock_hz=3.5e9)
    found = cpu_peak_range(cpu)
    assert found is not None
    # Cascade Lake with two AVX-512 units: 2 units x 16 lanes x 2 = 64 FLOP a cycle and core.
    assert found.low_flops_per_s_by_precision["fp32"] == pytest.approx(2 * 2.5e9 * 64)
    assert found.high_flops_per_s_by_precision is not None
    assert found.high_flops_per_s_by_precision["fp64"] == pytest.approx(2 * 3.5e9 * 32)
    assert "bf16" not in found.low_flops_per_s_by_precision
    assert found.confidence == "low"
    assert "2 cores x 2.50 GHz to 3.50 GHz" in found.source


def test_without_a_boost_clock_there_is_no_upper_end() -> None:
    found = cpu_peak_range(describe_cpu(xeon(), allowed_cpus={0}))
    assert found is not None
    assert found.high_flops_per_s_by_precision is None
    assert "unknown boost clock" in found.source


@pytest.mark.parametrize(
    ("cpu", "fp32", "bf16"),
    [
        (CpuDescription(vendor="GenuineIntel", flags=frozenset({"avx2", "fma"})), 32, None),
        (CpuDescription(vendor="GenuineIntel", flags=frozenset({"avx512f", "avx512_bf16", "amx_bf16"})), 64, 1024),
        (CpuDescription(flags=frozenset({"avx512f", "avx512_vnni"}), model_name="Xeon Silver 4214"), 32, None),
        (CpuDescription(vendor="AuthenticAMD", family=25, flags=frozenset({"avx2", "fma", "avx512_bf16"})), 32, 64),
        (CpuDescription(vendor="AuthenticAMD", family=26, flags=frozenset({"avx2", "fma", "avx512_bf16"})), 64, 128),
        (CpuDescription(vendor="AuthenticAMD", family=26, model_name="AMD Ryzen AI 9 HX 370"), 32, 64),
        (CpuDescription(vendor="AuthenticAMD", family=23, model=1, flags=frozenset({"avx2", "fma"})), 16, None),
        (CpuDescription(vendor="AuthenticAMD", family=23, model=49, flags=frozenset({"avx2", "fma"})), 32, None),
        (CpuDescription(arm_part="0xd40"), 32, 128),
        (CpuDescription(arm_part="0xd0c"), 16, None),
    ],
)  # fmt: skip
def test_the_chip_decides_flop_per_cycle(cpu: CpuDescription, fp32: int, bf16: int | None) -> None:
    found = cpu_peak_range(dataclasses.replace(cpu, cores=1, low_clock_hz=1e9))
    assert found is not None
    assert found.low_flops_per_s_by_precision["fp32"] == fp32 * 1e9
    assert found.low_flops_per_s_by_precision.get("bf16") == (bf16 * 1e9 if bf16 else None)


def test_an_unknown_chip_has_no_range() -> None:
    assert cpu_peak_range(CpuDescription(cores=8, low_clock_hz=3e9)) is None
    assert cpu_peak_range(CpuDescription(flags=frozenset({"avx2", "fma"}), low_clock_hz=3e9)) is None


def test_this_machine_can_be_read_without_an_error() -> None:
    cpu = read_cpu()
    assert cpu.cores is None or cpu.cores >= 1
