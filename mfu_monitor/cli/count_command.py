"""``mfu-monitor count MODEL``: the FLOPs of a model by module, without a device, a weight or a batch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from mfu_monitor.cli.crosscheck import Comparison, compare
from mfu_monitor.cli.devices import find_device
from mfu_monitor.cli.meta_step import count_step
from mfu_monitor.cli.models import LoadedModel, load_model
from mfu_monitor.cli.options import JSON, add_command
from mfu_monitor.cli.units import format_quantity
from mfu_monitor.counting.step_record import OpRecord, StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import logical_numel, non_embedding_parameters
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import group_points, step_roofline

__all__ = ["ModuleRow", "module_rows", "register"]

DTYPES = ("bf16", "fp16", "fp32")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One line of the table: a module, or the same module of every layer together."""

    module: str
    """Name in the model, numbered siblings as ``*``; the root is the model's class."""
    kind: str
    count: int
    """How many modules the line stands for."""
    parameters: int
    forward_flops: int
    model_flops: int
    """Forward and backward."""
    flops_per_token: float
    share: float
    """Of the model's FLOPs, 0..1."""
    arithmetic_intensity: float | None
    """FLOP per byte, each operand read once and each result written once."""
    bound: str | None
    """``"compute"`` or ``"memory"`` on the device that was named."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    add_command(app, "count", CountOptions, _count)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOptions:
    """What the command line gave."""

    model: Annotated[
        str, typer.Argument(help="package.module:factory, or a Hugging Face config.json or the folder that holds it.")
    ]
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences or samples of a batch.")] = 1
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default 2048 or the model's limit.")
    ] = None
    shape: Annotated[
        list[str] | None, typer.Option(help="An input of a factory's model: 2x3x224x224, 2x128:int64. Repeat.")
    ] = None
    precision: Annotated[
        str | None, typer.Option("--precision", "--dtype", help=f"Of the parameters: {', '.join(DTYPES)}.")
    ] = None
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Inference: no backward.")] = False
    depth: Annotated[int, typer.Option(min=0, help="Levels of modules to show.")] = 5
    expand: Annotated[bool, typer.Option("--expand", help="Show every layer by itself.")] = False
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", "--device", help="Say which modules are bound by compute or by memory on it: 'H100 SXM'."
        ),
    ] = None
    crosscheck: Annotated[
        bool, typer.Option("--crosscheck", help="Beside fvcore x 2 and 6ND, with the reason for each difference.")
    ] = False
    as_json: JSON = False


def _count(given: CountOptions) -> None:
    """FLOPs of a model by module: exact, from shapes alone; no weights are made and nothing is computed."""
    if given.crosscheck and given.forward_only:
        raise ConfigurationError("--crosscheck compares a training step, 6ND being one; leave --forward-only out.")
    peak = find_device(given.gpu) if given.gpu else None
    loaded = load_model(
        given.model, batch_size=given.batch_size, sequence_length=given.sequence_length, shapes=given.shape,
        dtype=_dtype(given.precision),
    )  # fmt: skip
    record = count_step(loaded.module, loaded.arguments, loaded.keywords, training=not given.forward_only)
    comparisons = compare(loaded, record) if given.crosscheck else []
    rows = module_rows(loaded, record, depth=given.depth, expand=given.expand, peak=peak)
    if given.as_json:
        typer.echo(json.dumps(_as_dict(loaded, record, rows, comparisons), indent=1))
    else:
        _print(loaded, record, rows, comparisons, has_device=peak is not None)


def _dtype(name: str | None) -> Any:
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name is not None and name not in dtypes:
        raise ConfigurationError(f"--precision {name!r} is not known; expected one of {', '.join(DTYPES)}.")
    return dtypes.get(name) if name else None


# --- rows -------------------------------------------------------------------------------------------------------------


def module_rows(
    model: LoadedModel, record: StepRecord, *, depth: int = 5, expand: bool = False, peak: DevicePeak | None = None
) -> list[ModuleRow]:
    """One row per module down to ``depth``; numbered siblings of one kind share a row unless ``expand``.

    Args:
        model: what was counted.
        record: its step.
        depth: levels below the root.
        expand: a row for every layer.
        peak: says what a module is bound by; None leaves that out.
    """
    modules = dict(model.module.named_modules())
    groups: dict[str, list[str]] = {}
    for name in modules:
        if len(name.split(".")) <= depth or not name:
            groups.setdefault(name if expand else _NUMBER.sub("*", name), []).append(name)
    inside = _by_group(record, groups)
    rows = [
        _row(shown, names, modules, model, record, StepRecord(ops=tuple(inside[shown])), peak)
        for shown, names in groups.items()
    ]
    return [row for row in rows if row.model_flops or row.parameters]


def _row(
    shown: str,
    names: list[str],
    modules: dict[str, nn.Module],
    model: LoadedModel,
    record: StepRecord,
    inside: StepRecord,
    peak: DevicePeak | None,
) -> ModuleRow:
    totals, forward = inside.totals, inside.by_phase().get("forward")
    group = next(iter(group_points(step_roofline(inside, peak).points, lambda _: None).values()), None)
    return ModuleRow(
        module=shown or type(model.module).__name__,
        kind=type(modules[names[0]]).__name__,
        count=len(names),
        parameters=sum(logical_numel(p) for p in {id(p): p for n in names for p in modules[n].parameters()}.values()),
        forward_flops=forward.model_flops if forward else 0,
        model_flops=totals.model_flops,
        flops_per_token=totals.model_flops / model.tokens,
        share=totals.model_flops / record.model_flops if record.model_flops else 0.0,
        arithmetic_intensity=group.arithmetic_intensity if group and totals.model_flops else None,
        bound=group.bound if group and peak is not None and totals.model_flops else None,
    )


def _by_group(record: StepRecord, groups: dict[str, list[str]]) -> dict[str, list[OpRecord]]:
    """The operators of each row's modules and of what is inside them; one pass, since a record is long."""
    group_of = {name: shown for shown, names in groups.items() for name in names}
    inside: dict[str, list[OpRecord]] = {shown: [] for shown in groups}
    rows_of: dict[str, set[str]] = {}
    for op in record.ops:
        if op.module_fqn not in rows_of:
            rows_of[op.module_fqn] = {group_of[a] for a in _self_and_ancestors(op.module_fqn) if a in group_of}
        for shown in rows_of[op.module_fqn]:
            inside[shown].append(op)
    return inside


