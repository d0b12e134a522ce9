"""The checks: what physics forbids is flagged and withheld, what it allows is not. Figures are written out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.checks import CAUSE_CODES, CHECK_CODES, Diagnosis, Evidence, check, diagnosis_text, withheld
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord, UnsupportedOp
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

H100 = "NVIDIA H100 80GB HBM3"
PEAK = 989.4e12


def window(**changes: Any) -> StepWindow:
    """Ten steps of one second."""
    values = {"first_step": 90, "last_step": 99, "steps": 10, "elapsed_s": 10.0, "wall_s": 10.0}
    return StepWindow(**{**values, **changes})


def reading(mfu: float | None, *, of: StepWindow | None = None, **changes: Any) -> UtilizationReading:
    """One H100 in bf16."""
    values = {
        "mfu": mfu,
        "device_name": H100,
        "precision": "bf16",
        "peak_flops_per_s": PEAK,
        "peak_source": "table: NVIDIA H100 datasheet",
    }
    return UtilizationReading(window=of or window(), **{**values, **changes})


def codes(diagnoses: tuple[Diagnosis, ...]) -> list[str]:
    return [d.code for d in diagnoses]


def one(diagnoses: tuple[Diagnosis, ...], code: str) -> Diagnosis:
    """The diagnosis of that code; there is exactly one."""
    (found,) = [d for d in diagnoses if d.code == code]
    return found


# R1, R5, R6 and the thresholds.


def test_127_percent_is_an_error_that_names_both_inputs() -> None:
    # 6 x 70e9 x 3000 tokens/s = 1260 TFLOP/s over 989.4 = 127.3%.
    flops_per_s = 6 * 70e9 * 3000
    seen = reading(flops_per_s / PEAK, of=window(model_flops=int(flops_per_s * 10)))
    diagnosis = one(check(seen), "mfu_over_peak")
    assert withheld(check(seen))
    for words in ("127.", "1,260 TFLOP/s", "989.4 TFLOP/s", "NVIDIA H100 datasheet", "impossible", "withheld"):
        assert words in diagnosis.message
    assert "peak" in diagnosis.likely_cause
    assert "mfu-monitor peaks" in diagnosis.fix


def test_38_percent_says_nothing() -> None:
    assert check(reading(6 * 70e9 * 900 / PEAK)) == ()


@pytest.mark.parametrize(("mfu", "severity"), [(1.01, "note"), (1.05, "note"), (1.051, "error"), (5.63, "error")])
def test_mfu_over_peak_is_soft_to_105_percent_and_hard_above(mfu: float, severity: str) -> None:
    diagnoses = check(reading(mfu))
    assert one(diagnoses, "mfu_over_peak").severity == severity
    assert withheld(diagnoses) == (severity == "error")


def test_101_percent_on_a_card_that_boosts_is_explained_by_its_clock() -> None:
    diagnoses = check(reading(1.01), max_clock_ratio=1.08)
    assert "108.0%" in one(diagnoses, "nominal_clock_exceeded").message
    assert not withheld(diagnoses)


def test_101_percent_on_a_card_that_does_not_boost_that_far_is_not_explained_by_its_clock() -> None:
    assert "nominal_clock_exceeded" not in codes(check(reading(1.04), max_clock_ratio=1.02))


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (reading(None, of=window(elapsed_s=0.0)), "took 0.0 s"),
        (reading(None, peak_flops_per_s=None, device_name="CocoNut 9000"), "no dense peak is known for CocoNut 9000"),
        (reading(None, peak_flops_per_s=0.0, device_name="CocoNut 9000"), "no dense peak"),
        (reading(None, of=window(world_size=0)), "world size is 0"),
        (reading(None, reason="no step was counted yet"), "no step was counted yet"),
        (reading(0.0, of=window(model_flops=0)), "no product was counted"),
    ],
)
def test_a_missing_rate_is_told_with_its_reason_and_raises_nothing(seen: UtilizationReading, words: str) -> None:
    diagnoses = check(seen)
    assert words in one(diagnoses, "rate_is_none").message
    assert not withheld(diagnoses)


@pytest.mark.parametrize("mfu", [math.nan, math.inf, -0.3])
def test_a_number_that_is_none_is_withheld(mfu: float) -> None:
    diagnoses = check(reading(mfu))
    assert one(diagnoses, "rate_is_none").severity == "error"
    assert withheld(diagnoses)


def test_hfu_over_peak_alone_is_an_error() -> None:
    diagnoses = check(reading(0.9, hfu=1.2))
    assert one(diagnoses, "hfu_over_peak").severity == "error"
    assert "mfu_over_peak" not in codes(diagnoses)


def test_hfu_below_the_peak_is_not_flagged() -> None:
    assert check(reading(0.45, hfu=0.58)) == ()


def test_hfu_below_mfu_is_an_error_that_gives_both() -> None:
    diagnosis = one(check(reading(0.5, hfu=0.4)), "hfu_below_mfu")
    assert diagnosis.severity == "error"
    assert "40.0%" in diagnosis.message
    assert "50.0%" in diagnosis.message


def test_hfu_equal_to_mfu_up_to_rounding_is_not_flagged() -> None:
    assert check(reading(0.5, hfu=0.5 * (1 - 1e-9))) == ()


def test_the_weighted_reading_decides_when_precisions_are_mixed() -> None:
    # 40% of the FLOPs at twice the peak: 1.1 against bf16 alone, 0.6 + 0.4 / 2 = 0.8 of that weighted.
    allowed = check(reading(1.1, mfu_weighted=0.88 * 0.6))
    assert one(allowed, "mfu_over_peak").severity == "note"
    assert not withheld(allowed)
    forbidden = check(reading(0.9, mfu_weighted=1.2))
    assert one(forbidden, "weighted_over_peak").severity == "error"
    assert withheld(forbidden)


@pytest.mark.parametrize(("mfu", "severity"), [(0.59, None), (0.61, "note"), (0.81, "warning")])
def test_an_mfu_that_training_does_not_reach_is_suspicious(mfu: float, severity: str | None) -> None:
    found = [d.severity for d in check(reading(mfu)) if d.code == "suspicious_mfu"]
    assert found == ([severity] if severity else [])


def test_a_suspicious_weighted_reading_is_not_given_the_plain_ratio_as_its_own() -> None:
    # 57% of the peak in bf16 and 3% in fp32, whose peak is a tenth: 0.57 + 0.30 = 87% of what physics allows.
    found = one(check(reading(0.60, mfu_weighted=0.87)), "suspicious_mfu")
    assert found.message.startswith("MFU weighted by precision, 60.0% against bf16 alone, is 87.0%")


def test_suspicion_follows_the_best_product_measured_on_the_device() -> None:
    best = 0.9 * PEAK  # so a warning above 0.9 and a note above 0.675
    assert check(reading(0.65), achievable_flops_per_s=best) == ()
    assert one(check(reading(0.70), achievable_flops_per_s=best), "suspicious_mfu").severity == "note"
    assert one(check(reading(0.92), achievable_flops_per_s=best), "suspicious_mfu").severity == "warning"
    # The reading itself may carry the comparison: 0.5 of the peak is 1.25 of a best product at 0.4.
    assert one(check(reading(0.5, achievable_fraction=1.25)), "suspicious_mfu").severity == "warning"


def test_a_measured_peak_is_its_own_best_product() -> None:
    assert check(reading(0.74, peak_source="measured")) == ()
    assert one(check(reading(0.76, peak_source="measured")), "suspicious_mfu").severity == "note"
    over = one(check(reading(1.2, peak_source="measured")), "mfu_over_peak")
    assert over.severity == "error"
    assert "measure it again" in over.likely_cause


def test_a_peak_given_by_hand_is_the_first_suspect() -> None:
    assert "given by hand" in one(check(reading(9.0, peak_source="user")), "mfu_over_peak").likely_cause


def test_a_step_faster_than_its_bytes_over_the_bandwidth_is_an_error() -> None:
    # 14 GB of weights and 14 GB of gradients at 3.35 TB/s take 8.36 ms; a cache of 256 MiB saves 0.08 ms of it.
    bytes_of_7b: dict[str, Any] = {"parameter_bytes": 14e9, "gradient_bytes": 14e9}
    fast = reading(0.4, of=window(elapsed_s=0.080), peak_bytes_per_s=3.35e12)
    diagnosis = one(check(fast, **bytes_of_7b), "faster_than_bandwidth")
    assert diagnosis.severity == "error"
    assert "8 ms" in diagnosis.message
    assert "8.28 ms" in diagnosis.message
    slow = reading(0.4, of=window(elapsed_s=0.090), peak_bytes_per_s=3.35e12)
    assert check(slow, **bytes_of_7b) == ()


def test_a_model_that_fits_in_the_cache_is_not_bound_by_the_bandwidth() -> None:
    tiny = reading(0.4, of=window(elapsed_s=1e-6), peak_bytes_per_s=3.35e12)
    assert check(tiny, parameter_bytes=100e6, gradient_bytes=100e6) == ()


def test_ranks_that_do_all_the_same_on_one_batch_are_told_of_it() -> None:
    with_others = reading(0.4)
    window = dataclasses.replace(with_others.window, world_size=4, duplicate_ranks=(1, 3))
    diagnosis = one(check(dataclasses.replace(with_others, window=window)), "duplicate_data")
    assert diagnosis.severity == "warning"
    assert "ranks 1, 3" in diagnosis.message
    assert "DistributedSampler" in diagnosis.fix
    assert "duplicate_data" not in codes(check(with_others))


def test_a_lower_bound_names_the_operator_and_its_module() -> None:
    record = StepRecord(unsupported_ops=(UnsupportedOp(op="mylib::attn", module_fqn="blocks.0.attn"),))
    diagnosis = one(check(reading(0.4), record), "lower_bound")
    assert "mylib::attn in blocks.0.attn" in diagnosis.message
    assert "register_flop_formula" in diagnosis.fix
    assert not withheld((diagnosis,))
    assert "lower_bound" in codes(check(reading(0.4, exactness="lower_bound+sampled")))
    assert check(reading(0.4, exactness="sampled")) == ()


# The interface.


def test_diagnoses_survive_json() -> None:
    for diagnosis in check(reading(0.3, peak_flops_per_s=1979e12, peak_source="user"), flops_per_batch=1e12):
        assert Diagnosis.from_dict(json.loads(json.dumps(diagnosis.to_dict()))) == diagnosis


def test_the_text_for_people_holds_cause_fix_and_figures_and_nothing_without_a_diagnosis() -> None:
    text = diagnosis_text(check(reading(0.22, peak_flops_per_s=1979e12, peak_source="user")))
    for words in (
        "### warning: `sparse_peak`",
        "**likely cause:**",
        "**fix:**",
        "| dense_peak_flops_per_s | 9.894e+14 |",
    ):
        assert words in text
    assert "strength" not in text
    assert diagnosis_text(check(reading(0.4))) == ""


def test_every_diagnosis_says_what_was_seen_why_and_what_to_do() -> None:
    for diagnosis in (*check(reading(1.5)), *check(reading(None)), *check(reading(0.3, peak_flops_per_s=1979e12))):
        assert diagnosis.message
        assert diagnosis.likely_cause
        assert diagnosis.fix
        assert diagnosis.code in str(diagnosis)


def test_wrong_evidence_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigurationError, match=r"flops_per_bach=.*no such evidence.*flops_per_batch.*for example"):
        check(reading(0.4), flops_per_bach=1e12)
    with pytest.raises(ConfigurationError, match="not both"):
        check(reading(0.4), evidence=Evidence(), flops_per_batch=1e12)
    with pytest.raises(ConfigurationError, match=r"flops_per_batch=-1.*at least 0"):
        Evidence(flops_per_batch=-1)


def test_codes_are_distinct_and_each_is_explained_in_the_documentation(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs" / "diagnoses.md").read_text(encoding="utf-8")
    assert len({*CHECK_CODES, *CAUSE_CODES}) == len(CHECK_CODES) + len(CAUSE_CODES)
    for code in (*CHECK_CODES, *CAUSE_CODES):
        assert f"### `{code}`" in text


FINITE_OR_NOT = st.one_of(st.none(), st.floats())


@given(mfu=FINITE_OR_NOT, hfu=FINITE_OR_NOT, palm=FINITE_OR_NOT, weighted=FINITE_OR_NOT, peak=FINITE_OR_NOT)
def test_no_reading_makes_a_check_raise_and_every_impossible_one_is_withheld(
    mfu: float | None, hfu: float | None, palm: float | None, weighted: float | None, peak: float | None
) -> None:
    seen = reading(mfu, hfu=hfu, mfu_palm=palm, mfu_weighted=weighted, peak_flops_per_s=peak)
    diagnoses = check(seen)
    if weighted is None and mfu is not None and not mfu <= 1.05:
        assert withheld(diagnoses)


@given(
    elapsed=st.floats(),
    host=FINITE_OR_NOT,
    flops=st.one_of(st.none(), st.integers(min_value=-1, max_value=10**30)),
    steps=st.integers(min_value=-1, max_value=100),
    user=st.one_of(st.none(), st.floats(min_value=0)),
    times=st.lists(st.floats(), max_size=5),
)
def test_no_window_makes_a_check_raise(
    elapsed: float, host: float | None, flops: int | None, steps: int, user: float | None, times: list[float]
) -> None:
    seen = reading(0.5, of=window(elapsed_s=elapsed, host_elapsed_s=host, model_flops=flops, steps=steps))
    evidence = Evidence(flops_per_batch=user, step_times_s=tuple(times), timestamps_s=tuple(times), reported_mfu=user)
    assert isinstance(check(seen, evidence=evidence), tuple)


def test_the_peak_of_another_rank_kind_is_no_fault() -> None:
    # Two ranks, an A100 (312) and an H100 (989.4): the world's peak is neither one nor two times this rank's.
    seen = window(
        model_flops=int(1e15), world_size=2, world_model_flops=int(2e15), world_peak_flops_per_s=312e12 + PEAK
    )
    mfu = 2e15 / (10 * (312e12 + PEAK))
    assert check(reading(mfu, of=seen, world_peak_flops_per_s=312e12 + PEAK)) == ()


def test_a_peak_that_the_record_carries_is_used_when_the_reading_has_none() -> None:
    peak = DevicePeak(device_name=H100, flops_per_s_by_precision={"bf16": 1979e12}, source="user")
    totals = FlopTotals(model_flops=10**15, palm_model_flops=10**15)
    record = StepRecord(ops=(OpRecord(op="aten::mm", phase=Phase.FORWARD, precision="bf16", totals=totals),))
    seen = UtilizationReading(window=window(), mfu=0.3, device_name=H100)
    assert codes(check(seen, record, peak))[0] == "sparse_peak"


@pytest.mark.parametrize(
    ("name", "mfu", "is_impossible"),
    [
        ("NVIDIA GeForce RTX 5090", 240 / 209.5, False),  # measured by two people: it boosts above the datasheet
        ("NVIDIA GeForce RTX 2080 Ti", 1.2, False),
        ("NVIDIA GeForce RTX 5090", 1.3, True),
        ("NVIDIA GeForce RTX 5090 D", 1.1, True),  # capped for export: no clock helps
        ("NVIDIA H100 80GB HBM3", 1.06, True),
        ("NVIDIA A100-SXM4-80GB", 1.06, True),
    ],
)
def test_cards_that_boost_have_a_margin_before_a_reading_is_impossible(
    name: str, mfu: float, is_impossible: bool
) -> None:
    diagnoses = check(reading(mfu, device_name=name))
    assert any(d.severity == "error" for d in diagnoses) is is_impossible
