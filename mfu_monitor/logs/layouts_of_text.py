"""From text to named columns of cells: JSON, JSON lines, Markdown, CSV and its kin, or a console's lines."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.logs.columns import Cell, is_known

__all__ = ["Table", "read_layout"]

_MOST_DEPTH = 20
_MOST_COLUMNS = 5000


@dataclass(slots=True, kw_only=True)
class Table:
    """Cells by column, in the order written."""

    layout: str
    columns: dict[str, list[Cell]] = field(default_factory=dict)
    rows: int = 0
    unusable: list[Cell] = field(default_factory=list)
    """Lines that could not be read, with what is wrong."""
    notes: list[str] = field(default_factory=list)

    def add(self, line: int, name: str, text: str) -> None:
        """One cell; beyond the most columns that a log can have, nothing."""
        if name in self.columns or len(self.columns) < _MOST_COLUMNS:
            self.columns.setdefault(name, []).append((line, text))


def read_layout(text: str) -> Table:
    """Columns of a text, by what it looks like.

    Example:
        >>> read_layout("step,mfu\\n1,0.41\\n").columns
        {'step': [(2, '1')], 'mfu': [(2, '0.41')]}
    """
    lines = text.split("\n")
    stripped = text.lstrip()
    table = None
    if stripped[:1] in "{[":
        table = _json_lines(lines) or _json(text)
    return table or _markdown(lines) or _delimited(lines) or _console(lines)


# JSON.


def _json(text: str) -> Table | None:
    value = _loads(text)
    if isinstance(value, Mapping):
        return _json_object(value)
    if isinstance(value, list) and any(isinstance(row, Mapping) for row in value):
        return _json_rows(value, "JSON array")
    return None


def _json_object(value: Mapping[str, Any]) -> Table:
    """A trainer's state, an object of columns, or one row."""
    history = next(
        (value[k] for k in ("log_history", "history", "metrics", "data", "rows") if isinstance(value.get(k), list)),
        None,
    )
    if history is not None:
        table = _json_rows(history, "trainer_state.json" if "log_history" in value else "JSON")
        for name, text in _flat(value):
            if name not in table.columns:
                table.add(0, name, text)
        return table
    table = Table(layout="JSON")
    for name, column in value.items():
        cells = column.values() if isinstance(column, Mapping) else column if isinstance(column, list) else ()
        if cells and all(not isinstance(cell, Mapping | list) for cell in cells):
            for i, cell in enumerate(cells, start=1):
                table.add(i, name, _text(cell))
                table.rows = max(table.rows, i)
    return table if table.columns else _json_rows([value], "JSON")


def _json_rows(rows: Iterable[Any], layout: str) -> Table:
    table = Table(layout=layout)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            table.unusable.append((number, "not an object"))
            continue
        table.rows += 1
        for name, text in _flat(row):
            table.add(number, name, text)
    return table


def _json_lines(lines: list[str]) -> Table | None:
    """One object a line; lines between that are none are counted, and a console's text is not taken for JSON."""
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    found = [(number, line, _loads(line)) for number, line in filled]
    objects = [(number, value) for number, _, value in found if isinstance(value, Mapping)]
    if not objects or 2 * len(objects) < len(filled) or len(filled) < 1:
        return None
    if len(objects) == 1 and len(filled) == 1:
        return _json_object(objects[0][1])
    table = Table(layout="JSON lines", rows=len(objects))
    for number, value in objects:
        for name, text in _flat(value):
            table.add(number, name, text)
    table.unusable = [(n, "not a JSON object") for n, _, value in found if not isinstance(value, Mapping)]
    return table


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: nested deeper than any log is
        return None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested objects as ``a/b``; nulls and lists are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            if depth < _MOST_DEPTH:
                yield from _flat(value, f"{prefix}{name}/", depth + 1)
        elif value is not None and not isinstance(value, list):
            yield f"{prefix}{name}", str(value)


# Tables.


