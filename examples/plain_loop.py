"""MFU in a training loop without any framework: wrap each step, read ``monitor.reading``.

python examples/plain_loop.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import mfu_monitor as mm
from mfu_monitor.sinks import ConsoleSink


def main(steps: int = 40) -> None:
    """Train a perceptron on random numbers; one line is printed for each window of ten steps."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = mm.Monitor(model, log_every_n_steps=10, peak="measure", sinks=[ConsoleSink()])
    for _ in range(steps):
        batch = torch.randn(256, 512, device=device)
        with monitor.step(batch):
            loss = F.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()


if __name__ == "__main__":
    main()
