"""What the tests say with each version of torch, the trainers and Python: docs/versions.md, made from runs.

    python tests/benchmarks/versions.py list                  # the rows, and when each was run last
    python tests/benchmarks/versions.py run torch-2.14.1      # make its environment, run the suite, keep the result
    python tests/benchmarks/versions.py run torch-2.14.1 --python .venv-x/bin/python     # in an environment that exists
    python tests/benchmarks/versions.py probe torch-2.14.1    # renew how what runs is labelled, without the tests
    python tests/benchmarks/versions.py table                 # write docs/versions.md from the results that are kept

Each result is kept in docs/versions.json, with its date; a row without one says that it was not run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
PROBE = Path(__file__).with_name("versions_probe.py")
INSTALLED = (
    "import json, platform, importlib.metadata as m; "
    "print(json.dumps({'python': platform.python_version(), **{n: m.version(n) for n in "
    "('torch', 'lightning', 'transformers')}}))"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One environment: what differs from `constraints.txt`, and the tests that say something about it."""

    torch: str = "2.13.0"
    python: str = ""
    lightning: str = ""
    transformers: str = ""
    tests: tuple[str, ...] = ("tests",)
    note: str = ""


TRAINERS = ("tests/callbacks", "tests/examples")
MOVES_WITH_TORCH = ("tests/internals", "tests/counting", "tests/bit_equality", "tests/conformance", "tests/callbacks")
ROWS: dict[str, Row] = {
    "torch-2.9.1": Row(torch="2.9.1", note="the oldest that is supported"),
    "torch-2.10.0": Row(torch="2.10.0", tests=MOVES_WITH_TORCH),
    "torch-2.11.0": Row(torch="2.11.0", tests=MOVES_WITH_TORCH),
    "torch-2.12.1": Row(torch="2.12.1", tests=MOVES_WITH_TORCH),
    "torch-2.13.0": Row(note="what `constraints.txt` pins"),
    "torch-2.14.1": Row(torch="2.14.1", note="CI runs counting, conformance, callbacks and examples on it"),
    "torch-2.15.0": Row(torch="2.15.0", note="the newest there is"),
    "lightning-oldest": Row(lightning="2.5.0", tests=TRAINERS),
    "lightning-newest": Row(lightning="2.6.6", tests=TRAINERS),
    "transformers-oldest": Row(transformers="4.49.0", tests=TRAINERS),
    "transformers-newest": Row(transformers="5.24.0", tests=(*TRAINERS, "tests/conformance/test_models.py")),
    "python-3.11": Row(python="3.11"),
    "python-3.12": Row(python="3.12"),
    "python-3.13": Row(python="3.13"),
}


def environment(row: Row) -> Path:
    """The interpreter of the row's own environment, which the Makefile makes."""
    words = {"TORCH": row.torch, "LIGHTNING": row.lightning, "TRANSFORMERS": row.transformers}
    if row.python:
        words["PYTHON"] = f"python{row.python}"
    arguments = ["make", "--no-print-directory", *(f"{name}={value}" for name, value in words.items() if value)]
    subprocess.run([*arguments, "env-torch"], cwd=ROOT, check=True)
    shown = subprocess.run([*arguments, "show-env"], cwd=ROOT, check=True, capture_output=True, text=True)
    return ROOT / shown.stdout.strip() / "bin" / "python"


def run(row: Row, python: Path, *, workers: int, tests: tuple[str, ...]) -> dict[str, Any]:
    """Run the row's tests and the probe; what came of them, as plain data."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        parallel = ["-n", str(workers)] if workers > 1 else []
        command = [str(python), "-m", "pytest", "-q", "-m", "not gpu", *parallel, f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, env=env, check=False)
        outcome = counts(report)
    installed = subprocess.run([str(python), "-c", INSTALLED], check=True, capture_output=True, text=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "tests": list(tests),
        **json.loads(installed.stdout),
        **outcome,
        "labels": labels(python),
    }


def labels(python: Path) -> dict[str, str]:
    """How each probe's count is labelled."""
    probed = subprocess.run([str(python), str(PROBE)], cwd=ROOT, check=False, capture_output=True, text=True)
    if probed.returncode:
        return {"counting": f"failed: {probed.stderr.strip().splitlines()[-1]}"}
    found: dict[str, str] = json.loads(probed.stdout.strip().splitlines()[-1])
    return found


