"""``mfu-monitor roofline`` prints the lessons' figures to the digits given.

The lessons take the H100 SXM's sheet figure as 989 TFLOP/s; the table keeps 989.4, which reproduces from its SM count
and clock. Only the compute-bound lesson shows the difference (989.0 and 555.9 us against 989.4 and 555.6 us), so that
one is asked for with the lesson's own peak, ``--peak-tflops 989``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mfu_monitor.cli import main
from mfu_monitor.cli.kernels import ELEMENTWISE, attention, elementwise, matmul

H100 = ("--gpu", "NVIDIA H100 80GB HBM3")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["roofline", *arguments])
    assert caught.value.code == 0
    return capsys.readouterr().out


def row(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The figures of the last line: FLOP/B, TFLOP/s, bound, us."""
    return run(capsys, *arguments).splitlines()[-1].split()[-4:]


def kernels(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    answer = json.loads(run(capsys, *arguments, "--json"))
    return {kernel["kernel"].strip(): kernel for kernel in answer["kernels"]}


def test_adding_16m_elements_is_bound_by_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert row(capsys, "add", "--elements", "16,777,216", *H100) == ["0.2", "0.6", "memory", "30.0"]


@pytest.mark.parametrize(
    ("rows", "figures"),
    [
        ("1", ["1.0", "3.3", "memory", "40.1"]),
        ("64", ["63.0", "211.1", "memory", "40.7"]),
        ("256", ["240.9", "807.2", "memory", "42.6"]),
        ("4096", ["2048.0", "989.4", "compute", "555.6"]),
    ],
)
def test_products_with_8192_go_from_memory_to_compute(
    capsys: pytest.CaptureFixture[str], rows: str, figures: list[str]
) -> None:
    assert row(capsys, "matmul", "-m", rows, "-n", "8192", "-k", "8192", *H100) == figures


def test_the_compute_bound_product_with_the_lessons_rounded_peak(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("matmul", "-m", "4096", "-n", "8192", "-k", "8192", *H100, "--peak-tflops", "989")
    assert row(capsys, *arguments) == ["2048.0", "989.0", "compute", "555.9"]


def test_several_rows_come_in_one_table_with_the_ridge_above(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "matmul", "-m", "1", "-m", "64", "-n", "8192", "-k", "8192", *H100)
    assert "bf16 989.4 TFLOP/s dense, 3.35 TB/s, ridge 295" in out.splitlines()[0]
    assert len(out.splitlines()) == 4


@pytest.mark.parametrize(("precision", "ridge"), [("bf16", 295), ("fp8", 591)])
def test_ridge_points_of_the_h100(capsys: pytest.CaptureFixture[str], precision: str, ridge: int) -> None:
    lines = {line.split()[0]: line.split()[-1] for line in run(capsys, "ridge", *H100).splitlines()[2:]}
    assert lines[precision] == str(ridge)


def test_ridge_point_of_the_a100(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(run(capsys, "ridge", "--gpu", "NVIDIA A100-SXM4-80GB", "--json"))
    assert round(answer["ridge_points"]["bf16"]) == 153


@pytest.mark.parametrize(
    ("arguments", "intensity"),
    [
        (("gelu", "--elements", "1M"), 2),  # 8 operations on 2 + 2 bytes
        (("matmul", "-m", "4096", "-n", "4096", "-k", "4096"), 1365),  # 4096 / 3
        (("matmul", "-m", "1", "-n", "8192", "-k", "8192"), 1),  # decode: each weight is used once
        (("matmul", "-m", "8192", "-n", "32768", "-k", "8192"), 3641),  # MLP up-projection
    ],
)
def test_intensities_of_the_lessons(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], intensity: int
) -> None:
    (kernel,) = kernels(capsys, *arguments, *H100).values()
    assert round(kernel["arithmetic_intensity"]) == intensity


def test_flash_attention_is_bound_by_compute_where_materialised_attention_is_bound_by_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways = kernels(capsys, "attention", "--sequence-length", "8192", "--head-width", "128", *H100)
    s, d = 8192, 128
    flash, materialised = ways["flash"], ways["materialised"]
    assert flash["flops"] == 4 * s * s * d
    assert flash["bytes_accessed"] == 4 * s * d * 2
    assert flash["arithmetic_intensity"] == s / 2
    assert flash["bound"] == "compute"
    assert materialised["bytes_accessed"] == (4 * s * d + 4 * s * s) * 2
    assert materialised["bound"] == "memory"
    parts = [ways[name]["ideal_time_us"] for name in ("scores", "softmax", "values")]
    assert materialised["ideal_time_us"] == pytest.approx(sum(parts))
    assert materialised["ideal_time_us"] > 4 * flash["ideal_time_us"]


def test_causal_masking_halves_the_work_of_flash_only() -> None:
    dense, causal = (attention(7, 4, "bf16", heads=2, batch=3, causal=flag) for flag in (False, True))
    assert causal["flash"][0].flops == 6 * 4 * (7 * 8 // 2) * 4
    assert dense["flash"][0].flops == 6 * 4 * 49 * 4
    assert causal["materialised"] == dense["materialised"]


@pytest.mark.parametrize(
    ("name", "operations", "moved"),
    [("add", 1, 3), ("mul", 1, 3), ("relu", 1, 2), ("gelu", 8, 2), ("silu", 4, 2), ("softmax", 5, 2),
     ("layernorm", 7, 2), ("rmsnorm", 4, 2)],
)  # fmt: skip
def test_elementwise_kernels_by_operations_and_tensors(name: str, operations: int, moved: int) -> None:
    kernel = elementwise(name, 1000, "fp32")
    assert kernel.flops == operations * 1000
    assert kernel.bytes_accessed == moved * 4 * 1000
    assert not kernel.on_matrix_units


def test_every_elementwise_kernel_has_a_command_and_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind in ELEMENTWISE.items():
        assert kind.source
        assert row(capsys, name, "--elements", "1k", *H100)[2] == "memory"


def test_narrow_products_are_written_wider_unless_said_otherwise() -> None:
    assert matmul(2, 3, 5, "fp8").bytes_accessed == 2 * 5 + 5 * 3 + 2 * 3 * 2  # bf16 result
    assert matmul(2, 3, 5, "fp8", output_dtype="fp8").bytes_accessed == 2 * 5 + 5 * 3 + 2 * 3
    assert matmul(2, 3, 5, "fp4").bytes_accessed == 25 // 2 + 1 + 12  # half a byte each, rounded up
    assert matmul(2, 3, 5, "bf16", batch=4).flops == 4 * 2 * 2 * 3 * 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "--elements", "1M"), "give --gpu"),
        (("add", "--elements", "1.5", *H100), "--elements is '1.5'; expected a whole number"),
        (("add", "--elements", "many", *H100), "--elements is 'many'; expected a number above zero"),
        (("add", "--elements", "1M", "--precision", "bf17", *H100), "dtype is 'bf17'; expected one of fp64, fp32"),
        (("matmul", "-m", "0", "-n", "8", "-k", "8", *H100), "--m is '0'"),
        (("matmul", "-m", "8", "-n", "8", "-k", "8", "--output-dtype", "x", *H100), "expected one of fp64"),
        (("matmul", "-m", "8", "-n", "8", "-k", "8", "--gpu", "A100 SXM4"), "choose one of A100 SXM4 40GB"),
        (("add", "--elements", "1M", "--gpu", "H100"), "choose one of"),
        (("add", "--elements", "1M", "--gpu", "CocoNut"), "give --peak-tflops (dense) and --bandwidth-tb-s"),
        (("matmul", "-m", "1e308", "-n", "8", "-k", "8", *H100), "--m is '1e308'; expected a whole number up to 1e+18"),
        (("ridge", *H100, "--bandwidth-tb-s", "3.35e12"), "expected units of 10^12 a second, such as 3.35"),
    ],
)
def test_wrong_input_goes_to_stderr_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["roofline", *arguments])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in " ".join(captured.err.replace("│", " ").split())


def test_figures_of_ones_own_need_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    own = ("--peak-tflops", "100", "--bandwidth-tb-s", "1")
    assert row(capsys, "matmul", "-m", "600", "-n", "600", "-k", "600", *own) == ["200.0", "100.0", "compute", "4.3"]
