"""What the README shows, works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NEEDS_MORE = ("count", "bench", "report")
"""Commands whose line names a file of the reader's, or measures for a minute."""
COMMANDS = re.findall(r"^mfu-monitor (.+)$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.split()[0] not in NEEDS_MORE])
def test_the_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    assert ended.value.code == (1 if line.startswith("audit") else 0)  # that reading is impossible
    assert capsys.readouterr().out


def test_every_command_is_shown() -> None:
    assert {line.split()[0] for line in COMMANDS} == {
        "peaks", "audit", "estimate", "roofline", "count", "bench", "report",
    }  # fmt: skip


def test_the_counter_is_used_as_shown() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    with mm.FlopCounter(model) as counter:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    assert counter.record.model_flops == 2 * (2 * 3 * 4 * 8) + 3 * (2 * 3 * 8 * 2)
    assert counter.record.hardware_flops == counter.record.model_flops
    assert set(counter.record.by_phase()) >= {"forward", "backward"}
    assert counter.record.unsupported_ops == ()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    path, _, heading = target.partition("#")
    assert (Path(__file__).parents[1] / path).exists()
    slugs = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)}
    assert not heading or heading in slugs
