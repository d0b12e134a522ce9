"""Train a byte-level GPT on the Python standard library's own source, with live MFU and HFU in TensorBoard.

Runs unchanged on a laptop's CPU and on a GPU, and needs no download:

    python examples/lightning_gpt.py
    python examples/lightning_gpt.py --checkpointing full      # HFU rises above MFU
    python examples/lightning_gpt.py --precision bf16-mixed --compile
    python examples/lightning_gpt.py --compile --memory-budget 0.2    # the compiler's own recomputation is in HFU

Everything that concerns the measurement is in one line, the ``MFUMonitor(...)`` of :func:`main`.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset

from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.sinks import JsonlRun, read_jsonl

BYTES = 256
"""A byte-level model: the vocabulary is the values of a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of the model; the defaults make 3.3 million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    sequence_length: int = 128
    checkpointing: str = "none"
    """``"none"``, ``"full"`` (each block is run again in backward) or ``"selective"`` (its products are kept)."""


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, C) to (B, S, C)."""
        B, S, C = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(B, S, C))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, C) to (B, S, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A small GPT; every product is an ``nn.Linear`` or one attention call, so its FLOPs have a short closed form."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(BYTES, config.width)
        self.position_embedding = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Bytes (B, S) to logits (B, S, 256)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = self._run_block(block, x)
        return self.head(self.norm(x))

    def _run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.config.checkpointing == "none":
            return block(x)
        if self.config.checkpointing == "full":
            return checkpoint(block, x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=False, context_fn=_keep_products)


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_products() -> Any:
    """Selective checkpointing: what is costly to compute is kept, what is cheap is computed again."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def build_model(config: GPTConfig | None = None) -> GPT:
    """The model alone, as the tests use it."""
    return GPT(config or GPTConfig())


class ByteGPT(L.LightningModule):
    """The training recipe: cross-entropy of the next byte, AdamW."""

    def __init__(self, model: GPT, *, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch of ``input_ids`` and ``labels``, each (B, S)."""
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with one learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class SourceCode(Dataset[dict[str, Tensor]]):
    """The standard library's own modules as one string of bytes, cut into sequences; the same on every start."""

    def __init__(self, sequence_length: int, *, max_bytes: int = 4_000_000) -> None:
        self.sequence_length = sequence_length
        self.text = torch.frombuffer(bytearray(_read_sources(max_bytes)), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.sequence_length
        piece = self.text[start : start + self.sequence_length + 1].long()
        return {"input_ids": piece[:-1], "labels": piece[1:]}


def _read_sources(max_bytes: int) -> bytes:
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return text[:max_bytes]


def build_loader(config: GPTConfig, *, batch_size: int, seed: int = 0) -> DataLoader[dict[str, Tensor]]:
    """Shuffled by a generator of its own, so that the order depends on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    data = SourceCode(config.sequence_length)
    return DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True, generator=generator)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then print what was measured and where to look at it."""
    args = _parse(arguments)
    L.seed_everything(args.seed, verbose=False)
    torch.set_float32_matmul_precision("high")  # tf32 where the device has it; no effect on a CPU
    config = GPTConfig(
        layers=args.layers,
        heads=args.heads,
        width=args.width,
        sequence_length=args.sequence_length,
        checkpointing=args.checkpointing,
    )
    module = ByteGPT(build_model(config))
    if args.compile:
        functorch_config.activation_memory_budget = args.memory_budget
        module.model.compile()
    logger = TensorBoardLogger(args.log_dir, name=None)
    jsonl = Path(logger.log_dir) / "mfu.jsonl"
    trainer = L.Trainer(
        max_steps=args.max_steps,
        precision=args.precision or _default_precision(),
        logger=logger,
        log_every_n_steps=args.log_every_n_steps,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[MFUMonitor(peak=args.peak, jsonl=str(jsonl)), TQDMProgressBar(refresh_rate=5)],
    )
    trainer.fit(module, build_loader(config, batch_size=args.batch_size, seed=args.seed))
    _summarise(read_jsonl(jsonl), module)
    print(f"Records: {jsonl}\nLook at it:\n\n    tensorboard --logdir {args.log_dir}\n")


def _default_precision() -> Any:
    return "bf16-mixed" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "32-true"


def _summarise(run: JsonlRun, module: L.LightningModule) -> None:
    table = Table(title="What the hardware did", show_header=False)
    for name, value in _summary_rows(run, module):
        table.add_row(name, value)
    Console().print(table)


def _summary_rows(run: JsonlRun, module: L.LightningModule) -> list[tuple[str, str]]:
    rows = [("parameters", f"{sum(p.numel() for p in module.parameters()):,}")]
    if run.records:
        record = run.records[0]
        rows.append(("model FLOPs per step", f"{record.model_flops:,}"))
        rows.append(("hardware FLOPs per step", f"{record.hardware_flops:,}"))
    if not run.readings:
        return [*rows, ("readings", "none: the run was shorter than one window")]
    last = run.readings[-1]
    peak = "unknown" if last.peak_flops_per_s is None else f"{last.peak_flops_per_s / 1e9:,.1f} GFLOP/s"
    return [
        *rows,
        ("device", last.device_name or "unknown"),
        (f"dense peak at {last.precision}", f"{peak} ({last.peak_source})"),
        ("MFU, median of the windows", _percent([r.mfu for r in run.readings])),
        ("HFU, median of the windows", _percent([r.hfu for r in run.readings])),
        ("tokens/s, last window", "unknown" if last.tokens_per_s is None else f"{last.tokens_per_s:,.0f}"),
        ("the figures are", last.exactness.replace("_", " ")),
    ]


def _percent(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1%}" if known else "unknown"


def _peak(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpointing", choices=("none", "full", "selective"), default="none", help="activation checkpointing")
    add("--precision", default=None, help="as Lightning takes it: 32-true, bf16-mixed, bf16-true, 16-mixed")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--memory-budget", type=float, default=1.0, help="with --compile: below 1 the compiler recomputes; HFU > MFU")
    add("--peak", type=_peak, default="measure", help='"measure", "auto", or dense FLOP/s such as 989.4e12')
    add("--max-steps", type=int, default=100, help="training steps")
    add("--batch-size", type=int, default=8, help="sequences per step")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=256)
    add("--sequence-length", type=int, default=128, help="bytes per sequence")
    add("--log-every-n-steps", type=int, default=10, help="length of a window")
    add("--log-dir", default="runs/lightning_gpt", help="where TensorBoard files and mfu.jsonl go")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
