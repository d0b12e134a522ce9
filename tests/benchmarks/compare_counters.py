"""The conformance table under other counters: right, wrong by what factor, or silent. Writes ``docs/conformance.md``.

Each tool is asked for what it offers. Torch's ``FlopCounterMode`` sees the whole row; fvcore, DeepSpeed, calflops, thop
and ptflops see a forward only, and are held against the row's forward. Where a tool answers in multiply-adds they are
doubled, and where it offers both multiply-adds and FLOPs (DeepSpeed, calflops) the multiply-adds are taken, which leave
its elementwise work out. Every row runs in a process of its own, since several of the tools patch torch.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the table lies beside the tests, which are no package

from mfu_monitor.formulas.registry import is_ignored  # noqa: E402
from tests.conformance.case import Case, build, evaluate, perform, run  # noqa: E402
from tests.conformance.table import cases_by_title  # noqa: E402

PAGE = ROOT / "docs" / "conformance.md"
TIME_LIMIT_S = 60.0
NEAR = 0.05
KINDS = ("right", "near", "wrong", "named", "silent", "raises")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool said for one row."""

    flops: int | None = None
    error: str | None = None
    reported: tuple[str, ...] = ()
    """Operators that it said it could not count."""


# --- the tools --------------------------------------------------------------------------------------------------------


class Workload(nn.Module):
    """A row's function or module as a module of one unused parameter, for tools that ask for a module's device."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
        super().__init__()
        devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
        self.function = function
        self.unused = nn.Parameter(torch.zeros(1, device=devices[0] if devices else None))

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Bound(Workload):
    """The same with its inputs inside: ptflops divides by the batch size of inputs that it sees."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
        super().__init__(function, inputs)
        self.inputs = inputs

    def forward(self) -> Any:
        return self.function(*self.inputs)


def _ours(case: Case) -> Answer:
    record = run(case, case.devices[0])
    return Answer(flops=record.model_flops, reported=tuple(op.op for op in record.unsupported_ops))


def _torch(case: Case) -> Answer:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    perform(case, *build(case, case.devices[0]), counter)
    return Answer(flops=int(counter.get_total_flops()))


def _fvcore(function: Callable[..., Any], inputs: Sequence[Any]) -> Answer:
    from fvcore.nn import FlopCountAnalysis

    analysis = FlopCountAnalysis(Workload(function, inputs), tuple(inputs)).tracer_warnings("none")
    return Answer(flops=2 * int(analysis.total()), reported=tuple(analysis.unsupported_ops()))


def _deepspeed(function: Callable[..., Any], inputs: Sequence[Any]) -> Answer:
    from deepspeed.profiling.flops_profiler import FlopsProfiler  # type: ignore[import-not-found,import-untyped,unused-ignore]

    model = Workload(function, inputs)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(*inputs)
    return Answer(flops=2 * int(profiler.get_total_macs()))


def _calflops(function: Callable[..., Any], inputs: Sequence[Any]) -> Answer:
    from calflops import calculate_flops  # type: ignore[import-not-found,import-untyped,unused-ignore]

    _, macs, _ = calculate_flops(
        Workload(function, inputs), args=list(inputs), print_results=False, output_as_string=False
    )
    return Answer(flops=2 * int(macs))


def _thop(function: Callable[..., Any], inputs: Sequence[Any]) -> Answer:
    from thop import profile  # type: ignore[import-not-found,import-untyped,unused-ignore]

    macs, _ = profile(Workload(function, inputs), inputs=tuple(inputs), verbose=False)
    return Answer(flops=2 * int(macs))


def _ptflops(function: Callable[..., Any], inputs: Sequence[Any]) -> Answer:
    from ptflops import get_model_complexity_info  # type: ignore[import-not-found,import-untyped,unused-ignore]

    macs, _ = get_model_complexity_info(
        Bound(function, inputs), (1,), input_constructor=lambda _: {}, as_strings=False, print_per_layer_stat=False
    )
    return Answer(flops=2 * int(macs)) if macs is not None else Answer(error="ptflops gave up")