def _self_and_ancestors(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


# --- printing ---------------------------------------------------------------------------------------------------------


def _as_dict(
    model: LoadedModel, record: StepRecord, rows: list[ModuleRow], comparisons: list[Comparison]
) -> dict[str, Any]:
    return {
        "model": model.name,
        "inputs": _inputs_text(model),
        "parameters": sum(logical_numel(p) for p in model.module.parameters()),
        "non_embedding_parameters": non_embedding_parameters(model.module),
        "per": model.unit,
        f"{model.unit}s": model.tokens,
        "model_flops": record.model_flops,
        "palm_model_flops": record.palm_model_flops,
        "flops_per_token": record.model_flops / model.tokens,
        "by_phase": {phase: totals.model_flops for phase, totals in record.by_phase().items()},
        "is_lower_bound": record.is_lower_bound,
        "unsupported_ops": sorted({op.op for op in record.unsupported_ops}),
        "notes": list(_notes(model, record)),
        "modules": [asdict(row) for row in rows],
        "crosscheck": [{**asdict(c), "difference": c.difference} for c in comparisons],
    }


def _print(
    model: LoadedModel, record: StepRecord, rows: list[ModuleRow], comparisons: list[Comparison], *, has_device: bool
) -> None:
    console = Console(width=None if Console().is_terminal else 200, highlight=False)
    n = sum(logical_numel(p) for p in model.module.parameters())
    console.print(f"{model.name}: {format_quantity(n)} parameters, {_inputs_text(model)}", markup=False, soft_wrap=True)
    console.print(_table(rows, model, has_device=has_device))
    for line in _notes(model, record):
        console.print(f"note: {line}", markup=False, soft_wrap=True)
    if comparisons:
        console.print(_comparison_table(comparisons))
        for comparison in comparisons:
            for reason in comparison.reasons:
                console.print(f"{comparison.name}: {reason}", markup=False, soft_wrap=True)


def _table(rows: list[ModuleRow], model: LoadedModel, *, has_device: bool) -> Table:
    columns = ["parameters", "forward", "model FLOPs", f"FLOPs/{model.unit}", "share", "FLOP/B"]
    table = Table("module", *columns, *(["bound"] if has_device else []), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        cells = [
            format_quantity(row.parameters) if row.parameters else "",
            format_quantity(row.forward_flops) if row.forward_flops else "0",
            format_quantity(row.model_flops) if row.model_flops else "0",
            format_quantity(row.flops_per_token) if row.model_flops else "0",
            f"{row.share:.1%}",
            "" if row.arithmetic_intensity is None else f"{row.arithmetic_intensity:,.1f}",
            row.bound or "",
        ]
        label = f"{row.module} x{row.count}" if row.count > 1 else row.module
        table.add_row(label, *cells[: len(table.columns) - 1])
    return table


def _comparison_table(comparisons: list[Comparison]) -> Table:
    table = Table("crosscheck", "FLOPs", "ours", "difference", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in comparisons:
        flops = "none" if row.flops is None else f"{row.flops:,}"
        table.add_row(row.name, flops, f"{row.ours:,}", "" if row.difference is None else f"{row.difference:+.2%}")
    return table


def _inputs_text(model: LoadedModel) -> str:
    named = {**{str(i): x for i, x in enumerate(model.arguments)}, **model.keywords}
    return ", ".join(f"{name} {'x'.join(map(str, x.shape))}" for name, x in named.items() if hasattr(x, "shape"))


def _notes(model: LoadedModel, record: StepRecord) -> list[str]:
    is_text = model.unit == "token"
    lines = ["counted with sequences of full length, without padding, one document each."] if is_text else []
    unknown = sorted({op.op for op in record.unsupported_ops})
    lines += [
        f"{op} has no formula: the count is a lower bound. See mfu_monitor.register_flop_formula." for op in unknown
    ]
    return [*lines, *record.notes]
