"""``mfu-monitor report`` on logs of both kinds, and its page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mfu_monitor.alerts import AlertDetector
from mfu_monitor.cli import main
from mfu_monitor.errors import MFUMonitorWarning
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.jsonl import JsonlSink
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading


def readings(*, wait_s_later: float = 0.02, windows: int = 80) -> list[UtilizationReading]:
    """Ten steps a window, 1 s per step; from window 50 on the wait for data is what the test says."""
    found = []
    for index in range(windows):
        wait_s = 0.02 if index < 50 else wait_s_later
        step_s = 0.98 + wait_s
        window = StepWindow(
            first_step=10 * index + 1,
            last_step=10 * index + 10,
            steps=10,
            elapsed_s=10 * step_s,
            wall_s=10 * step_s + (10.0 if index == 20 else 0.0),
            data_wait_s=10 * wait_s,
            forward_s=3.0,
            backward_s=6.0,
            optimizer_s=0.5,
            other_s=0.3,
            model_flops=45 * 10**13,
            hardware_flops=45 * 10**13,
            excluded_s={"validation": 10.0} if index == 20 else {},
        )
        mfu = 0.45 / step_s
        found.append(UtilizationReading(window=window, mfu=mfu, hfu=mfu, precision="bf16", device_name="<A100>"))
    return found


def write_jsonl(folder: Path, *, alerts: bool = True, **options: Any) -> Path:
    sink, detector = JsonlSink(folder / "mfu.jsonl"), AlertDetector()
    for reading in readings(**options):
        sink.emit(Event(kind="reading", step=reading.last_step, payload=reading.to_dict()))
        for alert in detector.update(reading) if alerts else ():
            sink.emit(Event(kind="alert", step=alert.step, payload=alert.to_dict(), text=alert.message))
    sink.close()
    return folder


def write_tensorboard(folder: Path, **options: Any) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    writer, wall = SummaryWriter(str(folder)), 1000.0
    for reading in readings(**options):
        wall += reading.window.wall_s
        scalars = {
            "utilization/mfu": reading.mfu,
            "step_time/total_s": reading.elapsed_s / 10,
            "step_time/data_wait_s": (reading.window.data_wait_s or 0.0) / 10,
            "step_time/forward_s": 0.3,
            "flops_per_step/model": 45e12,
        }
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, reading.last_step, walltime=wall)
    writer.close()
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["report", *map(str, arguments)])
    assert caught.value.code in (0, None)
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["report", *map(str, arguments)])
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_the_incident_is_told_with_its_cause_and_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, write_jsonl(tmp_path / "gpt", wait_s_later=0.32))
    assert "Median MFU" in out
    assert "45.0%" in out
    assert "validation 10.0 s" in out
    assert "gpt, drop, steps 501-800, not recovered" in out
    assert "waiting for data (2% -> 25% of the step), 0.02 -> 0.32 s/step: 100% of the loss" in out
    # 30 windows of 13 s at 1/1.3 of the level: 390 s * (1 - 1/1.3) = 90 s.
    assert "data loading 90.0 s" in out


def test_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, write_jsonl(tmp_path / "good"), write_jsonl(tmp_path / "bad", wait_s_later=0.32))
    assert re.search(r"good\s+┃\s+bad", out)
    assert re.search(r"Incidents\s+│ 0\s+│ 1", out)


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_jsonl(tmp_path / "a" / "run"), write_jsonl(tmp_path / "b" / "run")
    data = json.loads(run(capsys, first, second, "--json"))
    assert len({summary["name"] for summary in data}) == 2


def test_several_logs_under_one_directory_are_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "logs" / "version_0")
    write_jsonl(tmp_path / "logs" / "version_1")
    data = json.loads(run(capsys, tmp_path / "logs", "--json"))
    assert [summary["name"] for summary in data] == ["logs/version_0", "logs/version_1"]


def test_a_log_without_alerts_is_replayed_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, write_jsonl(tmp_path / "gpt", wait_s_later=0.32, alerts=False))
    assert "1 (found by replaying the readings)" in out


def test_another_drop_is_detected_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_jsonl(tmp_path / "gpt", wait_s_later=0.08)  # 5.7% slower
    assert json.loads(run(capsys, folder, "--json"))[0]["incidents"] == []
    assert len(json.loads(run(capsys, folder, "--drop", "0.05", "--json"))[0]["incidents"]) == 1


def test_tensorboard_files_are_read_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [summary] = json.loads(run(capsys, write_tensorboard(tmp_path / "tb", wait_s_later=0.32), "--json"))
    assert summary["median_mfu"] == pytest.approx(0.45, rel=1e-4)
    assert summary["windows"] == 80
    [incident] = summary["incidents"]
    assert incident["alert"]["causes"][0]["name"] == "data_loading"
    assert incident["alert"]["causes"][0]["before"] == pytest.approx(0.02, rel=1e-3)
    # 50 windows of 10 s, 30 of 13 s and one validation of 10 s, by the events' own times.
    assert summary["wall_s"] == pytest.approx(500 + 390 + 10)


def test_scalars_tell_the_ranks_by_their_rates_and_nothing_of_exactness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight devices of 100 samples/s each; windows of 10 s wall time: 30 s of eight devices."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for window in range(3):
        for tag, value in (
            ("utilization/mfu", 0.4),
            ("throughput/samples_per_s", 800.0),
            ("throughput/device/samples_per_s", 100.0),
        ):
            writer.add_scalar(tag, value, 10 * window + 9, walltime=1000.0 + 10 * window)
    writer.close()
    [summary] = json.loads(run(capsys, tmp_path, "--json"))
    assert summary["world_size"] == 8
    assert summary["gpu_hours"] == pytest.approx(30 * 8 / 3600)
    assert summary["exactness"] == []


def test_the_page_is_self_contained_and_escapes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    run(capsys, write_jsonl(tmp_path / "gpt", wait_s_later=0.32), "--html", page)
    text = page.read_text(encoding="utf-8")
    assert "&lt;A100&gt;" in text
    assert "<A100>" not in text
    assert text.count("<svg") == 1
    assert "waiting for data (2% -&gt; 25% of the step)" in text
    fetched = re.findall(r"""(?:src|href)\s*=\s*["']([^"'#][^"']*)""", text)
    assert fetched == []
    assert "<script" not in text


def test_the_same_log_gives_the_same_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_jsonl(tmp_path / "gpt")
    pages = []
    for name in ("1.html", "2.html"):
        run(capsys, folder, "--html", tmp_path / name)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_a_long_run_is_drawn_thinned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    run(capsys, write_jsonl(tmp_path / "long", windows=5000, alerts=False), "--html", page)
    assert page.stat().st_size < 2_000_000


def test_html_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    err = refused(capsys, write_jsonl(tmp_path / "gpt"), "--html", tmp_path / "r.html")
    assert "pip install 'mfu-monitor[plots]'" in err


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, write_jsonl(tmp_path / "gpt"), "--html", tmp_path / "none" / "r.html")
    assert "cannot be written (No such file or directory)" in err


def test_a_missing_directory_says_what_is_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, tmp_path / "nowhere")
    assert "does not exist" in err
    assert ".jsonl" in err


def test_a_directory_without_readings_says_how_to_log_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no .jsonl file" in refused(capsys, tmp_path)
    (tmp_path / "empty.jsonl").touch()
    err = refused(capsys, tmp_path)
    assert "No readings in" in err
    assert "empty.jsonl" in err
    assert "MFUMonitor(jsonl=" in err


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_jsonl(tmp_path / "gpt") / "mfu.jsonl"
    file.write_text("not json\n" + file.read_text())
    with pytest.warns(MFUMonitorWarning, match="line 1 is cut off"):
        [summary] = json.loads(run(capsys, tmp_path / "gpt", "--json"))
    assert summary["windows"] == 80


def test_another_run_in_the_same_file_is_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = json.loads(run(capsys, write_jsonl(tmp_path / "gpt", wait_s_later=0.4), "--json"))[0]
    twice = json.loads(run(capsys, write_jsonl(tmp_path / "gpt", wait_s_later=0.4), "--json"))
    assert [summary["name"] for summary in twice] == ["gpt (run 1)", "gpt (run 2)"]
    for summary in twice:
        assert summary["gpu_hours"] == once["gpu_hours"]
        assert summary["lost_gpu_hours_by_cause"] == once["lost_gpu_hours_by_cause"]
        assert summary["lost_gpu_hours_by_cause"]["data_loading"] > 0


def test_other_files_of_lines_are_left_out_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "gpt")
    (tmp_path / "gpt" / "data.jsonl").write_text('{"text": "hello"}\n')
    with pytest.warns(MFUMonitorWarning, match="Left out: .*data.jsonl was not written through"):
        [summary] = json.loads(run(capsys, tmp_path / "gpt", "--json"))
    assert summary["windows"] == 80
    assert "data.jsonl looks like JSON, and holds no tokens/s" in refused(capsys, tmp_path / "gpt" / "data.jsonl")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"schema": 1, "kind": "reading", "step": 3, "payload": {}}, "line 1: UtilizationReading.window is missing"),
        ({"schema": 1, "kind": "record", "step": 3, "payload": {"ops": 7}}, "line 1: StepRecord.ops is 7"),
        ({"schema": 1, "kind": "alert", "step": 3, "payload": {"message": "x"}}, "step 3: not an alert"),
        ({"schema": "1", "kind": "reading", "step": 3, "payload": {}}, "line 1: not an event"),
    ],
)
def test_an_event_that_is_not_whole_is_refused_and_named(
    event: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mfu.jsonl"
    file.write_text(json.dumps(event) + "\n" + (write_jsonl(tmp_path / "gpt") / "mfu.jsonl").read_text())
    assert words in refused(capsys, file)


def test_not_a_number_in_a_log_is_unknown_and_the_json_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "gpt") / "mfu.jsonl"
    file.write_text(re.sub(r'"(mfu|hfu)": [0-9.]+', r'"\1": NaN', file.read_text()))
    text = run(capsys, tmp_path / "gpt", "--json")
    assert json.loads(text, parse_constant=pytest.fail)[0]["median_mfu"] is None


def test_a_cause_that_reads_like_mathematics_is_drawn_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "gpt", wait_s_later=0.4) / "mfu.jsonl"
    file.write_text(file.read_text().replace('"data_loading"', '"$\\\\frac<b>$"'))
    page = tmp_path / "page.html"
    run(capsys, tmp_path / "gpt", "--html", page)
    assert "<b>$" not in page.read_text()


def test_a_wrong_drop_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "drop=10.0 was given; a fraction" in refused(capsys, write_jsonl(tmp_path / "gpt"), "--drop", "10")


def test_runs_of_other_tools_stand_beside_ours_on_one_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 x 7e9 x 10,643 tokens/s over 989.4 TFLOP/s is 45.2%; the log claims 46.4% by its own formula."""
    log = tmp_path / "titan.csv"
    log.write_text("step,throughput(tps),mfu(%),tflops\n" + "".join(f"{i},10643,46.4,459.5\n" for i in range(5)))
    ours = write_jsonl(tmp_path / "gpt")
    with pytest.warns(MFUMonitorWarning, match="as torchtitan writes it"):
        out = run(capsys, ours, log, "--params", "7B", "--gpu", "H100 SXM", "--gpus", "8", "--json")
    mine, other = json.loads(out)
    assert (mine["claimed_mfu"], mine["format"]) == (None, "")
    assert other["median_mfu"] == pytest.approx(6 * 7e9 * 10643 / 989.4e12)
    assert (other["claimed_mfu"], other["format"]) == (pytest.approx(0.464), "torchtitan, CSV")


@pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning")
def test_an_impossible_mfu_of_another_tools_run_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.csv"
    log.write_text("step,tokens_per_s\n1,529000\n2,529000\n")
    (summary,) = json.loads(run(capsys, log, "--params", "7B", "--gpu", "H100 SXM", "--json"))
    assert summary["median_mfu"] is None


EVIL = "<script>alert(1)</script>\x1b]0;owned\x07"


@pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning")
@pytest.mark.parametrize("field", ["device_name", "precision", "exactness", "excluded_s", "last_step", "alert"])
def test_nothing_in_a_log_runs_in_a_page_or_commands_a_terminal(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_jsonl(tmp_path / "gpt") / "mfu.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    for event in events:
        if event["kind"] == "reading" and field in ("excluded_s", "last_step"):
            event["payload"]["window"][field] = {EVIL: 5.0} if field == "excluded_s" else EVIL
        elif event["kind"] == "reading" and field != "alert":
            event["payload"][field] = EVIL
    if field == "alert":
        cause = {"name": EVIL, "before": 1, "after": 2, "unit": EVIL, "share_of_loss": 0.5, "description": EVIL}
        payload = {
            "kind": "drop",
            "step": 6,
            "mfu": 0.1,
            "baseline": 0.2,
            "loss": 0.5,
            "message": EVIL,
            "first_step": 4,
        }
        events.append({"schema": 1, "kind": "alert", "step": 6, "payload": {**payload, "causes": [cause]}})
    file.write_text("\n".join(map(json.dumps, events)) + "\n")
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit):
        main(["report", str(file), "--html", str(page)])
    captured = capsys.readouterr()
    shown = captured.out + captured.err + (page.read_text() if page.exists() else "")
    assert "<script>alert" not in (page.read_text() if page.exists() else "")
    assert "\x1b]0" not in shown
    assert field != "last_step" or "line 1: UtilizationReading.window.last_step is" in captured.err