def _of_forward(count: Callable[[Callable[..., Any], Sequence[Any]], Answer]) -> Callable[[Case], Answer]:
    """A tool that runs a forward itself."""

    def answer(case: Case) -> Answer:
        function, inputs = build(case, case.devices[0])
        with torch.set_grad_enabled(case.phase != "inference"), case.context():
            return count(function, inputs)

    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A counter to compare with."""

    name: str
    package: str
    count: Callable[[Case], Answer]
    sees_backward: bool = False


TOOLS = (
    Tool(name="mfu-monitor", package="mfu-monitor", count=_ours, sees_backward=True),
    Tool(name="torch", package="torch", count=_torch, sees_backward=True),
    Tool(name="fvcore", package="fvcore", count=_of_forward(_fvcore)),
    Tool(name="DeepSpeed", package="deepspeed", count=_of_forward(_deepspeed)),
    Tool(name="calflops", package="calflops", count=_of_forward(_calflops)),
    Tool(name="thop", package="thop", count=_of_forward(_thop)),
    Tool(name="ptflops", package="ptflops", count=_of_forward(_ptflops)),
)


def missing_reason(tool: Tool) -> str | None:
    """Why a tool cannot be asked here; None if it can."""
    if tool.package in ("mfu-monitor", "torch"):
        return None
    try:
        with _quiet():
            importlib.import_module(tool.package)
    except Exception as error:  # noqa: BLE001  (a broken installation may raise anything)
        return f"{type(error).__name__}: {error}"
    return None


# --- asking -----------------------------------------------------------------------------------------------------------


def expected_flops(case: Case, tool: Tool) -> tuple[int, ...]:
    """The right answers for a tool: model FLOPs, or what the hardware runs; of the forward if that is all it sees.

    Empty where a tool that runs forwards has none to run.
    """
    if tool.sees_backward or case.phase == "inference":
        return evaluate(case.model_flops), evaluate(case.hardware_flops or case.model_flops)
    return (evaluate(case.forward_flops),) if case.forward_flops is not None else ()


def ask(tool: Tool, case: Case) -> Answer:
    """A tool's answer for a row, from a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_answer, args=(tool, case, sender))
    process.start()
    sender.close()
    try:
        answer: Answer = receiver.recv() if receiver.poll(TIME_LIMIT_S) else Answer(error="no answer within a minute")
    except EOFError:
        answer = Answer(error="the process died")
    process.kill()
    process.join()
    return answer


def _send_answer(tool: Tool, case: Case, sender: Any) -> None:
    try:
        with _quiet():
            answer = tool.count(case)
    except BaseException as error:  # noqa: BLE001  (whatever it raises is its answer)
        answer = Answer(error=f"{type(error).__name__}: {error}"[:300])
    sender.send(answer)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def judge(answer: Answer | None, expected: Sequence[int], must_report: Sequence[str] = ()) -> str:
    """A verdict, in the words of the page's introduction.

    Args:
        answer: what the tool said; None if it was not asked.
        expected: the right answers, the row's model FLOPs first; empty if it was not asked.
        must_report: operators whose FLOPs shapes do not tell: a tool has to name them.
    """
    if answer is None or not expected:
        return "–"
    if answer.flops is None:
        return "raises"
    if must_report:
        return "right" if set(must_report) <= set(answer.reported) and answer.flops in expected else "silent"
    if answer.flops in expected:
        return "right"
    if answer.flops < expected[0] and not all(map(is_ignored, answer.reported)):
        return "named"
    if not expected[0]:
        return f"{answer.flops:,}, not 0"
    return f"×{answer.flops / expected[0]:.4g}" if answer.flops else "silent"


# --- the page ---------------------------------------------------------------------------------------------------------

Verdicts = Mapping[str, Mapping[str, str]]
"""By tool, then by the row's id."""

