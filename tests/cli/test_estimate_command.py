"""``mfu-monitor estimate`` prints the lessons' figures to the digits given and refuses what does not fit together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mfu_monitor.cli import main

SEVENTY = ("--params", "70e9", "--tokens", "15e12", "--gpu", "NVIDIA H100 80GB HBM3", "--mfu", "0.40")
FOUR_HUNDRED = ("--params", "400B", "--tokens", "8T", "--gpu", "H100 SXM", "--mfu", "35%")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["estimate", *arguments])
    assert caught.value.code == 0
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(capsys, *arguments, "--json"))
    return values


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["estimate", *arguments])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    # click draws a box around its own messages and wraps them at the terminal's width
    return " ".join(captured.err.replace("│", " ").split())


def test_the_70b_lesson_is_printed_to_its_digits(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {
        line[:18].strip(): line[18:].strip()
        for line in run(capsys, *SEVENTY, "--gpus", "8192", "--price", "2").splitlines()
    }
    assert lines["model FLOPs"] == "6.3e+24"
    assert lines["GPU-hours"] == "4,421,872 (4.42M)"  # 6.3e24 / (989.4e12 x 0.40 x 3600)
    assert lines["devices"] == "8,192"
    assert "22.5 days" in lines.values()
    assert "8,843,744 (8.84M)" in lines.values()


def test_the_70b_lesson_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(capsys, *SEVENTY, "--gpus", "8192", "--price", "2")
    assert f"{plan['flops']:.1e}" == "6.3e+24"
    assert f"{plan['device_hours']:.1e}" == "4.4e+06"
    assert f"{plan['wall_clock_days']:.1f}" == "22.5"
    assert f"{plan['cost'] / 1e6:.1f}" == "8.8"
    assert plan["peak_source"].startswith("table: ")


def test_the_400b_lesson_in_fp8_and_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = run_json(capsys, *FOUR_HUNDRED, "--precision", "fp8", "--days", "30")
    assert f"{fp8['device_hours']:.1e}" == "7.7e+06"
    assert round(fp8["devices"], -2) == 10_700
    bf16 = run_json(capsys, *FOUR_HUNDRED, "--precision", "bf16")
    assert f"{bf16['device_hours']:.2e}" == "1.54e+07"
    assert bf16["devices"] is None
    assert bf16["cost"] is None


def test_devices_and_days_give_the_mfu_that_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--params", "70B", "--tokens", "15T", "--gpu", "H100 SXM", "--gpus", "8192")
    needed = run_json(capsys, *arguments, "--days", "22.5")["mfu"]
    assert needed == pytest.approx(6.3e24 / (989.4e12 * 8192 * 22.5 * 86400))
    assert "impossible: this needs" in run(capsys, *arguments, "--days", "5")
    assert "above what published training runs reach" in run(capsys, *arguments, "--days", "14")
    assert "above what" not in run(capsys, *arguments, "--days", "30")


def test_a_mixture_counts_its_active_parameters_and_the_rest_of_a_run_its_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ("--tokens", "15T", "--gpu", "H800 SXM", "--mfu", "0.3")
    mixture = run_json(capsys, *common, "--params", "671B", "--active-params", "37B")
    assert mixture["flops"] == pytest.approx(6 * 37e9 * 15e12)
    rest = run_json(capsys, *common, "--active-params", "37B", "--tokens-done", "12T")
    assert rest["flops"] == pytest.approx(6 * 37e9 * 3e12)


def test_the_attention_term_follows_the_sequence_length_and_the_convention(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--layers", "80", "--width", "8192", "--sequence-length", "8192")
    without = run_json(capsys, *SEVENTY)
    assert "without the attention term" in without["notes"][0]
    exact = run_json(capsys, *SEVENTY, *shape)
    palm = run_json(capsys, *SEVENTY, *shape, "--convention", "palm")
    assert exact["flops"] - without["flops"] == pytest.approx(15e12 * 12 * 80 * 8192 * 8193 / 2)
    assert palm["flops"] - without["flops"] == pytest.approx(15e12 * 12 * 80 * 8192 * 8192)


def test_a_peak_of_ones_own_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_json(capsys, "--params", "7B", "--tokens", "1T", "--peak-tflops", "500", "--mfu", "0.5")
    assert plan["device_hours"] == pytest.approx(6 * 7e9 * 1e12 / (500e12 * 0.5) / 3600)
    assert plan["peak_source"] == "user"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", "15T", "--gpu", "H100 SXM", "--mfu", "0.4"), "give --params"),
        (("--params", "70B", "--tokens", "15T", "--mfu", "0.4"), "give --gpu"),
        ((*SEVENTY, "--gpus", "8", "--days", "3"), "leave one out"),
        (("--params", "70B", "--tokens", "15T", "--gpu", "H100 SXM"), "neither an MFU"),
        ((*SEVENTY[:-1], "40"), "--mfu is '40'; expected a fraction above 0 and at most 1, such as 0.40 or 40%"),
        (("--params", "seventy", *SEVENTY[2:]), "--params is 'seventy'; expected a number above zero"),
        ((*SEVENTY, "--gpus", "1.5"), "--gpus is '1.5'; expected a whole number"),
        ((*SEVENTY, "--price", "-2"), "--price is '-2'"),
        ((*SEVENTY, "--layers", "80"), "missing: --width, --sequence-length"),
        ((*SEVENTY, "--active-params", "80B"), "--active-params is 80B of --params 70B"),
        ((*SEVENTY, "--tokens-done", "15T"), "--tokens-done is 15T of --tokens 15T; expected fewer"),
        ((*SEVENTY[:4], "--gpu", "CocoNut 9000", "--mfu", "0.4"), "'CocoNut 9000' is not in the table of peaks"),
        ((*SEVENTY[:4], "--gpu", "H100", "--mfu", "0.4"), "choose one of: H100 SXM5 80GB, H100 PCIe 80GB"),
        ((*SEVENTY[:4], "--gpu", "V100 SXM2", "--mfu", "0.4"), "has no bf16 unit"),
        ((*SEVENTY, "--precision", "bf17"), "bf17"),
        ((*SEVENTY, "--convention", "dense"), "--convention is 'dense'; expected exact or palm"),
        ((*SEVENTY, "--gpus", "1e300"), "--gpus is '1e300'; expected a whole number up to 1e+18"),
        (
            (*SEVENTY[:4], "--gpu", "CocoNut 9000", "--mfu", "0.4"),
            "for another device give --peak-tflops 989 (dense)",
        ),
        ((*SEVENTY, "--peak-tflops", "989T"), "expected units of 10^12 a second, such as 989"),
    ],
)
def test_wrong_input_goes_to_stderr_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in refuse(capsys, *arguments)
