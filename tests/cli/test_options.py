"""A flag is spelled the same in every command; older spellings are read, and help does not show them."""

from __future__ import annotations

import json
import re

import pytest

from mfu_monitor.cli import main

SEVENTY = ("estimate", "--tokens", "15T", "--mfu", "0.4", "--json")


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (
            (*SEVENTY, "--params", "70B", "--gpu", "H100 SXM", "--gpus", "8"),
            (*SEVENTY, "--parameters", "70B", "--device", "H100 SXM", "--devices", "8"),
        ),
        (
            (*SEVENTY, "--active-params", "7B", "--gpu", "H100 SXM"),
            (*SEVENTY, "--active-parameters", "7B", "--device", "H100 SXM"),
        ),
        (
            ("roofline", "matmul", "-m", "64", "-n", "64", "-k", "64", "--gpu", "H100 SXM", "--precision", "fp16"),
            ("roofline", "matmul", "--m", "64", "--n", "64", "--k", "64", "--device", "H100 SXM", "--dtype", "fp16"),
        ),
        (("peaks", "--gpu", "H100 SXM", "--json"), ("peaks", "H100 SXM", "--json")),
    ],
)
def test_older_spellings_mean_the_same(
    capsys: pytest.CaptureFixture[str], now: tuple[str, ...], before: tuple[str, ...]
) -> None:
    assert out(capsys, *now) == out(capsys, *before)


@pytest.mark.parametrize("command", ["audit", "bench", "count", "estimate", "peaks", "roofline ridge"])
def test_help_shows_one_spelling(capsys: pytest.CaptureFixture[str], command: str) -> None:
    shown = set(re.findall(r"--[a-z][a-z-]*", out(capsys, *command.split(), "--help")))
    assert "--gpu" in shown
    assert shown.isdisjoint({"--device", "--dtype", "--parameters", "--active-parameters"})
    assert command == "peaks" or "--devices" not in shown


def test_every_command_answers_a_products_name_alike(capsys: pytest.CaptureFixture[str]) -> None:
    # 989.4e12 FLOP/s: NVIDIA's H100 datasheet, bf16 dense.
    peaks = json.loads(out(capsys, "peaks", "H100 SXM", "--json"))
    estimate = json.loads(out(capsys, *SEVENTY, "--params", "70B", "--gpu", "H100 SXM"))
    audit = json.loads(
        out(capsys, "audit", "--params", "7B", "--tokens-per-s", "9k", "--gpu", "H100 SXM", "--json")
    )  # 7e9 x 6 x 9e3 = 378e12 FLOP/s: 38%
    assert peaks["dense_flops_per_s"]["bf16"] == estimate["peak_flops_per_s"] == audit["peak_flops_per_s"] == 989.4e12
    assert peaks["device_name"] == estimate["device"] == audit["device_name"] == "H100 SXM5 80GB"
