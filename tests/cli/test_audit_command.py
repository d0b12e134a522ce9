"""``mfu-monitor audit`` on numbers and on logs of every kind; what is no number is refused by column and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mfu_monitor.cli import main
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.jsonl import JsonlSink
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

SEVENTY = ("--params", "70e9", "--gpu", "H100 SXM", "--precision", "bf16", "--gpus", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["audit", *arguments])
    captured = capsys.readouterr()
    assert caught.value.code == code, captured.err
    return captured.out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(capsys, *arguments, "--json", code=code))
    return values


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["audit", *arguments])
    captured = capsys.readouterr()
    assert caught.value.code == code
    assert captured.out == ""
    # click draws a box around its own messages and wraps them at the terminal's width
    return " ".join(captured.err.replace("│", " ").split())


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# Numbers.


def test_127_percent_is_impossible_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *SEVENTY, "--tokens-per-s", "3000", code=1)
    for words in ("127.3%", "verdict: impossible", "3,000 tokens/s", "7e+10 parameters", "989.4 TFLOP/s"):
        assert words in out


def test_38_percent_is_plausible_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *SEVENTY, "--tokens-per-s", "900")
    assert "38.2%" in out
    assert "verdict: plausible" in out


def test_palm_by_both_formulas_with_hours_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    # https://arxiv.org/abs/2204.02311, appendix B; 1200 hours on 6144 chips are 7,372,800.
    out = run_json(
        capsys,
        *("--params", "540.35B", "--tokens-per-s", "238.3k", "--gpu", "TPU v4", "--gpus", "6144", "--layers", "118"),
        *("--heads", "48", "--head-width", "256", "--sequence-length", "2048", "--hours", "1200", "--price", "2"),
    )
    assert round(out["mfu_6nd"], 3) == 0.457
    assert round(out["mfu_palm"], 3) == 0.462
    assert out["gpu_hours"] == 7_372_800
    assert out["cost"] == 14_745_600


@pytest.mark.parametrize(
    "rate",
    [
        ("--tokens-per-s", "3k", "--gpus", "4"),
        ("--tokens-per-s-per-gpu", "750", "--gpus", "4"),
        ("--tokens-per-step", "1500", "--step-time", "500ms", "--gpus", "4"),
        ("--tokens", "10.8M", "--hours", "1", "--gpus", "4"),
        ("--tokens", "10.8M", "--gpu-hours", "4", "--gpus", "4"),
    ],
)
def test_a_rate_can_be_given_in_every_way(capsys: pytest.CaptureFixture[str], rate: tuple[str, ...]) -> None:
    out = run_json(capsys, "--params", "70B", "--gpu", "H100 SXM", *rate)
    assert out["mfu"] == pytest.approx(6 * 70e9 * 3000 / (4 * 989.4e12))


def test_quantities_with_suffixes_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_json(capsys, "--params", "70B", "--tokens-per-s", "3k", "--peak-flops-per-s", "1.5e15", "--gpus", "4")
    assert out["peak_flops_per_s"] == 1.5e15
    assert out["mfu"] == pytest.approx(6 * 70e9 * 3000 / (4 * 1.5e15))
    assert run_json(capsys, "--flops-per-s-per-gpu", "430T", "--gpu", "H100 SXM")["mfu"] == pytest.approx(430 / 989.4)


def test_a_peak_that_was_meant_in_tflops_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = refuse(capsys, "--params", "70B", "--tokens-per-s", "900", "--peak-flops-per-s", "989")
    assert "--peak-flops-per-s is 989 FLOP/s" in words
    assert "such as 989T" in words


def test_an_unknown_gpu_is_refused_with_what_this_command_takes_instead(capsys: pytest.CaptureFixture[str]) -> None:
    words = refuse(capsys, "--params", "70B", "--tokens-per-s", "900", "--gpu", "CocoNut 9000")
    assert "give --peak-flops-per-s 989T (dense)" in words
    assert "--peak-tflops" not in words


def test_a_reading_that_the_clock_explains_is_not_called_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *SEVENTY, "--tokens-per-s", "2400")  # 101.9%, and an H100 SXM boosts to 108.2%
    assert "verdict: suspicious" in out
    assert "108.2%" in out
    assert "At most 100% is possible" not in out


def test_few_gpu_hours_are_not_rounded_to_none(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *SEVENTY, "--tokens-per-s", "900", "--tokens", "900", "--price", "2")  # one second
    lines = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines() if "  " in line.strip())
    assert lines["GPU-hours"] == "0.000278"  # 1 / 3600
    assert lines["cost"] == "0.000556"


def test_recompute_gives_an_hfu(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"none": 1.0, "full": 4 / 3, "0.5": 7 / 6, "50%": 7 / 6}
    for word, factor in shares.items():
        out = run_json(capsys, *SEVENTY, "--tokens-per-s", "900", "--recompute", word)
        assert out["hfu"] == pytest.approx(out["mfu"] * factor)


def test_a_width_alone_is_as_good_as_heads(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--layers", "80", "--sequence-length", "8192")
    by_width = run_json(capsys, *SEVENTY, "--tokens-per-s", "900", *shape, "--width", "8192")
    by_heads = run_json(capsys, *SEVENTY, "--tokens-per-s", "900", *shape, "--heads", "64", "--head-width", "128")
    assert by_width["mfu_palm"] == by_heads["mfu_palm"]
    assert by_width["mfu_palm"] == pytest.approx((420e9 + 12 * 80 * 8192 * 8192) * 900 / 989.4e12)
    both = run_json(capsys, *SEVENTY, "--tokens-per-s", "900", *shape, "--width", "8192", "--bidirectional")
    assert both["mfu_exact"] == both["mfu_palm"]


@pytest.mark.parametrize("text", ["152%", "1.52"])
def test_an_impossible_report_is_read_as_percent_or_fraction(capsys: pytest.CaptureFixture[str], text: str) -> None:
    out = run_json(capsys, *SEVENTY, "--tokens-per-s", "900", "--reported-mfu", text, code=1)
    assert out["reported_mfu"] == pytest.approx(1.52)
    assert out["verdict"] == "impossible"


def test_the_sparse_peak_behind_a_report_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *SEVENTY, "--tokens-per-s", "900", "--reported-mfu", "19.1%", "--reported-peak", "1979T")
    assert "warning: sparse_peak" in out
    assert "verdict: suspicious" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--params", "70q"), ["--params is '70q'", "such as 70B"]),
        (("--tokens-per-s", "nan"), ["--tokens-per-s is 'nan'"]),
        (("--tokens-per-s", "0"), ["above zero"]),
        (("--step-time", "0"), ["--step-time is '0'", "250ms"]),
        (("--step-time", "3 parsecs"), ["--step-time is '3 parsecs'"]),
        (("--reported-mfu", "46.2"), ["--reported-mfu is '46.2'", "46.2%"]),
        (("--reported-mfu", "high"), ["--reported-mfu is 'high'"]),
        (("--recompute", "some"), ["--recompute is 'some'", "full"]),
        (("--recompute", "1.5"), ["--recompute is '1.5'"]),
        (("--gpu", "H100"), ["H100 SXM5 80GB", "H100 PCIe 80GB", "choose one"]),
        (("--gpu", "CocoNut 9000"), ["'CocoNut 9000' is not in the table of peaks"]),
        (("--precision", "bf17"), ["unknown precision 'bf17'"]),
        (("--precision", "fp4"), ["fp4"]),
        (("--layers", "80"), ["missing: --heads", "--sequence-length"]),
        (("--layers", "80", "--heads", "3", "--width", "8192", "--sequence-length", "8"), ["does not divide"]),
        (("--heads", "64", "--head-width", "64", "--width", "8192"), ["4096", "8192", "two of the three"]),
        (("--active-params", "700B"), ["--active-params is 700B of --params 70B"]),
        (("--tokens-per-s-per-gpu", "7"), ["both given"]),
        (("--tokens-per-s", "1e300"), ["--tokens-per-s is '1e300'"]),
        (("--unit", "mfu"), ["--unit is 'mfu'", "COLUMN=UNIT"]),
        (("--days", "3", "--hours", "72"), ["both given"]),
        (("--mfu-column", "mfu"), ["no log was given"]),
    ],
)
def test_nonsense_is_refused_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    message = refuse(capsys, *SEVENTY, "--tokens-per-s", "900", *arguments)
    for word in words:
        assert word in message


def test_too_little_is_refused_with_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a rate (--tokens-per-s 3000" in refuse(capsys, *SEVENTY, code=3)
    assert "no device was given" in refuse(capsys, "--params", "70B", "--tokens-per-s", "900", code=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--params", "70", "--tokens-per-s", "900", "--gpu", "H100 SXM"), "70B"),
        (("--params", "70M", "--tokens-per-s", "9", "--gpu", "H100 SXM"), "in another unit"),
    ],
)
def test_numbers_that_nobody_means_are_not_judged(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in refuse(capsys, *arguments, code=3)


def test_a_crash_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("mfu_monitor.cli.audit.audit_command.audit_run", fail)
    with pytest.raises(SystemExit) as caught:
        main(["audit", *SEVENTY, "--tokens-per-s", "900"])
    assert caught.value.code == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


# CSV.


def test_a_csv_is_judged_row_by_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.csv", "step,loss,tokens_per_s\n10,3.2,900\n20,3.1,910\n30,3.0,9k\n40,,\n50,2.9,890\n")
    out = run_json(capsys, log, *SEVENTY, code=1)
    assert out["tokens_per_s"] == 905  # the median of 890, 900, 910, 9000
    assert (out["rows"], out["impossible_rows"], out["first_impossible_step"]) == (4, 1, 30)
    assert "1, the first at step 30" in run(capsys, log, *SEVENTY, code=1)


def test_a_column_of_another_name_can_be_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.tsv", "it\tspeed\n1\t900\n2\t900\n")
    assert run_json(capsys, log, *SEVENTY, "--tokens-per-s-column", "speed")["tokens_per_s"] == 900
    assert "It has: it, speed" in refuse(capsys, log, *SEVENTY, code=3)
    message = refuse(capsys, log, *SEVENTY, "--tokens-per-s-column", "sped")
    assert "column 'sped' is not in" in message
    assert "It has: it, speed" in message


def test_step_times_of_a_csv_give_rate_and_hours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.csv", "step;step_time\n1;2.0s\n2;2000ms\n3;2\n")
    out = run_json(capsys, log, *SEVENTY, "--tokens-per-step", "1800", "--price", "36")
    assert out["tokens_per_s"] == 900
    assert out["gpu_hours"] == pytest.approx(6 / 3600)
    assert out["cost"] == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("cell", "words"),
    [("fast", "'fast'"), ("3q", "'3q'"), ("nan", "no value in 1 of 3"), ("inf", "no value"), ("0", "no value")],
)
def test_a_cell_that_is_no_rate_is_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cell: str, words: str
) -> None:
    log = write(tmp_path / "m.csv", f"step,tokens_per_s\n1,900\n2,{cell}\n3,900\n")
    out = run_json(capsys, log, *SEVENTY)
    assert out["rows"] == 2
    (note,) = [n for n in out["notes"] if "tokens_per_s" in n]
    assert words in note
    assert cell in ("nan", "inf", "0") or "line 3" in note


def test_a_column_that_is_not_used_may_hold_anything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.csv", 'step,text,tokens_per_s\n1,"hello, world",900\n2,,900\n')
    assert run_json(capsys, log, *SEVENTY)["rows"] == 2


def test_a_zero_or_negative_step_time_is_no_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.csv", "step_time_s\n1.0\n0.0\n-2.0\n")
    out = run_json(capsys, log, *SEVENTY, "--tokens-per-step", "900")
    assert out["tokens_per_s"] == 900
    assert any("no value in 2 of 3" in note for note in out["notes"])


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("", "is empty", 2),
        ("\n \n", "is empty", 2),
        ("step,tokens_per_s\n", "no column of tokens/s", 3),
        ("step,mfu\n1,\n", "no value in 1 of 1", 3),
    ],
)
def test_a_file_without_numbers_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str, code: int
) -> None:
    assert words in refuse(capsys, write(tmp_path / "m.csv", text), *SEVENTY, code=code)


def test_a_file_that_is_not_there_or_no_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "does not exist" in refuse(capsys, str(tmp_path / "none.csv"), *SEVENTY)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    assert "cannot be read as text" in refuse(capsys, str(tmp_path / "binary.csv"), *SEVENTY)


@pytest.mark.parametrize(
    ("text", "mfu", "note"),
    [
        ("step,mfu\n1,46.2\n2,46.3\n", 0.4625, "as a fraction it would be 4,625%"),
        ("step,mfu (%)\n1,46.2\n2,46.3\n", 0.4625, ""),
        ("step,mfu\n1,46.2%\n2,46.3%\n", 0.4625, ""),
        ("step,mfu\n1,0.0\n2,0.462\n3,0.464\n", 0.463, "as percent it would be 0.463%"),
    ],
)
def test_percent_and_fraction_are_told_apart_and_a_doubt_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, mfu: float, note: str
) -> None:
    out = run_json(capsys, write(tmp_path / "m.csv", text), "--gpu", "H100 SXM")
    assert out["reported_mfu"] == pytest.approx(mfu)
    assert any(note in n for n in out["notes"]) if note else out["notes"] == []


def test_the_users_word_goes_before_a_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.csv", "step,mfu,tps\n1,0.9,100\n2,0.9,100\n")
    out = run_json(capsys, log, "--gpu", "H100 SXM", "--unit", "mfu=percent")
    assert out["reported_mfu"] == pytest.approx(0.009)
    without = run_json(capsys, log, *SEVENTY[:-1], "8", "--ignore-column", "mfu", "--per-gpu")
    assert (without["reported_mfu"], without["tokens_per_s"]) == (None, 800)
    assert run_json(capsys, log, *SEVENTY[:-1], "8", "--ignore-column", "mfu", "--all-gpus")["tokens_per_s"] == 100
    assert "'mfi' is not in" in refuse(capsys, log, *SEVENTY, "--ignore-column", "mfi")


# JSON lines.


def test_json_lines_of_any_tool_are_read_by_name_and_nested_names_with_a_slash(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [{"step": 1, "perf": {"tps": 900}}, {"step": 2, "eval": 0.3}, {"step": 3, "perf": {"tps": 3000}}]
    log = write(tmp_path / "m.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n")
    out = run_json(capsys, log, *SEVENTY, "--tokens-per-s-column", "perf/tps", code=1)
    assert (out["rows"], out["impossible_rows"], out["first_impossible_step"]) == (2, 1, 3)
    assert "It has: step, perf/tps, eval" in refuse(capsys, log, *SEVENTY, "--mfu-column", "mfu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"mfu": 0.4}\n{"mfu": \n{"mfu": 0.4}\n', "1 lines cannot be used, the first is line 2"),
        ('{"mfu": 0.4}\n[1]\n{"mfu": 0.4}\n', "1 lines cannot be used, the first is line 2"),
        ('{"mfu": 0.4}\n{"mfu": NaN}\n{"mfu": 0.4}\n', "no value in 1 of 3"),
        ('{"mfu": 0.4}\n{"mfu": "high"}\n{"mfu": 0.4}\n', "line 2: 'high'"),
        ('{"mfu": 0.4}\n{"mfu": true}\n{"mfu": 0.4}\n', "line 2: 'True'"),
    ],
)
def test_json_lines_that_are_none_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    out = run_json(capsys, write(tmp_path / "m.jsonl", text), "--gpu", "H100 SXM")
    assert out["rows"] == 2
    assert any(words in note for note in out["notes"]), out["notes"]


def test_a_last_line_that_is_cut_off_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.jsonl", '{"mfu": 0.4}\n{"mfu": 0.4}\n{"mf')
    assert run_json(capsys, log)["rows"] == 2


def our_log(path: Path, mfus: list[float]) -> str:
    """A log by our own sink; a withheld MFU is not among the metrics."""
    sink = JsonlSink(path)
    sink.emit(Event(kind="run", step=0, payload={"version": 1}))
    for i, mfu in enumerate(mfus, start=1):
        window = StepWindow(
            first_step=10 * (i - 1),
            last_step=10 * i - 1,
            steps=10,
            elapsed_s=1.0,
            wall_s=1.0,
            model_flops=round(mfu * 2 * 989.4e12 / 2),
            world_size=2,
        )
        reading = UtilizationReading(
            window=window,
            mfu=mfu,
            device_name="NVIDIA H100 80GB HBM3",
            precision="bf16",
            peak_flops_per_s=989.4e12,
            peak_source="table: NVIDIA H100 datasheet",
        )
        metrics = {"utilization/mfu": mfu} if mfu <= 1.05 else {}
        metrics |= {"throughput/tokens_per_s": 1800.0, "step_time/total_s": 0.1}
        sink.emit(Event(kind="reading", step=window.last_step, metrics=metrics, payload=reading.to_dict()))
    sink.close()
    return str(path)


def test_our_own_log_is_audited_without_another_word(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = run_json(capsys, our_log(tmp_path / "ours.jsonl", [0.40, 0.41, 0.42]))
    assert out["reported_mfu"] == pytest.approx(0.41)
    assert (out["gpus"], out["rows"], out["verdict"]) == (2, 3, "plausible")
    assert out["diagnoses"] == []
    with_n = run_json(capsys, our_log(tmp_path / "ours2.jsonl", [0.38, 0.38, 0.38]), "--params", "70B")
    assert with_n["mfu"] == pytest.approx(6 * 70e9 * 1800 / (2 * 989.4e12))


def test_a_withheld_reading_of_our_own_log_is_found_and_checked_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = run_json(capsys, our_log(tmp_path / "ours.jsonl", [0.40, 1.27, 0.42]), code=1)
    assert (out["impossible_rows"], out["first_impossible_step"]) == (1, 19)
    assert [d["code"] for d in out["diagnoses"]] == ["mfu_over_peak"]


@pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning")
def test_the_log_of_a_run_whose_mfu_was_withheld_is_impossible(
    bench: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What the monitor itself writes: its readings carry no MFU, and the audit must not pass them by."""
    path = tmp_path / "mfu.jsonl"
    monitor = bench.monitor(log_every_n_steps=2, peak=300e6, jsonl=str(path))  # 600 MFLOP in steps of 1 s: 200%
    bench.counters.records = [StepRecord(ops=(
        OpRecord(op="aten::mm", phase=Phase.FORWARD, precision="fp32", totals=FlopTotals(model_flops=600_000_000)),
    ))]  # fmt: skip
    bench.run(monitor, 7)
    monitor.close()
    assert '"mfu": 2.0' not in "".join(
        line for line in path.read_text().splitlines() if json.loads(line)["kind"] == "reading"
    )
    out = run_json(capsys, str(path), code=1)
    assert (out["reported_mfu"], out["verdict"]) == (pytest.approx(2.0), "impossible")
    assert out["impossible_rows"] == out["rows"] > 0
    assert "mfu_over_peak" in [d["code"] for d in out["diagnoses"]]


