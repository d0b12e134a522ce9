"""What a column of a log holds, by its name and values: quantity, unit, scope, convention. One table decides.

Where a name leaves a unit or a scope open, the column says which reading was taken and what the other would give.
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.logs.numerals import has_decimal_comma, read_numeral

__all__ = ["SECONDS", "Cell", "Column", "Overrides", "is_known", "recognise", "words_of"]

Cell = tuple[int, str]
"""Line (or step, where a log has no lines) and text, as it stands in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the user says of a log's columns; it goes before what their names say."""

    ignore: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    """By column: ``"ms"``, ``"percent"``, ``"TFLOP/s"``, ``"ktokens/s"``."""
    quantities: Mapping[str, str] = field(default_factory=dict)
    """By column: ``"tokens_per_s"``, ``"step_s"``, ``"mfu"``."""
    per_gpu: bool | None = None
    """Whether rates are of one GPU (True) or of all (False)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column in SI units (seconds, FLOP/s, tokens/s; fractions), with what was understood of it.

    Example:
        >>> recognise("time_ms", [(2, "250"), (3, "251")]).values
        (0.25, 0.251)
    """

    name: str
    quantity: str
    """``"mfu"``, ``"hfu"``, ``"tokens_per_s"``, ``"step_s"``, ``"flops_per_s"``, ...; see ``KINDS``."""
    unit: str = ""
    scope: str = ""
    """``"device"``, ``"world"``, or empty for what has none."""
    convention: str = ""
    is_unit_stated: bool = True
    is_scope_stated: bool = True
    scope_from: str = ""
    """The tool whose logs have such names, where the scope is taken from its source."""
    values: tuple[float, ...] = ()
    lines: tuple[int, ...] = ()
    sentinels: int = 0
    """Cells that say "no value": empty, nan, -100%."""
    unusable: tuple[Cell, ...] = ()
    """Cells that should be numbers and are none."""
    note: str = ""

    @property
    def median(self) -> float:
        """Of all values."""
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table: names that match ``pattern`` hold ``quantity``."""

    quantity: str
    pattern: str
    family: str = "count"
    scope: str = ""
    """Where the name says none, for what has a scope."""


_PER_S = (
    r" ?(?:/|per|p)? ?(?:gpu|device|chip|core|rank)? ?(?:/|per) ?"
    r"(?:s|sec|secs|second|seconds|min|minute|h|hour|day)\b"
)
_STEP = r"(?:step|it|iter\w*|batch)"
_STEP_TIMES = (
    r"\b(?:step|iter|iteration|batch)(?: ?/ ?| |(?=time))(?:time|duration|seconds?|secs?|ms|s)\b",
    rf"\btimes?(?: ?\(\w+\))? ?(?:/|per) ?{_STEP}",
    rf"(?:s|sec|seconds|ms) ?(?:/|per) ?{_STEP}\b",
    r"^(?:dt|seconds|secs?|ms|us|s/it)\b",
    r"^dt ?\(",
    r"^time ?(?:\(?(?:ms|us|s|sec|seconds)\)?)$",
    r"elapsed time per iteration",
    r"step time",
)
KINDS = (
    Kind("", r"\b(?:eval|val|validation|test) ?(?:/|time|loss|runtime|samples|steps)"),
    Kind("", r"attainable|weighted|goodput|\betas?\b|%? ?of (?:measured )?peak|rank spread"),
    Kind("", r"(?:forward|backward|optimizer|data|wait|load\w*|other|h2d|copy) ?(?:time|s|ms|wait)\b"),
    Kind("", r"^number of (?:skipped|nan) "),
    Kind("gpus", r"# ?gpus|world size|(?:num|n|number of) ?(?:gpus|devices|ranks)\b|^gpus$"),
    Kind("device_name", r"^(?:gpu|gpu ?(?:name|type)|device ?(?:name|type)|accelerator)$", "text"),
    Kind("precision", r"^(?:precision|dtype|compute dtype)$", "text"),
    Kind("parameters", r"num ?params|n ?params|\bparameters\b|^params$"),
    Kind("sequence_length", r"seq ?len|sequence length|block size"),
    Kind("tokens_per_step", r"(?:global ?)?batch ?size ?(?:\(t\)|\(tokens\)|in tokens|tokens)", scope="world"),
    Kind("tokens_per_step", r"tokens ?(?:/|per) ?(?:step|batch|iter\w*)|total batch size", scope="world"),
    Kind("hfu", r"\bhfu\b|hardware flops? util", "ratio"),
    Kind("mfu", r"\bmfu\b|model flops? util", "ratio"),
    Kind("hardware_flops_per_s", r"(?:hardware|hw).*flops?(?:\b|/)", "flops", "device"),
    Kind("total_flops", r"total flo(?:p)?s|total (?:t|p|e)flops", "total_flops", "world"),
    Kind("", r"flops? ?(?:per|/) ?(?:step|batch|token|iter)|^model flops?$"),
    Kind("flops_per_s", r"[kmgtpe]?flops?(?:\b|/|s\b)|[kmgtpe]?flop/s", "flops", "device"),
    Kind("tokens_per_s", r"\b[kmg]? ?(?:tokens?|toks?|tkns?|items?|words?|t)" + _PER_S, "rate", "world"),
    Kind("tokens_per_s", r"\bk?t[pg]s\b|\bwps\b|\btokens? throughput\b", "rate", "world"),
    Kind("tokens_per_s", r"throughput \(?(?:tokens|tps|tok)", "rate", "world"),
    Kind("samples_per_s", r"\b(?:samples?|sequences?|seqs?|examples?|s|imgs?|images?)" + _PER_S, "rate", "world"),
    Kind("steps_per_s", r"\b(?:steps?|it|its|iters?|iterations?|batches)" + _PER_S, "rate"),
    Kind("tokens", r"(?:input |consumed |train\w* |total |num |seen )*tokens(?: seen| consumed| trained| processed)?$",
         scope="world"),
    Kind("elapsed_s", r"^train ?runtime$", "seconds"),
    Kind("samples", r"consumed samples|samples seen"),
    Kind("batch_samples", r"global ?batch ?size$"),
    Kind("step_s", "|".join(_STEP_TIMES), "time"),
    Kind("time", r"timestamp|wall ?time|^ ?runtime$", "clock"),
    Kind("time", r"^(?:time|date|datetime|ts|elapsed|relative time|total time|relative)\b", "clock"),
    Kind("step", r"^(?:.*[/ ])?(?:global ?step|steps?|iterations?|iter|it|s|updates?|num updates|batch ?idx)$"),
)  # fmt: skip
_COMPILED = tuple((kind, re.compile(kind.pattern)) for kind in KINDS)

_DEVICE = re.compile(
    r"(?:/|per|p) ?(?:gpu|device|chip|core|rank)\b|\b(?:gpu|device|local|rank|chip)/|\btgs\b|\bon one gpu\b"
)
_WORLD = re.compile(r"\b(?:global|world|cluster|aggregate|aggregated|all gpus|all devices|all ranks|overall)\b")
SECONDS = {
    **dict.fromkeys(("ns", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "µs", "usec", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "milliseconds", "millisecond"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_NAMES = {"percent": 0.01, "%": 0.01, "pct": 0.01, "fraction": 1.0}
_LEAST_FLOPS_PER_S, _MOST_FLOPS_PER_S = 1e8, 1e23
"""From a phone's core to every accelerator there is."""


