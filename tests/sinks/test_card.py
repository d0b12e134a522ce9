"""The text card says what one needs to judge the figures."""

from __future__ import annotations

from mfu_monitor.counting.step_record import (
    FlopTotals,
    OpRecord,
    Phase,
    StepRecord,
    UncoveredParameter,
    UnsupportedOp,
)
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.card import CardMaker, text_card
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

# One Linear, 64 rows, 32 -> 16, in bf16, forward twice (once as recompute), backward two products; a small one in fp32.
PRODUCT = 2 * 64 * 32 * 16
SMALL = 2 * 64 * 16 * 4


def op(phase: Phase, module: str, precision: str, totals: FlopTotals) -> OpRecord:
    return OpRecord(op="aten::mm", phase=phase, module_fqn=module, precision=precision, totals=totals)


RECORD = StepRecord(
    ops=(
        op(Phase.FORWARD, "mlp.up", "bf16", FlopTotals(model_flops=PRODUCT)),
        op(Phase.BACKWARD, "mlp.up", "bf16", FlopTotals(model_flops=2 * PRODUCT)),
        op(Phase.RECOMPUTE, "mlp.up", "bf16", FlopTotals(recompute_flops=PRODUCT)),
        op(Phase.FORWARD, "head", "fp32", FlopTotals(model_flops=SMALL)),
        op(Phase.FORWARD, "norm", "fp32", FlopTotals(bytes_accessed=100)),
    ),
    is_training=True,
)
PEAK = DevicePeak(
    device_name="NVIDIA H100 80GB HBM3",
    flops_per_s_by_precision={"bf16": 989.4e12},
    source="table: NVIDIA H100 data sheet",
)


def test_card_names_device_peak_source_density_precision_and_convention() -> None:
    card = text_card(RECORD, peak=PEAK)
    assert "device: NVIDIA H100 80GB HBM3" in card
    assert "989.4 TFLOP/s dense at bf16, source: table: NVIDIA H100 data sheet" in card
    assert "precision: bf16" in card
    assert "convention: exact" in card


def test_card_gives_the_share_of_the_best_measured_product_where_there_is_one() -> None:
    window = StepWindow(first_step=1, last_step=5, steps=5, elapsed_s=1.0, wall_s=1.0)
    reading = UtilizationReading(window=window, mfu=0.4, achievable_fraction=0.55)
    assert "of the best product measured on this device: **0.5500**" in text_card(RECORD, reading=reading, peak=PEAK)
    without = UtilizationReading(window=window, mfu=0.4)
    assert "best product" not in text_card(RECORD, reading=without, peak=PEAK)


def test_card_calls_a_sparse_peak_sparse() -> None:
    sparse = DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": 1979e12}, source="user", is_dense=False)
    assert "1,979 TFLOP/s SPARSE" in text_card(RECORD, peak=sparse)


def test_card_gives_a_small_peak_in_gflops_per_s() -> None:
    laptop = DevicePeak(device_name="CPU", flops_per_s_by_precision={"bf16": 136.4e9}, source="measured")
    assert "136.4 GFLOP/s dense at bf16, source: measured" in text_card(RECORD, peak=laptop)


def test_card_says_what_to_do_without_a_peak_and_when_the_part_lacks_the_precision() -> None:
    assert 'peak="measure"' in text_card(RECORD)
    assert "none at bf16" in text_card(RECORD, peak=DevicePeak(device_name="V100", source="table"))


def test_card_tabulates_flops_by_phase_precision_and_module_to_the_flop() -> None:
    card = text_card(RECORD, peak=PEAK)
    total = 4 * PRODUCT + SMALL
    assert f"| forward | {PRODUCT + SMALL:,} | {PRODUCT + SMALL:,} |" in card
    assert f"| recompute | 0 | {PRODUCT:,} | {PRODUCT / total:.3f} |" in card
    assert f"| all | {3 * PRODUCT + SMALL:,} | {total:,} | 1.000 |" in card
    assert f"| bf16 | {3 * PRODUCT:,} | {4 * PRODUCT:,} |" in card
    assert f"| mlp.up | {3 * PRODUCT:,} | {4 * PRODUCT:,} |" in card


def test_card_lists_the_largest_modules_first_and_no_more_than_asked() -> None:
    card = text_card(RECORD, peak=PEAK, top_modules=1)
    assert "Top modules (1 of 2)" in card
    assert "| head |" not in card
    full = text_card(RECORD, peak=PEAK)
    assert full.index("| mlp.up |") < full.index("| head |")
    assert "| norm |" not in full


def test_card_names_what_was_left_uncounted_with_its_module() -> None:
    record = StepRecord(
        ops=RECORD.ops,
        unsupported_ops=(UnsupportedOp(op="mylib::attn", module_fqn="blocks.0.attn", calls=12),),
        uncovered_parameters=(UncoveredParameter(name="w", numel=4096, share_of_parameters=0.5),),
        notes=("the router was assumed balanced",),
    )
    card = text_card(record, peak=PEAK)
    assert "lower bounds" in card
    assert "`mylib::attn` in blocks.0.attn, forward, 12 calls" in card
    assert "parameter `w` (4,096 numbers, 0.5 of all)" in card
    assert "the router was assumed balanced" in card


def test_card_of_a_covered_step_claims_no_lower_bound() -> None:
    card = text_card(RECORD, peak=PEAK)
    assert "Nothing was left uncounted" in card
    assert "lower bound" not in card


def test_card_at_the_end_gives_the_last_window_as_fractions() -> None:
    window = StepWindow(first_step=90, last_step=99, steps=10, elapsed_s=1.0, wall_s=1.0)
    card = text_card(RECORD, peak=PEAK, reading=UtilizationReading(window=window, mfu=0.3814, precision="bf16"))
    assert "MFU: **0.3814**" in card
    assert "HFU: **unknown**" in card
    assert "90-99" in card
    assert "%" not in card


def test_card_of_an_empty_record_divides_by_nothing() -> None:
    assert "unknown" in text_card(StepRecord())


def run_event(**values: object) -> Event:
    peak = {"device_name": "CPU", "flops_per_s_by_precision": {"bf16": 2e12}, "source": "measured", **values}
    return Event(kind="run", step=0, payload={"peak": peak})


def test_the_first_record_makes_the_first_card_and_no_later_one_does() -> None:
    maker = CardMaker()
    assert maker.take(run_event()) is None
    card = maker.take(Event(kind="record", step=3, payload=RECORD.to_dict()))
    assert card is not None
    assert (card.kind, card.step, card.title) == ("card", 3, "card/start")
    assert "2 TFLOP/s dense at bf16, source: measured" in card.text
    assert maker.take(Event(kind="record", step=9, payload=RECORD.to_dict())) is None


def test_the_final_card_has_the_last_reading_and_the_last_step() -> None:
    maker = CardMaker()
    maker.take(run_event(unknown_key_of_a_later_version=1))
    maker.take(Event(kind="record", step=3, payload=RECORD.to_dict()))
    window = StepWindow(first_step=90, last_step=99, steps=10, elapsed_s=1.0, wall_s=1.0)
    reading = UtilizationReading(window=window, mfu=0.25, precision="bf16")
    maker.take(Event(kind="reading", step=99, payload=reading.to_dict()))
    card = maker.final()
    assert card is not None
    assert (card.step, card.title) == (99, "card/end")
    assert "MFU: **0.2500**" in card.text


def test_a_run_without_a_counted_step_has_no_card() -> None:
    maker = CardMaker()
    maker.take(Event(kind="run", step=0, payload={"peak": None}))
    assert maker.final() is None
