"""Somebody's ordinary Lightning script, and the two lines that a measurement of MFU needs: find "NEW" below.

No formula, no shapes, no number of parameters is given. On a GPU that the table knows, ``MFUMonitor()`` is enough; for
a CPU vendors give no peak, so this script, which should run anywhere, asks for a short measurement instead.

    python examples/add_to_existing.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mfu_monitor.callbacks import MFUMonitor  # NEW (1 of 2)


class Classifier(L.LightningModule):
    """A small convolutional classifier of 32x32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of one batch of images and labels."""
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    """Train on random images for forty steps."""
    L.seed_everything(0, verbose=False)
    images, labels = torch.randn(1280, 3, 32, 32), torch.randint(0, 10, (1280,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=32)
    trainer = L.Trainer(
        max_epochs=1,
        log_every_n_steps=10,
        enable_checkpointing=False,
        callbacks=[
            MFUMonitor(peak="measure"),  # NEW (2 of 2)
        ],
    )
    trainer.fit(Classifier(), loader)


if __name__ == "__main__":
    main()