def words_of(name: str) -> str:
    """A name as words: lower case, ``_`` and ``-`` as spaces, W&B's run name in front left out."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name.rpartition(" - ")[2])
    return re.sub(r"\s+", " ", re.sub(r"[_\-:]+", " ", name.lower())).strip()


def is_known(name: str) -> bool:
    """Whether a column of this name is of use."""
    return bool(_kind(words_of(name)).quantity)


def _kind(words: str) -> Kind:
    return next((kind for kind, pattern in _COMPILED if pattern.search(words)), KINDS[0])


def recognise(name: str, cells: Sequence[Cell], overrides: Overrides | None = None) -> Column | None:
    """A column with its meaning; None where it is of no use here (a loss, a learning rate) or the user ignores it.

    Args:
        name: as it stands in the file.
        cells: line and text of each value.
        overrides: what the user says.

    Raises:
        ConfigurationError: a unit given for it is not known.
    """
    overrides = overrides or Overrides()
    if name in overrides.ignore or name.endswith(("__MIN", "__MAX")):  # W&B's exports of the chart's band
        return None
    words = words_of(name)
    kind = _kind(words)
    if name in overrides.quantities:
        quantity = overrides.quantities[name]
        kind = next(k for k in KINDS if k.quantity == quantity)
    if not kind.quantity:
        return None
    if kind.family == "text":
        return Column(name=name, quantity=kind.quantity, lines=tuple(line for line, _ in cells))
    column = Column(name=name, quantity=kind.quantity)
    if kind.family == "clock":
        return _clock(column, words, cells)
    given = overrides.units.get(name)
    column = _numbers(column, kind, words, cells, given)
    return _scoped(column, kind, words, overrides.per_gpu)


def _numbers(column: Column, kind: Kind, words: str, cells: Sequence[Cell], given: str | None) -> Column:
    comma = has_decimal_comma(text for _, text in cells)
    read = [(line, text, read_numeral(text, decimal_comma=comma)) for line, text in cells]
    bare = [n[0] for _, _, n in read if n is not None and not n[1] and math.isfinite(n[0]) and n[0] > 0]
    factor, unit, is_stated, note = _unit(kind.family, words, given, bare)
    kept: list[tuple[int, float]] = []
    unusable: list[Cell] = []
    sentinels, units = 0, set()
    for line, text, numeral in read:
        own = _factor_of_cell(kind.family, numeral[1]) if numeral is not None else None
        if numeral is None or (numeral[1] and own is None and kind.family != "count"):
            unusable.append((line, text))
            continue
        value = numeral[0] * (own if own is not None and numeral[1] else factor)
        if not math.isfinite(value) or value < 0 or (value == 0 and column.quantity != "step"):
            sentinels += 1
            continue
        units.add(numeral[1] if own is not None else "")
        kept.append((line, value))
    if units and "" not in units and kind.family != "count":
        unit, is_stated, note = sorted(units)[0], True, ""
    return replace(
        column, values=tuple(v for _, v in kept), lines=tuple(line for line, _ in kept), unit=unit, note=note,
        is_unit_stated=is_stated, sentinels=sentinels, unusable=tuple(unusable),
    )  # fmt: skip


def _factor_of_cell(family: str, unit: str) -> float | None:
    """``250.27ms``, ``46.4%``, ``3k``: the unit that stands in the cell itself."""
    lower = re.sub(r"\s*\(.*$", "", unit).lower().strip()
    if not lower:
        return None
    if family == "time":
        return SECONDS.get(re.split(r"[ /]", lower)[0])
    if family == "ratio":
        return 0.01 if lower.startswith(("%", "percent")) else None
    if family in ("flops", "rate", "total_flops"):
        return _rate_factor(lower, family)
    if unit.startswith("/"):
        return 1.0
    return _PREFIX.get(lower) if len(lower) == 1 else None


def _rate_factor(words: str, family: str) -> float | None:
    """``TFLOP/s``, ``ktok/s``, ``k``, ``tokens/min``: what one of it is."""
    if len(words) == 1 and words in _PREFIX:
        return _PREFIX[words]
    core = r"flo(?:p|ps)?\b|flops" if family != "rate" else r"tok|samples?|seq|steps?|it\b|words?|items?|images?"
    match = re.search(rf"(?<![a-z])([kmgtpe]?) ?-?(?:{core})", words)
    if match is None:
        return None
    factor = _PREFIX[match[1]]
    if family == "rate":
        period = re.search(r"(?:/|per) ?(?:gpu|device)? ?/? ?(min|minute|h|hour|day)\b", words)
        factor /= SECONDS[period[1]] if period else 1.0
    return factor


def _unit(family: str, words: str, given: str | None, values: Sequence[float]) -> tuple[float, str, bool, str]:
    """Factor to SI, the unit's name, whether the name says it, and what the other reading would give."""
    middle = statistics.median(values) if values else 0.0
    if given is not None:
        return _given_unit(family, given), given, True, ""
    if family == "time":
        return _time_unit(words, middle)
    if family == "ratio":
        return _ratio_unit(words, middle)
    if family in ("flops", "total_flops"):
        return _flops_unit(family, words, middle)
    if family == "rate":
        factor = _rate_factor(re.sub(r"\((k|m)\)", r"\1tok", words), family) or 1.0
        return factor, "1/s" if factor == 1 else f"{factor:g}/s", True, ""
    return 1.0, "", True, ""