INTRODUCTION = """# Conformance

What each counter says about the rows of the table in `tests/conformance`. The right values are arithmetic on shapes,
derived by hand and written in the row; one multiply-add is 2 FLOPs. `make compare` runs the tools and writes this page.

- **right**: the model FLOPs of the row, or what the hardware ran, where that is more (a kernel's or checkpointing's
  recomputation, masked-out pairs).
- **×0.5**: so many times the right figure. Within 5% of it (a bias that is counted too) the summary says *near*.
- **named**: too little, and the tool names an operator that it left out.
- **silent**: 0 for something, and nothing said; or an operator that cannot be counted and is not named.
- **raises**: an exception instead of a figure.
- **–**: the tool runs a forward, and the row has none of its own.

mfu-monitor and torch's `FlopCounterMode` see the whole row, backward included. The others see a forward and are held
against the row's forward only: fvcore and thop by their totals in multiply-adds, doubled; DeepSpeed's profiler and
calflops by their multiply-adds, doubled, so that the elementwise work which they count as FLOPs is left out; ptflops by
its default backend, without dividing by the batch, doubled. Inputs, devices and kernel choices are the same for all.
"""


def collect(tools: Sequence[Tool], cases: Sequence[Case]) -> dict[str, dict[str, str]]:
    """Every tool's verdict on every row."""
    verdicts: dict[str, dict[str, str]] = {}
    for tool in tools:
        verdicts[tool.name] = {case.id: _verdict(tool, case) for case in cases}
        print(f"{tool.name:12} {_summary(verdicts[tool.name])}", flush=True)
    return verdicts


def _verdict(tool: Tool, case: Case) -> str:
    expected = expected_flops(case, tool)
    return judge(ask(tool, case) if expected else None, expected, case.unsupported_ops)


def kind(verdict: str) -> str:
    """What a verdict counts as in the summary."""
    if verdict in ("right", "named", "silent", "raises", "–"):
        return verdict
    is_near = verdict.startswith("×") and abs(float(verdict[1:]) - 1) <= NEAR
    return "near" if is_near else "wrong"


def _summary(verdicts: Mapping[str, str]) -> str:
    counts = Counter(map(kind, verdicts.values()))
    return ", ".join(f"{counts[name]} {name}" for name in KINDS if counts[name])


def page(verdicts: Verdicts, missing: Mapping[str, str], groups: Mapping[str, Sequence[Case]]) -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION, _summary_table(verdicts)]
    parts += [f"- {name} could not be run: {reason}" for name, reason in missing.items()]
    parts += [_group_table(title, cases, verdicts) for title, cases in groups.items()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _summary_table(verdicts: Verdicts) -> str:
    lines = [f"| tool | version | {' | '.join(KINDS)} | rows |", "|---|---|" + "---:|" * (len(KINDS) + 1)]
    packages = {tool.name: tool.package for tool in TOOLS}
    for name, by_row in verdicts.items():
        counts = Counter(map(kind, by_row.values()))
        asked = sum(counts.values()) - counts["–"]
        figures = [*(counts[k] for k in KINDS), asked]
        lines.append(f"| {name} | {metadata.version(packages[name])} | " + " | ".join(map(str, figures)) + " |")
    return "\n".join(lines)


def _group_table(title: str, cases: Sequence[Case], verdicts: Verdicts) -> str:
    head = ["row", "what runs", "model FLOPs, forward and backward", *verdicts]
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case in cases:
        said = [by_row[case.id] for by_row in verdicts.values()]
        lines.append(f"| {' | '.join([f'`{case.id}`', _escaped(case.description), arithmetic(case), *said])} |")
    return "\n".join(lines)


def arithmetic(case: Case) -> str:
    """A row's model FLOPs, with how they come about."""
    value = f"{evaluate(case.model_flops):,}"
    return value if case.model_flops == "0" else f"`{case.model_flops}` = {value}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def main() -> None:
    """Ask every tool that is installed, print the totals, and write the page."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for a device when it is imported
    groups = cases_by_title()
    cases = [case for group in groups.values() for case in group]
    reasons = {tool.name: missing_reason(tool) for tool in TOOLS}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    print(f"{len(cases)} rows of the conformance table")
    for name, reason in missing.items():
        print(f"{name:12} could not be run: {reason}")
    verdicts = collect([tool for tool in TOOLS if tool.name not in missing], cases)
    PAGE.write_text(page(verdicts, missing, groups), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
