"""What a window of steps took and held: a frozen record between timing and utilization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mfu_monitor.counting.plain_types import PlainTypes
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.hardware.precision import active_precision

__all__ = ["ClosedWindow", "StepWindow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindow(PlainTypes):
    """A whole number of training batches of this rank, with time, tokens and FLOPs of the same steps.

    Seconds are of the device's clock where it has one, of the host otherwise. Sums over the window's steps; steps that
    were left out (counted, compiling) contribute to nothing here but ``wall_s`` and ``excluded_steps``.
    """

    first_step: int
    last_step: int
    steps: int
    """Training batches in the window, those left out not counted."""
    elapsed_s: float
    """Time of the steps with the wait for data, without validation, checkpoint saving and steps left out."""
    wall_s: float
    """All time since the previous window ended (for goodput)."""
    host_elapsed_s: float | None = None
    """The same as ``elapsed_s`` by the host's clock; differs where work is queued on a device."""
    data_wait_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    other_s: float | None = None
    """The rest of ``elapsed_s``: callbacks, logging, zeroing gradients."""
    excluded_steps: int = 0
    excluded_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds left out by reason: ``"validation"``, ``"checkpoint"``, ``"counted"``, ``"compile"``."""
    tokens: int | None = None
    """Tokens computed, padding included."""
    tokens_not_padding: int | None = None
    tokens_in_loss: int | None = None
    samples: int | None = None
    optimizer_steps: int | None = None
    model_flops: int | None = None
    """Sum over the window's steps on this rank; None while no step was counted."""
    hardware_flops: int | None = None
    recompute_flops: int | None = None
    kernel_recompute_flops: int | None = None
    optimizer_flops: int | None = None
    other_flops: int | None = None
    palm_model_flops: int | None = None
    repeated_flops: int | None = None
    """The part of ``other_flops`` that is model work which other ranks did as well, and report."""
    repeats_known: bool = True
    """False where nobody has compared this rank's work with that of other ranks."""
    unique_tokens: int | None = None
    """This rank's part of ``tokens`` where several ranks read the same batch: sums over ranks are the world's."""
    unique_samples: int | None = None
    duplicate_ranks: tuple[int, ...] = ()
    """Other ranks that did all the work that this one did, on the same batch."""
    batches_known: bool = True
    """False where it is not known which ranks read the same batch; the two fields above hold all then."""
    model_flops_by_precision: Mapping[str, int] = field(default_factory=dict)
    hardware_flops_by_precision: Mapping[str, int] = field(default_factory=dict)
    counts_label: str | None = None
    """What is known of the counts: ``"exact"``, ``"presumed"``, ``"sampled"``, ``"lower_bound"``, ``"upper_bound"`` or
    ``"unknown"``; None in files written before labels: the two flags below say it then."""
    is_lower_bound: bool = False
    is_sampled: bool = False
    """True when counts of one signature differed, or a signature was not counted itself."""
    flops_spread: float | None = None
    """Relative spread (max - min) / mean of the counts of one signature; None or 0 where they agree."""
    recompiles: int = 0
    world_size: int = 1
    ranks_present: int | None = None
    """Ranks that the world's sums are of, where some of them took no part; None where all did."""
    world_model_flops: int | None = None
    """Sum over ranks of ``world_steps`` steps each; None where the ranks were not gathered. Equals ``model_flops`` in a
    world of one."""
    world_hardware_flops: int | None = None
    world_palm_model_flops: int | None = None
    world_repeated_flops: int | None = None
    """Model work that was done more than once; part of the ranks' ``other_flops`` and of no sum of model FLOPs."""
    world_repeats_known: bool | None = None
    """True where the ranks' work and batches were compared, so that the sums hold shared work and tokens once."""
    world_tokens: int | None = None
    world_samples: int | None = None
    world_peak_flops_per_s: float | None = None
    """Sum of the ranks' own peaks at their active precision; None where unknown or not gathered."""
    world_steps: int | None = None
    """Steps of the rank that took longest a step. Ranks leave out steps of their own, so they are brought to these."""
    world_elapsed_s: float | None = None
    """Seconds of these steps on that rank: the same on all ranks."""
    slowest_rank: int | None = None
    rank_spread: float | None = None
    """(slowest - fastest) / mean of the ranks' busy seconds."""
    user_phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of phases under the user's own names; they are part of ``other_s``."""
    clock_name: str = "host"
    invalid_reason: str | None = None
    """Why the seconds cannot be used (the clock went backwards); they are 0 then and mean nothing."""
    gc_pause_s: float | None = None
    """Seconds that Python's garbage collector held the training process; part of the other times."""
    h2d_copy_s: float | None = None
    """Seconds of moving batches to the device; part of ``data_wait_s`` or ``other_s``, by where the loop does it."""
    between_s: float | None = None
    """Seconds of callbacks and logging between steps; part of ``other_s``."""
    cpu_wait_s: float | None = None
    """Seconds that the busiest waiting thread of this process was ready to run and had no CPU; part of the others."""
    allocation_retries: int | None = None
    """Times that the CUDA allocator freed its cache and tried again; each waits for the device."""
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """What the driver says holds the clock down, ``()`` if nothing, None if nobody was asked."""
    padding_share: float | None = None
    """Share of ``tokens`` that are padding: the window's with ``count_padding``, else that of the last counted step."""
    world_counts_label: str | None = None
    """The weakest ``counts_label`` of a rank; None where the ranks were not gathered."""

    @property
    def active_precision(self) -> str | None:
        """The precision that carries the most model FLOPs; None where nothing was counted."""
        return active_precision(self.model_flops_by_precision)

    @property
    def rate_s(self) -> float:
        """The seconds that the world's sums are divided by; this rank's own where no other rank is known."""
        return self.elapsed_s if self.world_elapsed_s is None else self.world_elapsed_s


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """A window, the count that explains it, and where the run stood when it closed."""

    window: StepWindow
    record: StepRecord | None = None
    """Of the signature that most of the window's model FLOPs belong to."""
    run_model_flops: int | None = None
    """Of all steps of the run so far, those left out of windows too."""
    run_wall_s: float = 0.0
    """All time of the run so far."""