def _given_unit(family: str, given: str) -> float:
    lower = given.lower()
    factor = _NAMES.get(lower) if family == "ratio" else SECONDS.get(lower) if family == "time" else None
    factor = factor or (_rate_factor(lower, family) if family in ("flops", "rate", "total_flops") else None)
    if factor is None:
        allowed = {"time": "ms, s or min", "ratio": "percent or fraction", "flops": "TFLOP/s or FLOP/s"}
        raise ConfigurationError(f"--unit {given!r} is not known; allowed here are {allowed.get(family, 'ktokens/s')}")
    return factor


def _time_unit(words: str, middle: float) -> tuple[float, str, bool, str]:
    spelled = [w for w in re.findall(r"[a-zµ]+", words) if w in SECONDS and w not in ("m", "d", "h")]
    if spelled:
        return SECONDS[spelled[-1]], spelled[-1], True, ""
    unit, other = ("ms", "s") if middle > 50 else ("s", "ms")
    one, two = _say_s(middle * SECONDS[unit]), _say_s(middle * SECONDS[other])
    note = f"no unit: taken as {unit}, {one}; as {other} it would be {two}"
    return SECONDS[unit], unit, False, note


def _say_s(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 0.01 else f"{1e3 * seconds:.4g} ms"


def _ratio_unit(words: str, middle: float) -> tuple[float, str, bool, str]:
    if re.search(r"%|percent|pct", words):
        return 0.01, "percent", True, ""
    if middle > 3:
        return (
            0.01,
            "percent",
            False,
            f"no unit: taken as percent, {middle:.4g}%; as a fraction it would be {100 * middle:,.4g}%",
        )
    note = f"no unit: taken as a fraction, {100 * middle:.4g}%; as percent it would be {middle:.4g}%" if middle else ""
    return 1.0, "fraction", False, note


def _flops_unit(family: str, words: str, middle: float) -> tuple[float, str, bool, str]:
    factor = _rate_factor(words, family) or 1.0
    name = {1e9: "GFLOP", 1e12: "TFLOP", 1e15: "PFLOP", 1e18: "EFLOP", 1e6: "MFLOP", 1e3: "kFLOP"}.get(factor, "FLOP")
    per_s = "" if family == "total_flops" else "/s"
    if family == "total_flops" or not middle or _LEAST_FLOPS_PER_S <= middle * factor <= _MOST_FLOPS_PER_S:
        return factor, name + per_s, True, ""
    scale, taken = (1.0, "FLOP/s") if middle > 1e8 else (1e12, "TFLOP/s")
    return scale, taken, False, f"taken as {taken}: {middle:.4g} {name}/s is not a rate of a device"


def _scoped(column: Column, kind: Kind, words: str, per_gpu: bool | None) -> Column:
    """Of one device or of the world, by the name; where it says neither, the usual one, and that it is assumed."""
    if not kind.scope:
        return column
    if kind.family in ("rate", "flops") and per_gpu is not None:
        return replace(column, scope="device" if per_gpu else "world")
    is_device, is_world = bool(_DEVICE.search(words)), bool(_WORLD.search(words))
    if is_device or is_world:
        return replace(column, scope="device" if is_device else "world")
    return replace(column, scope=kind.scope, is_scope_stated=kind.family not in ("rate", "flops"))


def _clock(column: Column, words: str, cells: Sequence[Cell]) -> Column:
    """Times of day, seconds since an epoch or since the start; ``time`` that does not grow is per step's time."""
    values = [(line, value) for line, text in cells if (value := _seconds_of(text)) is not None]
    numbers = [value for _, value in values]
    falls = sum(b < a for a, b in itertools.pairwise(numbers))
    grows = sum(b > a for a, b in itertools.pairwise(numbers))
    if re.match(r"time\b", words) and numbers and max(numbers) < 1e8 and (falls > 0 and falls * 5 > grows):
        return _numbers(replace(column, quantity="step_s"), Kind("step_s", "", "time"), words, cells, None)
    if numbers and max(numbers) > 1e11:  # milliseconds since 1970
        values = [(line, value / 1e3) for line, value in values]
    unit = "s" if any(read_numeral(text) and ":" not in text for _, text in cells) else "date"
    return replace(column, unit=unit, values=tuple(v for _, v in values), lines=tuple(line for line, _ in values))


def _seconds_of(text: str) -> float | None:
    numeral = read_numeral(text)
    if numeral is not None and math.isfinite(numeral[0]) and re.fullmatch(r"[a-zµ]*", numeral[1].lower()):
        return numeral[0] * SECONDS.get(numeral[1].lower(), 1.0)
    try:
        moment = datetime.datetime.fromisoformat(
            text.strip().replace(",", ".").replace("/", "-").replace("Z", "+00:00")
        )
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()
