"""What a wrong peak looks like: the byte-level GPT with a peak 20 times too low.

    python examples/wrong_peak.py

A reading above 100% of the peak cannot be. It is withheld: no MFU is logged, training goes on to its end, and a
warning, TensorBoard's TEXT tab and the JSONL file say what was seen, what fits the evidence and what to do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_gpt import ByteGPT, GPTConfig, build_loader, build_model  # type: ignore[import-not-found]  # beside it
from rich.console import Console

from mfu_monitor.callbacks import MFUMonitor
from mfu_monitor.hardware.measure import measure_peak
from mfu_monitor.sinks import read_jsonl

TOO_LOW = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the peak, give a twentieth of it to the callback, train, and show what came out."""
    args = _parse(arguments)
    L.seed_everything(0, verbose=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = measure_peak(device, torch.float32)
    rate = None if measured is None else measured.flops_per_s(torch.float32)
    if rate is None:
        raise SystemExit(f"no peak can be measured on {device}; this example needs one to get wrong")
    config = GPTConfig(layers=2, width=128, sequence_length=64)
    logger = TensorBoardLogger(args.log_dir, name=None)
    watch = MFUMonitor(peak=rate / TOO_LOW, log_every_n_steps=5, jsonl=f"{logger.log_dir}/mfu.jsonl")
    trainer = L.Trainer(
        max_steps=args.max_steps, max_epochs=-1, logger=logger, callbacks=[watch], log_every_n_steps=5,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(ByteGPT(build_model(config)), build_loader(config, batch_size=4))
    _show(f"{logger.log_dir}/mfu.jsonl", args.log_dir, trainer.global_step)


def _show(jsonl: str, log_dir: str, steps: int) -> None:
    console = Console()
    run = read_jsonl(jsonl)
    shown = [reading for reading in run.readings if reading.mfu is not None]
    console.print(f"\nTrained {steps} steps; {len(run.readings)} windows, {len(shown)} of them with an MFU.")
    for event in run.events:
        if event.kind == "diagnosis":
            console.print(f"At step {event.step}:")
            for diagnosis in event.payload["diagnoses"]:
                console.print(f"  {diagnosis['severity']}: {diagnosis['code']}", style="bold", highlight=False)
                for part in ("message", "likely_cause", "fix"):
                    console.print(f"    {diagnosis[part]}", highlight=False)
    console.print(f"\nThe same in TensorBoard, TEXT tab:\n\n    tensorboard --logdir {log_dir}\n", highlight=False)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with a peak that is 20 times too low.")
    parser.add_argument("--max-steps", type=int, default=30, help="training steps")
    parser.add_argument("--log-dir", default="runs/wrong_peak", help="where TensorBoard files and mfu.jsonl go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
