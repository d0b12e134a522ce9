"""Published runs, each claim against what the run's other figures imply; docs/audits.md has the table and the sources.

Arithmetic by hand: 6 N D over GPU-hours x 3600 x peak, attention 12 L w S a token beside 6 N.
"""

from __future__ import annotations

from typing import Any

import pytest

from mfu_monitor.cli.audit.audit_run import AuditFacts, AuditReport, audit_run
from mfu_monitor.cli.devices import find_device

A100 = find_device("A100 SXM 80GB", precision="bf16")
A100_40 = find_device("A100 SXM 40GB", precision="bf16")
H800 = find_device("H800 SXM", precision="bf16")
DAY_S = 86400.0


def shape(layers: int, heads: int, width: int, length: int = 2048) -> dict[str, Any]:
    return {"layers": layers, "heads": heads, "head_width": width // heads, "sequence_length": length}


def audit(**facts: Any) -> AuditReport:
    return audit_run(AuditFacts(**facts))


def claim(report: AuditReport, name: str, convention: str = "") -> float:
    (found,) = [c for c in report.claims if c.name == name and c.convention == convention]
    return found.ratio


@pytest.mark.parametrize(("gpus", "step_s", "tflops"), [(2240, 60.1, 126), (2800, 50.2, 121), (3360, 44.4, 113)])
def test_mt_nlg_530b_counts_the_recomputed_forward_and_the_full_square(gpus: int, step_s: float, tflops: int) -> None:
    report = audit(
        peak=A100, parameters=530e9, gpus=gpus, tokens_per_step=1920 * 2048, step_s=step_s, recompute=1.0,
        device_hardware_flops_per_s=tflops * 1e12, **shape(105, 128, 20480),
    )  # fmt: skip
    per_token = 6 * 530e9 + 12 * 105 * 20480 * 2048
    hardware = 4 / 3 * per_token * 1920 * 2048 / step_s / gpus
    name = "reported hardware FLOP/s per GPU"
    assert claim(report, name, "PaLM") == pytest.approx(tflops * 1e12 / hardware)
    assert claim(report, name, "PaLM") == pytest.approx(1, abs=0.015)
    assert report.verdict == "plausible"


def test_bloom_176b_sustained_less_than_its_best_step() -> None:
    report = audit(
        peak=A100, parameters=176.247e9, tokens=366e9, gpu_hours=1_082_990, gpus=384, recompute=1.0,
        device_hardware_flops_per_s=156e12, **shape(70, 112, 14336),
    )  # fmt: skip
    assert report.mfu_6nd == pytest.approx(6 * 176.247e9 * 366e9 / (1_082_990 * 3600 * 312e12))
    assert report.mfu_6nd == pytest.approx(0.318, abs=0.0005)
    assert claim(report, "reported hardware FLOP/s per GPU", "PaLM") == pytest.approx(1.15, abs=0.01)


def test_gpt_neox_20bs_rate_agrees_with_its_hours_within_a_tenth() -> None:
    report = audit(
        peak=A100_40, parameters=20.556e9, tokens=150_000 * 1538 * 2048, elapsed_s=1830 * 3600, gpus=96, recompute=1.0,
        device_hardware_flops_per_s=117e12, **shape(44, 64, 6144),
    )  # fmt: skip
    assert report.mfu_6nd == pytest.approx(6 * 20.556e9 * 150_000 * 1538 * 2048 / (96 * 1830 * 3600 * 312e12))
    assert claim(report, "reported hardware FLOP/s per GPU", "PaLM") == pytest.approx(0.90, abs=0.01)


def test_opt_175bs_47_percent_is_given_under_no_convention_that_was_not_computed() -> None:
    report = audit(peak=A100, gpus=992, parameters=175e9, device_flops_per_s=147e12)
    assert report.mfu == pytest.approx(147 / 312)
    assert (report.mfu_6nd, report.mfu_palm, report.mfu_exact) == (None, None, None)


@pytest.mark.parametrize(
    ("peak", "parameters", "tokens", "gpu_hours", "mfu"),
    [
        pytest.param(A100, 70e9, 2e12, 1_720_320, 0.435, id="Llama 2 70B"),
        pytest.param(A100_40, 180e9, 3.5e12, 7e6, 0.481, id="Falcon-180B"),
        pytest.param(A100_40, 6.65e9, 1e12, 440 * 9.5 * 24, 0.354, id="MPT-7B"),
        pytest.param(H800, 37e9, 14.8e12, 2.664e6, 0.346, id="DeepSeek-V3, bf16 peak"),
    ],
)
def test_runs_by_tokens_and_gpu_hours(
    peak: Any, parameters: float, tokens: float, gpu_hours: float, mfu: float
) -> None:
    report = audit(peak=peak, parameters=parameters, tokens=tokens, gpu_hours=gpu_hours)
    assert report.mfu == pytest.approx(6 * parameters * tokens / (gpu_hours * 3600 * peak.flops_per_s("bf16")))
    assert report.mfu == pytest.approx(mfu, abs=0.002)
    assert (report.verdict, report.claims) == ("plausible", ())  # one figure out of the others claims nothing


def test_deepseek_v3s_mfu_is_half_at_the_fp8_peak_and_the_peak_is_named() -> None:
    facts: dict[str, Any] = {
        "peak": H800, "parameters": 671e9, "active_parameters": 37e9, "tokens": 14.8e12, "gpu_hours": 2.664e6,
    }  # fmt: skip
    at_fp8 = audit(precision="fp8", reported_mfu=0.346, **facts)
    assert at_fp8.mfu == pytest.approx(0.173, abs=0.001)
    (found,) = [c for c in at_fp8.claims if c.name == "reported MFU"]
    assert "bf16 peak" in found.explanation


def test_a_palm_figure_with_the_bf16_peak_under_fp8_is_named_in_each_convention() -> None:
    long: dict[str, Any] = {"peak": H800, "precision": "fp8", "parameters": 7e9, "tokens_per_s": 5000.0}
    per_token = 6 * 7e9 + 12 * 32 * 4096 * 32768
    report = audit(reported_mfu=per_token * 5000 / 989.4e12, **long, **shape(32, 32, 4096, 32768))
    by = {c.convention: c for c in report.claims if c.name == "reported MFU"}
    assert by["PaLM"].explanation.startswith("the bf16 peak")
    assert by["PaLM"].is_nearest
    assert "the bf16 peak" in by["exact"].explanation
    assert "the PaLM convention" in by["exact"].explanation
    assert report.verdict != "contradicted"


def test_a_claim_that_nothing_explains_is_a_contradiction() -> None:
    odd = audit(peak=A100, parameters=7e9, tokens_per_s=400, reported_mfu=0.361, **shape(32, 32, 4096))
    assert odd.verdict == "contradicted"
    sentence = next(c for c in odd.claims if c.is_nearest).sentence()
    assert "times what its own inputs give" in sentence
    assert "no known cause explains it" in sentence


def test_a_usual_peak_and_eight_gpus_are_tried() -> None:
    rate, n = 10_000.0, 7e9
    of_a100 = audit(peak=H800, parameters=n, tokens_per_s=rate, reported_mfu=6 * n * rate / 312e12)
    assert "A100's peak" in of_a100.claims[0].explanation
    both = audit(peak=H800, parameters=n, tokens_per_s=rate / 4, reported_mfu=8 * 6 * n * rate / 4 / 312e12)
    assert "A100's peak" in both.claims[0].explanation
    assert "8 GPUs" in both.claims[0].explanation


def test_days_hours_and_tokens_are_held_against_each_other() -> None:
    facts: dict[str, Any] = {"peak": A100, "parameters": 70e9, "gpus": 1024}
    agree = audit(tokens=100e9, tokens_per_s=400_000.0, elapsed_s=250_000.0, gpu_hours=1024 * 250_000 / 3600, **facts)
    assert [c.agrees for c in agree.claims] == [True, True]
    off = audit(tokens=100e9, tokens_per_s=400_000.0, elapsed_s=500_000.0, **facts)
    assert off.verdict == "contradicted"
    assert off.claims[0].ratio == pytest.approx(0.5)
