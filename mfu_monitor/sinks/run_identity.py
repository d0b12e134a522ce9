"""Which run speaks: its name, host, job and rank, on every alert; and the few lines of an alert for a chat."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mfu_monitor.counting.plain_types import PlainTypes

__all__ = ["RUN_NAME_VARIABLE", "RunIdentity", "identity_of_this_process", "short_alert"]

RUN_NAME_VARIABLE = "MFU_MONITOR_RUN_NAME"
"""Environment variable with the run's name, where none is given as an option."""
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID", "TORCHELASTIC_RUN_ID")
_LONGEST_NAME = 48
_LONGEST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity(PlainTypes):
    """Where an alert comes from; ``str()`` of it is ``"gpt-7b on node17, job 4711, rank 0"``."""

    name: str
    host: str
    job_id: str | None = None
    """The cluster's; None outside a job."""
    rank: int = 0

    def __str__(self) -> str:
        job = f", job {self.job_id}" if self.job_id else ""
        return f"{self.name} on {self.host}{job}, rank {self.rank}"


def identity_of_this_process(run_name: str | None = None) -> RunIdentity:
    """The identity of this process.

    Args:
        run_name: None takes the environment variable MFU_MONITOR_RUN_NAME, else the script's name.

    Example:
        >>> identity_of_this_process("gpt-7b").name
        'gpt-7b'
    """
    distributed = torch.distributed
    is_world = distributed.is_available() and distributed.is_initialized()
    script = Path(sys.argv[0] if sys.argv else "")
    return RunIdentity(
        name=run_name
        or os.environ.get(RUN_NAME_VARIABLE)
        or (script.parent.name if script.stem == "__main__" else script.stem)
        or "python",
        host=socket.gethostname(),
        job_id=next((value for name in _JOB_VARIABLES if (value := os.environ.get(name))), None),
        rank=distributed.get_rank() if is_world else 0,
    )


def short_alert(alert: Mapping[str, Any]) -> str:
    """An alert in at most 400 characters and four lines: who, what, why, what to do.

    Args:
        alert: the payload of an alert's event.
    """
    run = alert.get("run") or {}
    where = [_cut(str(run.get("host") or "unknown host"), _LONGEST_NAME)]
    where += [f"job {_cut(str(run['job_id']), _LONGEST_NAME)}"] if run.get("job_id") else []
    where += [f"rank {run.get('rank', 0)}"]
    lines = [
        f"*{_cut(str(run.get('name') or 'run'), _LONGEST_NAME)}: {alert.get('kind')}* ({', '.join(where)})",
        _what(alert),
    ]
    lines += [f"Cause: {_because(alert)}"] if alert.get("causes") else []
    lines += [f"Next: {alert['next_action']}"] if alert.get("next_action") else []
    return _cut("\n".join(lines), _LONGEST)


def _what(alert: Mapping[str, Any]) -> str:
    seen = _cut(str(alert.get("message") or "").split(" Cause: ")[0].split(" Next: ")[0], 160)
    lost_s = alert.get("lost_s")
    return f"{seen} {lost_s:,.3g} s lost." if lost_s else seen


def _because(alert: Mapping[str, Any]) -> str:
    named = [
        str(cause["description"]).split(" (")[0]
        + (f" {cause['share_of_loss']:.0%}" if cause.get("share_of_loss") is not None else "")
        for cause in alert["causes"][:2]
    ]
    return _cut(", ".join(named), 100)


def _cut(text: str, longest: int) -> str:
    """At most so many characters, cut between words."""
    if len(text) <= longest:
        return text
    return text[: longest - 1].rsplit(" ", 1)[0] + "…"
