"""What Lightning keeps private: where its loop stands, and when it fetches. Since Lightning 2.5."""

from __future__ import annotations

from typing import Any

from mfu_monitor.internals.facts import fact

__all__ = ["has_fetch_hooks", "logging_step", "steps_optimizer"]


@fact(
    "lightning: epoch_loop._batches_that_stepped",
    lost="readings stand at the optimizer's step",
    since="2.5",
    decides=False,
)
def _read_logging_step(trainer: Any) -> int | None:
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logging_step(trainer: Any) -> int:
    """Where ``trainer.log`` would draw a value of this batch; the same for each batch of an accumulation.

    Without it the optimizer's step, which differs where a run has several optimizers.
    """
    step = _read_logging_step(trainer)
    return int(trainer.global_step) if step is None else step


@fact(
    "lightning: fit_loop._should_accumulate",
    lost="accumulating steps are not told from others, so that counts read as sampled",
    otherwise=True,
    since="2.5",
    decides=False,
)
def steps_optimizer(trainer: Any) -> bool:
    """False while gradients are only accumulated: such a step runs less than one that steps the optimizer.

    Without it every step is taken to step the optimizer, so that counts of one kind differ and are called sampled.
    """
    return not trainer.fit_loop._should_accumulate()


@fact(
    "lightning: epoch_loop._on_before_fetch",
    lost="the wait for data has no time of its own",
    otherwise=False,
    since="2.5",
    decides=False,
)
def has_fetch_hooks(loop: Any) -> bool:
    """True where the loop announces each fetch of a batch; without it the wait for data has no time of its own."""
    return callable(loop._on_before_fetch) and callable(loop._on_after_fetch)