def _markdown(lines: list[str]) -> Table | None:
    """A header and a row of dashes, between pipes."""
    for at, line in enumerate(lines[1:], start=1):
        if re.fullmatch(r"\s*\|?(\s*:?-{2,}:?\s*\|)+\s*:?-*:?\s*", line) and "|" in lines[at - 1]:
            rows = [(n, _cells(text)) for n, text in enumerate(lines[at + 1 :], start=at + 2) if text.count("|") > 1]
            return _of_rows("Markdown table", _cells(lines[at - 1]), rows)
    return None


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*`") for cell in line.strip().strip("|").split("|")]


def _delimited(lines: list[str]) -> Table | None:
    """CSV, TSV or another separator: a header of names above rows of as many cells."""
    filled = [i for i, line in enumerate(lines) if line.strip()][:400]
    for skipped, first in enumerate(filled[:40]):  # a console's words may stand above the table
        body = [lines[i] for i in filled[skipped + 1 :]]
        for delimiter in (",", "\t", ";", "|", ""):  # none: a single column
            header = _csv_cells(lines[first], delimiter or ",")
            is_wide = len(header) > 1 if delimiter else len(lines[first].split()) == 1
            if is_wide and _is_table(header, body, delimiter or ","):
                layout = {",": "CSV", "\t": "TSV", "": "CSV"}.get(delimiter, f"table by {delimiter!r}")
                rows = _csv_rows(lines, first + 1, delimiter or ",")
                return _of_rows(layout, [name.strip() for name in header], rows)
    return None


def _csv_cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # a cell of more than 128 KiB
        return []


def _csv_rows(lines: list[str], start: int, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    try:
        reader = csv.reader(lines[start:], delimiter=delimiter)
        for row in reader:
            if any(cell.strip() for cell in row):
                yield start + reader.line_num, [cell.strip() for cell in row]
    except csv.Error:
        return


def _is_table(header: list[str], body: list[str], delimiter: str) -> bool:
    names = [name.strip() for name in header]
    if any(re.search(r"^[-+]?[\d.]|[:=\s]\s*[-+]?\d[\d.,]*\s?\w?\w?%?$", name) for name in names) or not any(
        map(is_known, names)
    ):
        return False
    fit = [line for line in body[:200] if len(_csv_cells(line, delimiter)) == len(names)]
    return not body or 2 * len(fit) >= len(body[:200])


def _of_rows(layout: str, header: list[str], rows: Iterable[tuple[int, list[str]]]) -> Table:
    names = [n if header.count(n) == 1 else f"{n} (column {i})" for i, n in enumerate(header, start=1)]
    table = Table(layout=layout)
    for number, row in rows:
        if row == header:
            table.notes.append(f"line {number} repeats the header: a restart")
        elif len(row) == len(names):
            table.rows += 1
            for name, cell in zip(names, row, strict=True):
                table.add(number, name, cell)
        elif not set("".join(row)) <= set("-: |"):
            table.unusable.append((number, f"{len(row)} cells under {len(names)} names"))
    for name in names:
        table.columns.setdefault(name, [])
    return table


# Consoles.

_MOMENT = re.compile(r"\[?(\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)(?:Z|[+-]\d\d:?\d\d)?\]?")
_RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(\d+)\]:?|(\d+):|\(.*rank=(\d+).*?\))\s")
_SPLIT = re.compile(
    r"\s*\|\s*|\t+|,\s*(?=[A-Za-z\[#])|\s{2,}(?=[A-Za-z#])|(?<=\d):\s+(?=[A-Za-z])|;\s*(?=[A-Za-z])"
    r"|(?<=[\d%)])\s+(?=[A-Za-z_][\w/.]*[:=]\s*[-+.\d])"
)
_INNER_JSON = re.compile(r"""\{\s*["'].*:.*\}""")
_VALUE = r"[-+\u2212]?(?:\d[\d.,'_\u00a0\u202f]*(?:[eE][-+]?\d+)?|nan\b|inf\b)"
_UNIT = r"(?:%|[A-Za-zµ][\w./%]*|/\s*\d+)?"
_KEYED = re.compile(rf"^(?P<name>[A-Za-z#_][^:=]*?)\s*[:=]\s*(?P<value>{_VALUE}\s?{_UNIT})")
_SPACED = re.compile(rf"^(?P<name>[A-Za-z#_][A-Za-z_/ .()%#-]*?)\s+(?P<value>{_VALUE}\s?{_UNIT})(?:\s*\(.*)?\s*$")
_TRAILING = re.compile(rf"^(?P<value>{_VALUE})\s?(?P<name>[%A-Za-zµ][\w./% ]*)$")


def _console(lines: list[str]) -> Table:
    """Lines of ``name: number``, ``name=number``, ``name number`` and ``number unit``; of ranks, the first's."""
    table, chosen, others = Table(layout="console text"), None, 0
    open_row: int | None = None
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        rank, rest = _without_rank(line)
        if rank is not None:
            chosen = rank if chosen is None else chosen
            if rank != chosen:
                others += 1
                continue
        pairs = list(_pairs(rest))
        is_continued = open_row is not None and line[:1] in " \t" and pairs and not seen & {name for name, _ in pairs}
        if not is_continued:
            open_row, seen = (number if pairs else open_row), set()
            table.rows += bool(pairs)
        for name, text in pairs:
            seen.add(name)
            table.add(open_row or number, name, text)
    if others:
        table.notes.append(f"lines of several ranks: those of rank {chosen} are used, {others} of others are not")
    return table


def _without_rank(line: str) -> tuple[int | None, str]:
    match = _RANK.match(line)
    if match is None:
        return None, line
    return int(next(group for group in match.groups() if group)), line[match.end() :]


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    moment = _MOMENT.search(line[:120])
    if moment:
        yield "timestamp", moment[1]
        line = f"{line[: moment.start()]}  {line[moment.end() :]}"
    if objects := _INNER_JSON.search(line):  # fairseq, and the dictionaries that transformers prints
        yield from _flat(_loads(objects[0].replace("'", '"')) or {})
        return
    for part in _SPLIT.split(re.sub(r"(?<=[\d%a-z])\)?\s+\((?=\d)", " (", line)):
        segment = part.strip().strip("[]").rpartition(" - ")[2].strip()
        match = _KEYED.match(segment) or _TRAILING.match(segment) or _SPACED.match(segment)
        if match is not None and len(match["name"]) < 80:
            name, value = match["name"].strip(), match["value"].strip().rstrip(",.")
            if name.startswith("%"):
                name, value = name[1:].strip() or "%", value + "%"
            yield name, value
