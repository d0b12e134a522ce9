"""Write the goldens again: `python tests/goldens/write.py [NAME...]`, then read the diff before you commit it.

`commands.txt` and the other `.txt` hold wording alone; `python tests/goldens/write.py txt` writes only those.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

if __name__ == "__main__":  # as a script: the folders above are a package of their own
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.goldens.golden import GOLDENS, rounded
    from tests.goldens.record import record_run
else:
    from .golden import GOLDENS, rounded

__all__ = ["as_text"]


def as_text(name: str, value: Any) -> str:
    """One golden as it stands in its file."""
    if name.endswith(".json"):
        return json.dumps(rounded(value), indent=1, ensure_ascii=False) + "\n"
    return str(value).rstrip() + "\n"


def main(wanted: list[str]) -> None:
    """Write the goldens whose names contain one of ``wanted``; all of them where nothing is given."""
    if not (HERE / "run.jsonl").exists():
        record_run(HERE / "run.jsonl")
    for name, make in GOLDENS.items():
        if not wanted or any(part in name for part in wanted):
            (HERE / name).write_text(as_text(name, make()), encoding="utf-8")
            print(f"wrote {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
