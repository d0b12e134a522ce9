"""The audit gives published runs their published figures, and finds what is wrong in a report. Arithmetic by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.cli.audit.audit_run import AuditFacts, AuditReport, CannotJudgeError, LogSeries, audit_run
from mfu_monitor.cli.devices import find_device
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak

H100 = find_device("H100 SXM", precision="bf16")
A100 = find_device("A100 SXM 80GB", precision="bf16")
TPU_V4 = find_device("TPU v4", precision="bf16")
DAY_S = 86400.0


def audit(**facts: Any) -> AuditReport:
    return audit_run(AuditFacts(**{"peak": H100, **facts}))


def codes(report: AuditReport) -> list[str]:
    return [d.code for d in report.diagnoses]


# Published runs from their published inputs.


def test_palm_540b_is_audited_to_its_published_mfu() -> None:
    """Chowdhery et al. 2022, "PaLM", https://arxiv.org/abs/2204.02311, section 4.1 and appendix B.

    238.3K tokens/s on 6144 TPU v4 at 275 TFLOP/s; 540.35e9 parameters, 118 layers, 48 heads of 256, 2048 tokens.
    Published: 45.7% without attention, 46.2% with it; HFU 57.8% with rematerialisation.
    """
    report = audit(
        peak=TPU_V4,
        parameters=540.35e9,
        tokens_per_s=238.3e3,
        gpus=6144,
        layers=118,
        heads=48,
        head_width=256,
        sequence_length=2048,
        reported_mfu=0.462,
    )
    assert report.mfu_6nd == pytest.approx(6 * 540.35e9 * 238.3e3 / (6144 * 275e12))
    assert report.mfu_6nd == pytest.approx(0.457, abs=0.0005)
    assert report.mfu_palm == pytest.approx(0.462, abs=0.0005)
    attended = 12 * 118 * 48 * 256 * 2049 / 2
    assert report.mfu_exact == pytest.approx((6 * 540.35e9 + attended) * 238.3e3 / (6144 * 275e12))
    assert report.verdict == "plausible"
    assert report.diagnoses == ()


def test_megatrons_gpt3_175b_is_audited_to_its_published_rate() -> None:
    """Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    https://arxiv.org/abs/2104.04473, section 5.1: 175B parameters (96 layers, 96 heads of 128, 2048 tokens), 300B
    tokens on 1024 A100s in 34 days at 140 TFLOP/s per GPU, activations recomputed.

    Its formula counts the recomputed forward, so its 140 of 312 TFLOP/s, 44.9%, is an HFU. The 34 days are rounded.
    """
    report = audit(
        peak=A100,
        parameters=175e9,
        tokens=300e9,
        elapsed_s=34 * DAY_S,
        gpus=1024,
        layers=96,
        heads=96,
        head_width=128,
        sequence_length=2048,
        is_causal=False,
        recompute=1.0,
    )
    assert report.mfu_palm is not None
    assert report.hfu == pytest.approx(report.mfu_palm * 4 / 3)
    assert report.hfu == pytest.approx(140 / 312, abs=0.015)
    assert report.gpu_hours == 1024 * 34 * 24
    assert report.verdict == "plausible"


@pytest.mark.parametrize(("gpus", "tflops", "published"), [(8192, 430, 0.43), (16384, 400, 0.41), (16384, 380, 0.38)])
def test_llama_3_405b_is_audited_to_its_published_mfu(gpus: int, tflops: float, published: float) -> None:
    """Llama team 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783, table 4: TFLOPs/GPU and BF16 MFU
    on H100s at 8K GPUs, at 16K, and at 16K with 131,072 tokens. Printed figures are rounded to a whole percent."""
    report = audit(parameters=405e9, gpus=gpus, device_flops_per_s=tflops * 1e12, reported_mfu=published)
    assert report.mfu == pytest.approx(tflops / 989.4)
    assert report.mfu == pytest.approx(published, abs=0.01)
    assert report.verdict == "plausible"
    assert report.diagnoses == ()


def test_llama_3_70bs_gpu_hours_are_in_the_ballpark() -> None:
    """Llama 3 model card, https://github.com/meta-llama/llama3/blob/main/MODEL_CARD.md: 70B, 15T tokens, 6.4M H100
    hours. From the tokens at 40% (its larger sister ran at 38 to 43%): 6 x 70e9 x 15e12 / (989.4e12 x 0.40 x 3600) =
    4.42M, two thirds of the card's; from the card's hours: 27.6% over everything, failures and restarts included.
    """
    planned = audit(parameters=70e9, tokens=15e12, reported_mfu=0.40, price_per_gpu_hour=2.0)
    assert planned.gpu_hours == pytest.approx(4.42e6, rel=0.001)
    assert planned.cost == pytest.approx(8.84e6, rel=0.001)
    assert planned.gpu_hours is not None
    assert 0.5 < planned.gpu_hours / 6.4e6 < 1.5
    card = audit(parameters=70e9, tokens=15e12, gpu_hours=6.4e6, gpus=16384)
    assert card.mfu == pytest.approx(6 * 70e9 * 15e12 / (6.4e6 * 3600 * 989.4e12))
    assert card.mfu == pytest.approx(0.276, abs=0.001)
    assert card.verdict == "plausible"


# R1 and the verdicts.


def test_70b_at_3000_tokens_a_second_on_one_h100_is_impossible_and_both_inputs_are_named() -> None:
    report = audit(parameters=70e9, tokens_per_s=3000.0)
    assert report.verdict == "impossible"
    assert report.is_impossible
    (diagnosis,) = report.diagnoses
    for words in ("127.3%", "7e+10 parameters", "3,000 tokens/s", "1 GPU", "1,260 TFLOP/s", "989.4 TFLOP/s bf16 dense"):
        assert words in diagnosis.message


def test_at_900_tokens_a_second_it_is_plausible() -> None:
    report = audit(parameters=70e9, tokens_per_s=900.0)
    assert report.mfu == pytest.approx(0.38205, abs=1e-5)
    assert report.verdict == "plausible"
    assert report.diagnoses == ()


def test_a_high_mfu_is_suspicious_and_not_impossible() -> None:
    assert audit(parameters=70e9, tokens_per_s=1600.0).verdict == "suspicious"  # 67.9%


def test_an_hfu_above_the_peak_is_impossible_even_if_the_mfu_is_not() -> None:
    report = audit(parameters=70e9, tokens_per_s=2000.0, recompute=1.0)  # 84.9%, and 113.2% with the rerun forward
    assert report.hfu == pytest.approx(report.mfu * 4 / 3 if report.mfu else None)
    assert report.verdict == "impossible"
    assert "hfu_over_peak" in codes(report)


def test_a_mixture_of_experts_counts_its_active_parameters() -> None:
    report = audit(parameters=671e9, active_parameters=37e9, tokens_per_s=1500.0)
    assert report.mfu == pytest.approx(6 * 37e9 * 1500 / 989.4e12)


def test_selective_recomputation_runs_attentions_forward_again() -> None:
    shape = {"layers": 96, "heads": 96, "head_width": 128, "sequence_length": 2048, "is_causal": False}
    report = audit(peak=A100, parameters=175e9, tokens_per_s=149.0, recompute="selective", **shape)
    attention = 12 * 96 * 96 * 128 * 2048
    expected = (6 * 175e9 + attention + attention / 3) * 149 / 312e12
    assert report.hfu == pytest.approx(expected)


# What was reported.


def test_a_reported_mfu_over_the_peak_is_impossible_and_the_inputs_figure_is_given() -> None:
    report = audit(parameters=70e9, tokens_per_s=900.0, reported_mfu=1.2)
    assert report.verdict == "impossible"
    (diagnosis,) = [d for d in report.diagnoses if d.code == "mfu_over_peak"]
    assert "120.0%" in diagnosis.message
    assert "38.2%" in diagnosis.message


def test_half_of_what_the_inputs_give_is_consistent_with_two_faults_and_proves_neither() -> None:
    report = audit(parameters=70e9, tokens_per_s=900.0, reported_mfu=0.191)
    assert set(codes(report)) >= {"macs_as_flops", "sparse_peak"}
    assert all(d.severity == "note" and "not proven" in d.likely_cause for d in report.diagnoses)
    assert report.verdict == "plausible"


def test_the_peak_behind_the_report_proves_the_sparse_figure() -> None:
    report = audit(parameters=70e9, tokens_per_s=900.0, reported_mfu=0.191, reported_peak_flops_per_s=1979e12)
    first = report.diagnoses[0]
    assert (first.code, first.severity) == ("sparse_peak", "warning")
    assert report.verdict == "suspicious"


def test_a_report_that_counts_every_expert_is_named_and_another_ratio_is_not() -> None:
    # 671B of which 37B work on a token: 6 x 671e9 x 1500 tokens/s is 610% of an H100, 6 x 37e9 x 1500 is 33.7%.
    mixture: dict[str, Any] = {"parameters": 671e9, "active_parameters": 37e9, "tokens_per_s": 1500.0}
    report = audit(**mixture, reported_mfu=6 * 671e9 * 1500 / 989.4e12)
    assert report.diagnoses[0].code == "wrong_N"
    assert "every expert" in report.diagnoses[0].likely_cause
    assert "33.7%" in report.diagnoses[0].message
    assert "wrong_N" not in codes(audit(**mixture, reported_mfu=3.0))
    assert codes(audit(**mixture, reported_mfu=0.337)) == []


def test_a_report_that_holds_the_recomputation_is_named() -> None:
    report = audit(parameters=70e9, tokens_per_s=900.0, recompute=1.0, reported_mfu=0.509)  # 38.2% x 4/3
    assert report.diagnoses[0].code == "recompute_in_mfu"
    assert "recompute_in_mfu" not in codes(audit(parameters=70e9, tokens_per_s=900.0, reported_mfu=0.509))


def test_a_report_by_the_palm_convention_is_told_from_the_exact_one() -> None:
    # 7B, 32 layers of width 4096, 32k tokens: 12 L w S = 51.5 GFLOPs over 42 of 6 N, half of it attended.
    shape = {"layers": 32, "heads": 32, "head_width": 128, "sequence_length": 32768}
    rate = 0.4 * 989.4e12 / (42e9 + 51.5e9 / 2)
    palm = (42e9 + 12 * 32 * 4096 * 32768) * rate / 989.4e12
    assert (
        audit(parameters=7e9, tokens_per_s=rate, reported_mfu=palm, **shape).diagnoses[0].code == "causal_counted_dense"
    )
    assert codes(audit(parameters=7e9, tokens_per_s=rate, reported_mfu=0.4, **shape)) == []


def test_a_report_that_agrees_gives_no_diagnosis() -> None:
    assert codes(audit(parameters=70e9, tokens_per_s=900.0, reported_mfu=0.38)) == []


# Logs.


def test_a_log_is_judged_by_its_median_and_each_row_that_is_impossible_is_counted() -> None:
    series = LogSeries(tokens_per_s=(900.0, 910.0, 9000.0, 890.0), steps=(10.0, 20.0, 30.0, 40.0))
    report = audit(parameters=70e9, series=series)
    assert report.tokens_per_s == 905.0
    assert report.rows == 4
    assert report.impossible_rows == 1
    assert report.first_impossible_step == 30.0
    assert report.verdict == "impossible"


def test_step_times_and_tokens_per_step_make_a_rate_and_hours() -> None:
    series = LogSeries(step_s=(2.0, 2.0, 4.0))
    report = audit(parameters=70e9, series=series, tokens_per_step=1800.0, gpus=2, price_per_gpu_hour=3600.0)
    assert report.tokens_per_s == 900.0
    assert report.gpu_hours == pytest.approx(2 * 8 / 3600)
    assert report.cost == pytest.approx(16.0)


def test_a_reported_mfu_that_grows_with_the_step_is_cumulative() -> None:
    steps = tuple(float(s) for s in range(10, 210, 10))
    growing = LogSeries(mfu=tuple(0.004 * (s + 1) for s in steps), steps=steps)
    assert "cumulative_numerator" in codes(audit(series=growing))
    level = LogSeries(mfu=(0.4,) * len(steps), steps=steps)
    assert codes(audit(series=level)) == []


def test_timestamps_that_fall_are_an_error() -> None:
    series = LogSeries(mfu=(0.4, 0.4, 0.4), timestamps_s=(100.0, 50.0, 200.0))
    assert "clock_went_backwards" in codes(audit(series=series))


# Bad input.


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"parameters": 70e9}, "a rate"),
        ({"tokens_per_s": 900.0}, "parameters"),
        ({"parameters": 70e9, "tokens_per_s": 900.0, "peak": None}, "no device was given"),
        ({"parameters": 70e9, "tokens_per_s": 900.0, "precision": "fp4"}, "no fp4 peak"),
    ],
)
def test_facts_that_hold_nothing_to_judge_say_what_is_missing(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        audit(**facts)


@pytest.mark.parametrize("name", ["gpus", "elapsed_s", "step_s", "gpu_hours", "parameters", "tokens_per_s"])
def test_zero_is_refused_where_something_is_divided_by_it(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}=0.*above 0"):
        audit(**{name: 0})


def test_a_negative_or_missing_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"tokens_per_s=-1\.0"):
        AuditFacts(tokens_per_s=-1.0)
    with pytest.raises(ConfigurationError, match="nan"):
        AuditFacts(tokens_per_s=float("nan"))


@given(
    n=st.floats(min_value=1e6, max_value=1e13),
    rate=st.floats(min_value=1e-3, max_value=1e9),
    gpus=st.integers(min_value=1, max_value=10**6),
    reported=st.one_of(st.none(), st.floats(min_value=0, max_value=100)),
)
def test_the_verdict_follows_physics_and_the_report_is_json(
    n: float, rate: float, gpus: int, reported: float | None
) -> None:
    peak = DevicePeak(device_name="CocoNut 9000", flops_per_s_by_precision={"bf16": 1e15}, source="user")
    mfu = 6 * n * rate / (gpus * 1e15)
    if mfu < 5e-5:
        with pytest.raises(CannotJudgeError, match="another unit"):
            audit(peak=peak, parameters=n, tokens_per_s=rate, gpus=gpus, reported_mfu=reported)
        return
    report = audit(peak=peak, parameters=n, tokens_per_s=rate, gpus=gpus, reported_mfu=reported)
    assert report.mfu == pytest.approx(mfu)
    if mfu > 1.0501 or (reported is not None and reported > 1.05):
        assert report.verdict == "impossible"
    elif mfu < 0.6 and (reported is None or reported < 0.6):
        assert report.verdict in ("plausible", "suspicious", "contradicted")
        assert not report.is_impossible
    json.dumps(report.to_dict(), allow_nan=False)