def counts(report: Path) -> dict[str, Any]:
    """Tests passed, failed and skipped, the names of what failed and the reasons of what was skipped."""
    passed, failed, reasons = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            reasons[skip.get("message", "no reason")] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(sorted(reasons.items()))}


def load() -> dict[str, Any]:
    """The results that are kept, by row."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def page(results: dict[str, Any]) -> str:
    """The text of docs/versions.md."""
    lines = [
        "# Versions",
        "",
        "Made by `make versions` from the runs that `docs/versions.json` keeps, not edited by hand. A row is run by",
        "`python tests/benchmarks/versions.py run ROW`. Tests marked `gpu` are in none of these rows.",
        "",
        "| row | torch | Lightning | transformers | Python | tests | passed | failed | skipped | run on |",
        "|---|---|---|---|---|---|--:|--:|--:|---|",
        *(_line(name, row, results.get(name)) for name, row in ROWS.items()),
        "",
        "## How what runs is labelled",
        "",
        "Each probe trains a tiny model whose FLOPs are known by hand: `exact` where the count is right to the FLOP",
        "and says so, `lower bound` where it says that something is missing or not sure. `WRONG` would be a false",
        "figure called exact.",
        "",
    ]
    probes = list(dict.fromkeys(probe for result in results.values() for probe in result["labels"]))
    lines += [f"| row | {' | '.join(probes)} |", f"|---|{'---|' * len(probes)}"] if probes else ["Not run yet."]
    for name in (name for name in ROWS if name in results):
        lines.append(f"| {name} | {' | '.join(results[name]['labels'].get(probe, '') for probe in probes)} |")
    return "\n".join([*lines, "", *_details(results)]).rstrip() + "\n"


def _line(name: str, row: Row, result: dict[str, Any] | None) -> str:
    note = f"{name}: {row.note}" if row.note else name
    if result is None:
        wanted = (row.torch, row.lightning, row.transformers, row.python)
        return f"| {note} | {' | '.join(wanted)} | | | | | not run |"
    names = " ".join(f"`{test}`" for test in result["tests"])
    versions = (result[key] for key in ("torch", "lightning", "transformers", "python"))
    figures = (str(result["passed"]), str(len(result["failed"])), str(sum(result["skipped"].values())), result["date"])
    return f"| {note} | {' | '.join((*versions, names, *figures))} |"


def _details(results: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for name in (name for name in ROWS if name in results):
        result = results[name]
        if result["failed"] or result["skipped"]:
            lines += [f"## {name}", ""]
            lines += [f"- failed: `{test}`" for test in result["failed"]]
            lines += [f"- {number} skipped: {reason}" for reason, number in result["skipped"].items()]
            lines.append("")
    return lines


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "run", "probe", "table"])
    parser.add_argument("row", nargs="?", choices=list(ROWS))
    parser.add_argument("--python", type=Path, help="an interpreter whose environment is made already")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", nargs="*", help="other tests than the row's own")
    given = parser.parse_args()
    results = load()
    if given.action == "list":
        for name in ROWS:
            print(f"{name:22}", f"run on {results[name]['date']}" if name in results else "not run")
        return
    if given.action == "probe":
        results[given.row]["labels"] = labels((given.python or environment(ROWS[given.row])).absolute())
    if given.action == "run":
        if given.row is None:
            parser.error("run needs a row: " + ", ".join(ROWS))
        row = ROWS[given.row]
        python = given.python or environment(row)
        tests = tuple(given.tests or row.tests)
        results[given.row] = run(row, python.absolute(), workers=given.workers, tests=tests)
        _check(given.row, row, results[given.row])
    if given.action != "table":
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def _check(name: str, row: Row, result: dict[str, Any]) -> None:
    """An environment of other versions than the row's must not be kept under its name."""
    for key in ("torch", "python", "lightning", "transformers"):
        if not result[key].startswith(getattr(row, key)):
            sys.exit(
                f"{name} needs {key} {getattr(row, key)}, and the environment has {result[key]}; nothing was kept."
            )


if __name__ == "__main__":
    main()
