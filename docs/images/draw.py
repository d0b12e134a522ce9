"""Draw the pictures of docs/roofline.md: a Llama-like model of 1.2 B parameters, counted on the meta device.

The FLOPs, bytes and modelled times are real counts against the H100 SXM's datasheet; no GPU ran, so the times of
the waterfall (the step half longer than ideal, with its waits) are made up for the illustration.

    python docs/images/draw.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.insights.advice import advise
from mfu_monitor.insights.plots import save_figure, step_figures
from mfu_monitor.insights.roofline import step_roofline
from mfu_monitor.insights.waterfall import waterfall
from mfu_monitor.timing.step_window import StepWindow

LAYERS, WIDTH, HEADS, MLP_WIDTH, VOCABULARY, BATCH, LENGTH = 16, 2048, 16, 8192, 32768, 4, 4096


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # The kernel that a GPU would run; on meta scaled_dot_product_attention takes the math path.
        attended = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, MLP_WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def count() -> StepRecord:
    """One training step with activation checkpointing and an unfused optimizer."""
    with torch.device("meta"):
        model = LanguageModel().to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        with FlopCounter(model) as counter:
            logits = model(tokens).float().view(-1, VOCABULARY)
            F.cross_entropy(logits, tokens.view(-1)).backward()
            optimizer.step()
    return counter.record


def main() -> None:
    """Write the three pictures beside this file and print the advice."""
    record, peak = count(), device_peak("NVIDIA H100 80GB HBM3")
    ideal_s = step_roofline(record, peak).ideal_time_s
    if peak is None or ideal_s is None:
        raise SystemExit("the H100 SXM is missing in the table of peaks")
    step_s = 1.5 * ideal_s
    window = StepWindow(
        first_step=1, last_step=1, steps=1, elapsed_s=step_s, wall_s=step_s,
        data_wait_s=0.05 * step_s, h2d_copy_s=0.01 * step_s, between_s=0.02 * step_s,
    )  # fmt: skip
    steps = waterfall(record, peak, window)
    for tag, figure in step_figures(record, peak, steps).items():
        print(save_figure(figure, Path(__file__).parent / f"{tag.removeprefix('plots/')}.png"))
    for line in advise(record, peak, steps):
        print(f"- {line.text}")


if __name__ == "__main__":
    main()