def test_a_damaged_reading_of_our_own_is_refused_by_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.jsonl", '{"schema": 1, "kind": "reading", "step": 1, "payload": {}}\n')
    assert "m.jsonl, line 1: UtilizationReading.window is missing" in refuse(capsys, log)


def test_two_columns_of_one_name_are_never_mixed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.csv", "step,tokens_per_s,tokens_per_s\n1,900,1\n2,910,2\n")
    words = "'tokens_per_s (column 2)' and 'tokens_per_s (column 3)' both hold tokens_per_s; the first is used"
    assert any(words in note for note in run_json(capsys, log, *SEVENTY)["notes"])
    chosen = run_json(capsys, log, *SEVENTY, "--tokens-per-s-column", "tokens_per_s (column 2)")
    assert (chosen["tokens_per_s"], chosen["rows"]) == (905.0, 2)


def test_a_json_array_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write(tmp_path / "m.json", '[{"step": 1, "tokens_per_s": 900}]')
    assert run_json(capsys, log, *SEVENTY)["tokens_per_s"] == 900


# TensorBoard.


def board(path: Path, tag: str, values: list[float]) -> str:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(path))
    for i, value in enumerate(values):
        writer.add_scalar(tag, value, global_step=10 * i, walltime=1000.0 + 60 * i)
    writer.close()
    return str(path)


