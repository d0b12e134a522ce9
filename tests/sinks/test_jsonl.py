"""JSON lines: what is written comes back, and bad files are named."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord, UnsupportedOp
from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning
from mfu_monitor.sinks import Event, JsonlSink, read_jsonl
from mfu_monitor.sinks.jsonl import is_of_other_rank, path_of_rank
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

READING = UtilizationReading(
    window=StepWindow(first_step=0, last_step=9, steps=10, elapsed_s=2.0, wall_s=2.5, excluded_s={"validation": 0.5}),
    mfu=0.25,
    precision="bf16",
    peak_flops_per_s_by_precision={"bf16": 989.4e12},
)
RECORD = StepRecord(
    ops=(
        OpRecord(
            op="aten::mm",
            phase=Phase.RECOMPUTE,
            module_fqn="blocks.0.mlp",
            precision="bf16",
            shapes=((4, 8), (8, 16)),
            calls=3,
            totals=FlopTotals(recompute_flops=3 * 2 * 4 * 8 * 16),
        ),
    ),
    unsupported_ops=(UnsupportedOp(op="mylib::attn", module_fqn="blocks.0"),),
    is_training=True,
)


def write(path: Path, *events: Event) -> None:
    sink = JsonlSink(path)
    for event in events:
        sink.emit(event)
    sink.close()


def test_readings_and_records_come_back_as_the_records_they_were(tmp_path: Path) -> None:
    path = tmp_path / "mfu.jsonl"
    write(
        path,
        Event(kind="record", step=2, payload=RECORD.to_dict()),
        Event(kind="reading", step=9, metrics={"utilization/mfu": 0.25}, payload=READING.to_dict()),
        Event(kind="card", step=9, title="end", text="| a |\n| b |"),
    )
    run = read_jsonl(path)
    assert run.readings == (READING,)
    assert run.records == (RECORD,)
    assert [event.kind for event in run.events] == ["record", "reading", "card"]
    assert run.events[2].text == "| a |\n| b |"


def test_a_record_may_travel_with_its_signature_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "mfu.jsonl"
    write(path, Event(kind="record", step=2, payload={"signature": "a", "record": RECORD.to_dict()}))
    assert read_jsonl(path).records == (RECORD,)


def test_each_line_is_one_event_with_the_schema_version_and_is_there_before_close(tmp_path: Path) -> None:
    path = tmp_path / "mfu.jsonl"
    sink = JsonlSink(path)
    sink.emit(Event(kind="run", step=0, text="two\nlines"))
    lines = path.read_text().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["schema"] == 1
    sink.close()


def test_an_existing_file_is_continued_as_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "mfu.jsonl"
    write(path, Event(kind="run", step=0))
    write(path, Event(kind="run", step=100))
    assert [event.step for event in read_jsonl(path).events] == [0, 100]


@pytest.mark.parametrize("where", ["a_directory", "a_file/below.jsonl"])
def test_an_unwritable_path_is_refused_in_the_constructor_with_what_is_allowed(tmp_path: Path, where: str) -> None:
    (tmp_path / "a_directory").mkdir()
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written") as raised:
        JsonlSink(tmp_path / where)
    assert where in str(raised.value)
    assert "for example jsonl='runs/mfu.jsonl'" in str(raised.value)


def test_a_sink_that_has_written_still_travels_to_a_spawned_process(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "mfu.jsonl")
    sink.emit(Event(kind="run", step=0))
    copy = pickle.loads(pickle.dumps(sink))
    copy.emit(Event(kind="run", step=1))
    copy.close()
    sink.close()
    assert len(read_jsonl(sink.path).events) == 2


def test_not_a_number_and_infinity_are_written_as_unknown(tmp_path: Path) -> None:
    path = tmp_path / "mfu.jsonl"
    write(path, Event(kind="reading", step=0, metrics={"a": math.nan}, payload={**READING.to_dict(), "mfu": math.inf}))
    assert read_jsonl(path).readings[0].mfu is None
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()


def test_a_last_line_that_was_cut_off_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "mfu.jsonl"
    write(path, Event(kind="run", step=0), Event(kind="run", step=1))
    path.write_text(path.read_text()[:-20])
    with pytest.warns(MFUMonitorWarning, match="line 2 is cut off"):
        assert [event.step for event in read_jsonl(path).events] == [0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 1, "kind": "run"\n', "line 1: not an event"),
        ('{"schema": 1, "kind": "run", "step": "ten"}\n', "line 1: .*step is 'ten'; expected int"),
        ('{"schema": 1, "kind": "run", "step": 0, "payload": 3}\n', "payload is 3; expected dict"),
        (
            '{"schema": 1, "kind": "reading", "step": 0, "payload": {"window": 3}}\n',
            r"other\.jsonl, line 1: UtilizationReading\.window is 3; expected the fields of StepWindow",
        ),
        ("[" * 100_000 + "\n", "no line of it is JSON"),
        ('{"loss": 1.0}\n', "keys 'schema', 'kind' and 'step' was expected"),
        ("[1, 2]\n", "line 1: not an event"),
        ('{"schema": 99, "kind": "run", "step": 0}\n', "schema version 99 was written by a later"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        read_jsonl(path)


def test_a_run_that_was_killed_and_resumed_loses_its_half_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "mfu.jsonl"
    write(path, Event(kind="run", step=0), Event(kind="run", step=1))
    path.write_text(path.read_text()[:-20])
    write(path, Event(kind="run", step=2), Event(kind="run", step=3))
    with pytest.warns(MFUMonitorWarning, match="line 2 is cut off"):
        assert [event.step for event in read_jsonl(path).events] == [0, 2, 3]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.jsonl"):
        read_jsonl("nowhere.jsonl")


@settings(deadline=None)
@given(
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    step=st.integers(min_value=0),
)
def test_any_event_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float], text: str, step: int
) -> None:
    path = tmp_path_factory.mktemp("round") / "mfu.jsonl"
    event = Event(kind="alert", step=step, metrics=metrics, text=text, title=text)
    write(path, event)
    assert read_jsonl(path).events == (event,)


def test_each_rank_has_a_file_of_its_own_and_the_world_is_in_rank_zeros(tmp_path: Path) -> None:
    world = tmp_path / "mfu.jsonl"
    third = path_of_rank(world, 3)
    assert (path_of_rank(world, 0), third) == (world, tmp_path / "mfu.rank3.jsonl")
    assert not is_of_other_rank(third)  # alone in its folder: it is all there is of the run
    world.touch()
    assert is_of_other_rank(third)
    assert not is_of_other_rank(world)
    assert not is_of_other_rank(tmp_path / "mfu.rankless.jsonl")


def test_a_device_is_written_to_as_it_is() -> None:
    assert path_of_rank("/dev/null", 2) == Path("/dev/null")
