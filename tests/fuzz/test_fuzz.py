"""Whatever is put in: an answer, or one error that names what is wrong. ``make fuzz`` draws ever new examples."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import mfu_monitor as mm
from mfu_monitor.cli import EXIT_CRASHED, main
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.custom import load_custom_devices
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.sinks import read_jsonl
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import read_utilization

RUN = Path(__file__).parents[1] / "goldens" / "run.jsonl"
DEVICES = Path(__file__).parents[2] / "configs" / "custom_device.yaml"
pytestmark = [
    pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning"),
    pytest.mark.timeout(3600),
]
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

FIGURES = st.one_of(
    st.sampled_from([0, -1, 1, 1e300, -1e300, 1e-300, 5e-324, 10**40, 10**400, math.nan, math.inf, -math.inf, True]),
    st.floats(),
    st.integers(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), FIGURES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in _places(value[key], (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A document with one or two of its parts replaced or left out."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(_places(value)))
        if not path:
            continue
        holder = value
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for key in path[:-1]:
                holder = holder[key]
            if draw(st.booleans()):
                holder[path[-1]] = draw(VALUES)
            else:
                del holder[path[-1]]
    return value


LINES = [json.loads(line) for line in RUN.read_text().splitlines()]
KINDS = [next(line for line in LINES if line["kind"] == kind) for kind in sorted({line["kind"] for line in LINES})]


def answers(*arguments: str) -> tuple[int, str]:
    """Exit code and all that was printed."""
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue()


def accepts(*arguments: str) -> None:
    code, printed = answers(*arguments)
    assert code != EXIT_CRASHED, printed
    assert "Traceback" not in printed
    assert "\x1b" not in printed


@shared_folder
@given(line=st.sampled_from(KINDS).flatmap(changed), cut=st.integers(0, 40))
def test_a_changed_file_of_ours_is_read_or_named_with_its_line(tmp_path: Path, line: Any, cut: int) -> None:
    path = tmp_path / "run.jsonl"
    text = json.dumps(line)
    path.write_text("\n".join([*map(json.dumps, KINDS), text[: len(text) - cut] if cut > 30 else text, ""]))
    refused = ""
    try:
        assert all(reading.to_dict() for reading in read_jsonl(path).readings)
    except ConfigurationError as error:
        refused = str(error)
    assert not refused or f"{path}, line {len(KINDS) + 1}" in refused


@shared_folder
@given(lines=st.lists(st.sampled_from(KINDS).flatmap(changed), min_size=1, max_size=3))
def test_reports_and_audits_of_changed_files_never_crash(tmp_path: Path, lines: list[Any]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, [*KINDS, *lines])) + "\n")
    accepts("report", str(path), "--json")
    accepts("report", str(path))
    accepts("audit", str(path))


DEVICE_FILE = yaml.safe_load(DEVICES.read_text())


@shared_folder
@given(document=changed(DEVICE_FILE), noise=st.text(max_size=10))
def test_a_file_of_devices_is_read_or_refused(tmp_path: Path, document: Any, noise: str) -> None:
    path = tmp_path / "devices.yaml"
    for text in (yaml.safe_dump(document), json.dumps(document) + noise):
        path.write_text(text)
        with contextlib.suppress(ConfigurationError):
            for names, peak in load_custom_devices(path):
                assert names
                assert all(0 < rate < math.inf for rate in peak.flops_per_s_by_precision.values())


FLAGS = {
    "peaks": ["--gpu", "--sm-count", "--json"],
    "estimate": ["--params", "--tokens", "--gpu", "--gpus", "--mfu", "--days", "--price", "--sequence-length",
                 "--layers",
                 "--width", "--precision", "--peak-tflops", "--tokens-done", "--active-params", "--json"],
    "audit": ["--params", "--gpu", "--gpus", "--tokens-per-s", "--step-time", "--tokens-per-step", "--reported-mfu",
              "--reported-hfu", "--sequence-length", "--layers", "--width", "--heads", "--days", "--tokens",
              "--gpu-hours",
              "--peak-flops-per-s", "--precision", "--window", "--json"],
}  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(
        ["70B", "1e300", "1e-300", "-1", "0", "nan", "inf", "", "8", "H100 SXM", "bf16", "fp9", "40%", "1" * 400, "1T",
         "250ms", "1.5s", "4096", "1e30", "\x1b[31m", "[bold]", "1_000", "0x10", "½"]
    ),
    st.text(max_size=12),
    FIGURES.map(str),
)  # fmt: skip


@given(
    arguments=st.sampled_from(sorted(FLAGS)).flatmap(
        lambda command: st.lists(
            st.one_of(st.tuples(st.sampled_from(FLAGS[command]), WORDS), st.tuples(WORDS)), max_size=7
        ).map(lambda parts: [command, *(word for part in parts for word in part)])
    )
)
def test_no_command_line_crashes(arguments: list[str]) -> None:
    accepts(*arguments)


GOOD = {
    "audit": ["--params", "7B", "--gpu", "H100 SXM", "--gpus", "8", "--tokens-per-s", "80000", "--reported-mfu", "0.4",
              "--layers", "32", "--width", "4096", "--sequence-length", "4096"],
    "estimate": ["--params", "7B", "--tokens", "1T", "--gpu", "H100 SXM", "--gpus", "8", "--mfu", "0.4"],
}  # fmt: skip


@given(command=st.sampled_from(sorted(GOOD)), place=st.integers(0, 6), word=WORDS, as_json=st.booleans())
def test_one_figure_beyond_sense_is_an_answer_or_one_error(command: str, place: int, word: str, as_json: bool) -> None:
    arguments = list(GOOD[command])
    arguments[(2 * place + 1) % len(arguments)] = word
    accepts(command, *arguments, *(["--json"] if as_json else []))


@given(name=st.one_of(st.text(max_size=40), st.sampled_from(["H100", "A100 80GB", "x" * 100_000, "NVIDIA " * 2000])))
def test_any_name_of_a_device_is_known_or_not(name: str) -> None:
    with contextlib.suppress(ConfigurationError):
        peak = mm.device_peak(name)
        assert peak is None or all(rate > 0 for rate in peak.flops_per_s_by_precision.values())


TENSORS = st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape))
BATCHES = st.recursive(
    st.one_of(
        st.none(), TENSORS, st.integers(), st.text(max_size=3), st.builds(object), TENSORS.map(torch.Tensor.bool)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["input_ids", "attention_mask", "labels", "x"]), inner, max_size=3),
        st.tuples(inner, inner),
        inner.map(lambda part: iter([part])),
    ),
    max_leaves=6,
)


@given(batches=st.lists(BATCHES, min_size=1, max_size=4))
def test_no_batch_raises_or_warns(batches: list[Any]) -> None:
    model = nn.Linear(4, 4)
    monitor = mm.Monitor(model, log_every_n_steps=2, peak=1e12, console=False, count_padding=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches:
            with monitor.step(batch):
                model(torch.ones(2, 4)).sum().backward()
        monitor.close()
    assert not monitor._stages.off


@given(widths=st.lists(st.integers(1, 7), min_size=2, max_size=6), rows=st.integers(1, 4), deep=st.booleans())
def test_any_stack_of_layers_counts_as_its_shapes_say(widths: list[int], rows: int, deep: bool) -> None:
    layers: list[nn.Module] = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) if deep else layer for layer in layers))
    with mm.FlopCounter(model) as counter:
        model(torch.ones(rows, widths[0])).sum().backward()
    products = [2 * rows * a * b for a, b in itertools.pairwise(widths)]
    assert counter.record.model_flops == 3 * sum(products) - products[0]  # the data wants no gradient


@given(
    elapsed_s=FIGURES, flops=st.one_of(st.none(), FIGURES), rate=FIGURES, tokens=st.one_of(st.none(), FIGURES),
    world_size=st.sampled_from([1, 8]), convention=st.sampled_from(["exact", "palm"]),
)  # fmt: skip
def test_arithmetic_at_the_edges_gives_a_number_or_none_with_a_reason(
    elapsed_s: Any, flops: Any, rate: Any, tokens: Any, world_size: int, convention: str
) -> None:
    window = StepWindow(
        first_step=0, last_step=9, steps=10, elapsed_s=elapsed_s, wall_s=elapsed_s, model_flops=flops,
        hardware_flops=flops, tokens=tokens, samples=tokens, world_size=world_size, world_model_flops=flops,
        world_hardware_flops=flops, world_tokens=tokens, world_peak_flops_per_s=rate,
        model_flops_by_precision={} if flops is None else {"bf16": flops},
    )  # fmt: skip
    peak = DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": rate})
    reading = read_utilization(window, peak, convention=convention)
    assert reading.mfu is not None or reading.reason
    for field in dataclasses.fields(reading):
        value = getattr(reading, field.name)
        if field.name not in ("window", "peak_flops_per_s_by_precision") and isinstance(value, float):
            assert math.isfinite(value), field.name
    assert mm.check(reading) is not None