def test_a_tensorboard_directory_is_read_by_tag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = board(tmp_path / "run", "throughput/tokens_per_s", [900.0, 900.0, 3000.0])
    out = run_json(capsys, log, *SEVENTY, "--price", "30", code=1)
    assert (out["tokens_per_s"], out["rows"], out["first_impossible_step"]) == (900, 3, 20)
    assert out["gpu_hours"] == pytest.approx(120 / 3600)  # from the first to the last wall time
    assert out["cost"] == pytest.approx(1.0)


def test_a_tag_that_is_missing_is_refused_with_the_tags_there_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = board(tmp_path / "run", "train/speed", [900.0, 900.0])
    assert "It has: wall_time, train/speed" in refuse(capsys, log, *SEVENTY, code=3)
    assert "'speed' is not in" in refuse(capsys, log, *SEVENTY, "--tokens-per-s-column", "speed")
    assert run_json(capsys, log, *SEVENTY, "--tokens-per-s-column", "train/speed")["rows"] == 2


def test_nan_in_a_tensorboard_log_is_no_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = board(tmp_path / "run", "utilization/mfu", [0.4, float("nan"), 0.4])
    assert run_json(capsys, log, "--gpu", "H100 SXM")["rows"] == 2


def test_directories_without_one_run_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no TensorBoard event file" in refuse(capsys, str(tmp_path / "empty"))
    board(tmp_path / "many" / "a", "utilization/mfu", [0.4])
    board(tmp_path / "many" / "b", "utilization/mfu", [0.4])
    assert "holds 2 runs; give one of them" in refuse(capsys, str(tmp_path / "many"))


def test_without_tensorboard_the_message_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = board(tmp_path / "run", "utilization/mfu", [0.4])
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.backend.event_processing.event_accumulator", None)
    assert "pip install 'tensorboard>=2.16'" in refuse(capsys, log)
