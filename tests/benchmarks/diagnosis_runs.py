"""Synthetic runs for the diagnosis: a model of true FLOPs, clock and peak, and every fault of the list put into it.

A `Truth` is a decoder-only transformer on a device, with what its steps really cost. `healthy` turns it into the
records that a faultless monitor would hand to `check`; each function of `FAULTS` does the same with one fault in it, in
the ways in which people really make it. Random numbers come from a generator of the caller's: runs are the same each
time.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mfu_monitor.checks import Evidence
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.table import neighbours
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

DEVICES = (
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 PCIe",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA L40S",
    "NVIDIA RTX A6000",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA B200",
)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What really ran. FLOPs are of one batch (micro-batch) on one rank."""

    device: DevicePeak
    precision: str
    layers: int
    width: int
    vocabulary: int
    experts: int
    """Feed-forward blocks a layer; one token passes through one of them."""
    sequence_length: int
    sequences: int
    accumulate: int
    ranks: int
    steps: int
    first_step: int
    recomputes: bool
    mfu: float
    padding: float

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def expert(self) -> int:
        return 8 * self.width**2  # two products of width by four times the width

    @property
    def product_parameters(self) -> int:
        """Attention projections, one expert a layer, and the output head (untied)."""
        return self.layers * (4 * self.width**2 + self.expert) + self.embedding

    @property
    def inactive(self) -> int:
        return self.layers * (self.experts - 1) * self.expert

    @property
    def parameters(self) -> int:
        return self.product_parameters + self.embedding + self.inactive

    @property
    def linear_flops(self) -> int:
        return 6 * self.product_parameters * self.tokens

    @property
    def palm_attention_flops(self) -> int:
        return 12 * self.layers * self.width * self.sequence_length * self.tokens

    @property
    def attention_flops(self) -> int:
        """Causal: S (S + 1) / 2 of S^2 pairs."""
        return self.palm_attention_flops * (self.sequence_length + 1) // (2 * self.sequence_length)

    @property
    def model_flops(self) -> int:
        return self.linear_flops + self.attention_flops

    @property
    def palm_flops(self) -> int:
        return self.linear_flops + self.palm_attention_flops

    @property
    def recompute_flops(self) -> int:
        return self.model_flops // 3 if self.recomputes else 0

    @property
    def hardware_flops(self) -> int:
        return self.model_flops + self.recompute_flops

    @property
    def peak_flops_per_s(self) -> float:
        return self.device.flops_per_s_by_precision[self.precision]

    @property
    def step_s(self) -> float:
        return self.model_flops / (self.mfu * self.peak_flops_per_s)


def random_truth(rng: random.Random, *, lowest_mfu: float = 0.05, highest_mfu: float = 0.75, **fixed: object) -> Truth:
    """A run as they come: 50 M to 100 B parameters, any device, one to 64 ranks."""
    device = device_peak(rng.choice(DEVICES))
    assert device is not None
    layers, width = rng.choice([(12, 768), (24, 2048), (32, 4096), (80, 8192)])
    accumulate = rng.choice([1, 2, 4, 8])
    values: dict[str, object] = {
        "device": device,
        "precision": rng.choice(["bf16", "bf16", "bf16", "fp16", "tf32", "fp32"]),
        "layers": layers,
        "width": width,
        "vocabulary": rng.choice([32_000, 50_257, 128_256]),
        "experts": rng.choice([1, 1, 1, 8]),
        "sequence_length": rng.choice([512, 2048, 8192]),
        "sequences": rng.choice([1, 4, 16]),
        "accumulate": accumulate,
        "ranks": rng.choice([1, 1, 2, 8, 64]),
        "steps": accumulate * rng.choice([4, 10, 25]),
        "first_step": accumulate * rng.randrange(1, 5000),
        "recomputes": rng.random() < 0.4,
        "mfu": rng.uniform(lowest_mfu, highest_mfu),
        "padding": rng.choice([0.0, 0.0, rng.uniform(0.05, 0.6)]),
    }
    return Truth(**{**values, **fixed})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What `check` is given."""

    reading: UtilizationReading
    record: StepRecord | None
    peak: DevicePeak | None
    evidence: Evidence = field(default_factory=Evidence)


def record_of(truth: Truth, precision: str | None = None) -> StepRecord:
    """One batch: products and attention, forward, backward and recomputation."""
    name = precision or truth.precision
    linear, causal, dense = truth.linear_flops, truth.attention_flops, truth.palm_attention_flops
    ops = [
        _op("aten::mm", Phase.FORWARD, name, linear // 3, linear // 3),
        _op("aten::mm", Phase.BACKWARD, name, linear - linear // 3, linear - linear // 3),
        _op("aten::sdpa", Phase.FORWARD, name, causal // 3, dense // 3),
        _op("aten::sdpa_backward", Phase.BACKWARD, name, causal - causal // 3, dense - dense // 3),
    ]
    if truth.recomputes:
        totals = FlopTotals(recompute_flops=truth.recompute_flops)
        ops.append(OpRecord(op="aten::mm", phase=Phase.RECOMPUTE, precision=name, totals=totals))
    return StepRecord(ops=tuple(ops), is_training=True)


def _op(op: str, phase: Phase, precision: str, model: int, palm: int) -> OpRecord:
    totals = FlopTotals(model_flops=model, palm_model_flops=palm)
    return OpRecord(op=op, phase=phase, precision=precision, totals=totals)


def window_of(truth: Truth, rng: random.Random, **changes: object) -> StepWindow:
    """The window of a faultless monitor."""
    steps, elapsed_s = truth.steps, truth.step_s * truth.steps
    values: dict[str, object] = {
        "first_step": truth.first_step,
        "last_step": truth.first_step + steps - 1,
        "steps": steps,
        "elapsed_s": elapsed_s,
        "wall_s": elapsed_s * rng.uniform(1.0, 1.2),
        "host_elapsed_s": elapsed_s * rng.uniform(0.85, 1.02),
        "tokens": truth.tokens * steps,
        "tokens_not_padding": round(truth.tokens * (1 - truth.padding)) * steps,
        "optimizer_steps": steps // truth.accumulate,
        "model_flops": truth.model_flops * steps,
        "palm_model_flops": truth.palm_flops * steps,
        "hardware_flops": truth.hardware_flops * steps,
        "recompute_flops": truth.recompute_flops * steps,
        "model_flops_by_precision": {truth.precision: truth.model_flops * steps},
        "world_size": truth.ranks,
        "world_model_flops": truth.model_flops * steps * truth.ranks,
        "world_tokens": truth.tokens * steps * truth.ranks,
        "world_peak_flops_per_s": truth.peak_flops_per_s * truth.ranks,
    }
    return StepWindow(**{**values, **changes})  # type: ignore[arg-type]


def reading_of(truth: Truth, window: StepWindow, *, factor: float = 1.0, **changes: object) -> UtilizationReading:
    """The reading of a faultless monitor, or one that is ``factor`` times the truth."""
    mfu = truth.mfu * factor
    values: dict[str, object] = {
        "window": window,
        "mfu": mfu,
        "hfu": mfu * truth.hardware_flops / truth.model_flops,
        "device_name": truth.device.device_name,
        "precision": truth.precision,
        "peak_flops_per_s": truth.peak_flops_per_s,
        "peak_source": truth.device.source,
        "peak_is_dense": True,
        "peak_bytes_per_s": truth.device.bytes_per_s,
        "world_peak_flops_per_s": truth.peak_flops_per_s * truth.ranks,
    }
    return UtilizationReading(**{**values, **changes})  # type: ignore[arg-type]


def evidence_of(truth: Truth, rng: random.Random, **changes: object) -> Evidence:
    """All that a careful user can know, and claims that are right to a hundredth."""
    noisy = rng.uniform(0.99, 1.01)
    promises = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
    values: dict[str, object] = {
        "flops_per_batch": truth.model_flops * noisy if rng.random() < 0.5 else None,
        "claimed_parameters": float(truth.product_parameters) if rng.random() < 0.5 else None,
        "claimed_tokens": float(truth.tokens * truth.steps) if rng.random() < 0.5 else None,
        "reported_mfu": truth.mfu * rng.uniform(0.98, 1.02) if rng.random() < 0.3 else None,
        "promised_precision": promises.get(truth.precision, "32-true"),
        "parameters": float(truth.parameters),
        "embedding_parameters": float(truth.embedding),
        "inactive_expert_parameters": float(truth.inactive),
        "stored_parameters": float(truth.parameters // truth.ranks),
        "accumulate_grad_batches": truth.accumulate,
        "step_times_s": tuple(truth.step_s * rng.uniform(0.95, 1.1) for _ in range(truth.steps)),
        "timestamps_s": tuple(truth.step_s * i for i in range(truth.steps)),
        "mfu_history": tuple(
            (truth.first_step - k * truth.steps, truth.mfu * rng.uniform(0.95, 1.05)) for k in (3, 2, 1)
        ),
        "achievable_flops_per_s": 0.8 * truth.peak_flops_per_s if truth.mfu < 0.75 else None,
    }
    return Evidence(**{**values, **changes})  # type: ignore[arg-type]


def healthy(truth: Truth, rng: random.Random) -> Run:
    """A run without a fault."""
    reading = reading_of(truth, window_of(truth, rng))
    # The counted step had other shapes than this window's in a third of the runs: that is no fault.
    counted = (
        dataclasses.replace(truth, sequence_length=rng.choice([256, 1024, 4096])) if rng.random() < 1 / 3 else truth
    )
    return Run(reading=reading, record=record_of(counted), peak=truth.device, evidence=evidence_of(truth, rng))


NO_CLAIMS = {"flops_per_batch": None, "claimed_parameters": None, "claimed_tokens": None, "reported_mfu": None}


def _with_peak(truth: Truth, rng: random.Random, used: float, **evidence: object) -> Run:
    """A peak of the user's; the reading is wrong by the ratio of the peaks."""
    window = window_of(truth, rng, world_peak_flops_per_s=used * truth.ranks)
    reading = reading_of(
        truth,
        window,
        factor=truth.peak_flops_per_s / used,
        peak_flops_per_s=used,
        peak_source="user",
        world_peak_flops_per_s=used * truth.ranks,
    )
    evidence = {**NO_CLAIMS, "achievable_flops_per_s": None, **evidence}
    return Run(reading=reading, record=record_of(truth), peak=None, evidence=evidence_of(truth, rng, **evidence))


def sparse_peak(rng: random.Random) -> Run:
    truth = random_truth(rng, highest_mfu=0.6, precision="bf16")
    return _with_peak(truth, rng, truth.device.sparse_flops_per_s_by_precision["bf16"])


def wrong_precision_peak(rng: random.Random) -> Run:
    truth = random_truth(rng, highest_mfu=0.6, precision="bf16")
    return _with_peak(truth, rng, truth.device.flops_per_s_by_precision[rng.choice(["fp32", "tf32"])])


def wrong_device_peak(rng: random.Random) -> Run:
    """A look-alike's figure, an A100's for everything, a whole GPU's for a slice, or one below the measured."""
    truth = random_truth(rng, highest_mfu=0.6, precision="bf16")
    right = truth.peak_flops_per_s
    kind = rng.choice(["neighbour", "a100", "slice", "measured"])
    if kind == "slice":
        parent = device_peak("NVIDIA A100-SXM4-80GB")
        assert parent is not None
        slice_peak = dataclasses.replace(
            parent,
            device_name="NVIDIA A100-SXM4-80GB MIG 3g.40gb",
            flops_per_s_by_precision={"bf16": 312e12 * 42 / 108},
        )
        return _with_peak(dataclasses.replace(truth, device=slice_peak), rng, 312e12, sm_count=42)
    if kind == "measured":
        return _with_peak(truth, rng, right * rng.uniform(0.04, 0.3), achievable_flops_per_s=0.8 * right)
    rows = neighbours(truth.device.key) if kind == "neighbour" else ()
    rates = [row.flops_per_s_by_precision().get("bf16", right) for row in rows]
    # A rate is of use here if it is another one, and not what another fault would give as well.
    others = {*truth.device.flops_per_s_by_precision.values(), *truth.device.sparse_flops_per_s_by_precision.values()}
    rates = [rate for rate in [*rates, 312e12] if all(abs(rate / other - 1) > 0.03 for other in others)]
    return _with_peak(truth, rng, rng.choice(rates)) if rates else wrong_device_peak(rng)


def nominal_clock_exceeded(rng: random.Random) -> Run:
    truth = random_truth(rng, lowest_mfu=1.002, highest_mfu=1.045, precision="bf16", recomputes=False)
    peak = dataclasses.replace(truth.device, max_clock_ratio=1.08)
    run = healthy(truth, rng)
    return dataclasses.replace(run, peak=peak, evidence=evidence_of(truth, rng, achievable_flops_per_s=None))


def autocast_not_active(rng: random.Random) -> Run:
    truth = random_truth(rng, highest_mfu=0.6, precision=rng.choice(["fp32", "tf32"]))
    promise = rng.choice(["bf16-mixed", "16-mixed", "bf16-true"])
    run = healthy(truth, rng)
    return dataclasses.replace(run, evidence=dataclasses.replace(run.evidence, promised_precision=promise))


def _with_flops(truth: Truth, rng: random.Random, flops: float, **evidence: object) -> Run:
    """The user's FLOPs of a batch: honoured in window and reading, in the reading alone, or held against ours."""
    flops *= rng.uniform(0.992, 1.008)
    factor = flops / truth.model_flops
    kind = rng.choice(["honoured", "reading", "compared"])
    world = {"model_flops": round(flops * truth.steps), "world_model_flops": round(flops * truth.steps * truth.ranks)}
    window = window_of(truth, rng, **(world if kind == "honoured" else {}))
    reading = reading_of(truth, window, factor=1.0 if kind == "compared" else factor)
    evidence = {**NO_CLAIMS, "flops_per_batch": flops, "flops_per_batch_is_used": kind == "honoured", **evidence}
    return Run(
        reading=reading, record=record_of(truth), peak=truth.device, evidence=evidence_of(truth, rng, **evidence)
    )


def macs_as_flops(rng: random.Random) -> Run:
    truth = random_truth(rng, highest_mfu=0.6)
    return _with_flops(truth, rng, truth.model_flops / 2)


def forward_only(rng: random.Random) -> Run:
    truth = random_truth(rng, highest_mfu=0.6)
    return _with_flops(truth, rng, truth.model_flops / 3)


def double_counted(rng: random.Random) -> Run:
    truth = random_truth(rng, highest_mfu=0.6)
    return _with_flops(truth, rng, truth.model_flops * 2)


def recompute_in_mfu(rng: random.Random) -> Run:
    truth = random_truth(rng, highest_mfu=0.6, recomputes=True)
    return _with_flops(truth, rng, truth.hardware_flops)


def causal_counted_dense(rng: random.Random) -> Run:
    """Attention that is a good part of the step: small models, long sequences."""
    truth = random_truth(rng, highest_mfu=0.6, layers=24, width=2048, sequence_length=rng.choice([4096, 8192, 16384]))
    if rng.random() < 0.5:
        return _with_flops(truth, rng, truth.palm_flops)
    truth = dataclasses.replace(truth, mfu=0.78, sequence_length=16384, vocabulary=32_000, recomputes=False)
    factor = truth.palm_flops / truth.model_flops
    reading = reading_of(truth, window_of(truth, rng), factor=factor, convention="palm", mfu_palm=truth.mfu * factor)
    return Run(reading=reading, record=record_of(truth), peak=truth.device)


def wrong_n(rng: random.Random) -> Run:
    """Embedding counted, experts counted whole, a shard's numel, packed 4-bit weights as bytes."""
    kind = rng.choice(["embedding", "experts", "shard", "packed"])
    fixed = {"layers": 12, "width": 768, "experts": 1} if kind == "embedding" else {"experts": 1}
    fixed = {**fixed, "experts": 8} if kind == "experts" else fixed
    fixed = {**fixed, "ranks": 8} if kind == "shard" else fixed
    truth = random_truth(rng, highest_mfu=0.6, **fixed)
    right = truth.product_parameters
    wrong = {
        "embedding": right + truth.embedding,
        "experts": right + truth.inactive,
        "shard": truth.parameters / truth.ranks,
        "packed": truth.parameters / 2,
    }[kind]
    stored = {"stored_parameters": float(wrong)} if kind in ("shard", "packed") else {}
    if rng.random() < 0.5:
        return _with_flops(truth, rng, 6 * wrong * truth.tokens + truth.attention_flops, **stored)
    reading = reading_of(truth, window_of(truth, rng), factor=wrong / right)
    evidence = evidence_of(truth, rng, **{**NO_CLAIMS, "claimed_parameters": float(wrong), **stored})
    return Run(reading=reading, record=None, peak=truth.device, evidence=evidence)


def wrong_token_count(rng: random.Random) -> Run:
    """One micro-batch for a step, all ranks' tokens for one device's, padding left out, pixels as tokens."""
    kind = rng.choice(["micro", "world", "padding", "pixels"])
    by_kind: dict[str, dict[str, float]] = {
        "micro": {"accumulate": 4},
        "world": {"ranks": 8},
        "padding": {"padding": 0.3},
    }
    fixed = by_kind.get(kind, {})
    truth = random_truth(rng, highest_mfu=0.6, **fixed)
    tokens = truth.tokens * truth.steps
    wrong = {"micro": tokens / 4, "world": tokens * 8, "padding": tokens * 0.7, "pixels": tokens * 768}[kind]
    reading = reading_of(truth, window_of(truth, rng), factor=1.0 if kind == "pixels" else wrong / tokens)
    claims = {**NO_CLAIMS, "claimed_tokens": float(wrong), "input_elements": float(tokens * 768)}
    evidence = evidence_of(truth, rng, **claims)
    return Run(reading=reading, record=record_of(truth), peak=truth.device, evidence=evidence)


def accumulation(rng: random.Random) -> Run:
    """A whole step's FLOPs for each of its batches, with or without the tokens off alike."""
    factor = rng.choice([4, 8])
    truth = random_truth(rng, highest_mfu=0.6, accumulate=factor, steps=factor * 5, first_step=factor * 101, experts=1)
    tokens = {"claimed_tokens": float(factor * truth.tokens * truth.steps)} if rng.random() < 0.5 else {}
    return _with_flops(truth, rng, truth.model_flops * factor, **tokens)


def world_size(rng: random.Random) -> Run:
    """All ranks' FLOPs over one device's peak, one rank's over all peaks, or the global batch's FLOPs for a rank's."""
    truth = random_truth(rng, highest_mfu=0.6, ranks=rng.choice([2, 4, 8, 64]), accumulate=1, experts=1)
    kind = rng.choice(["over", "under", "flops"])
    if kind == "flops":
        truth = dataclasses.replace(truth, ranks=rng.choice([4, 16, 64]))
        return _with_flops(truth, rng, truth.model_flops * truth.ranks)
    factor = float(truth.ranks) if kind == "over" else 1 / truth.ranks
    used = truth.peak_flops_per_s * (1 if kind == "over" else truth.ranks)
    reading = reading_of(truth, window_of(truth, rng), factor=factor, world_peak_flops_per_s=used)
    evidence = evidence_of(truth, rng, **NO_CLAIMS)
    return Run(reading=reading, record=record_of(truth), peak=truth.device, evidence=evidence)


def cumulative_numerator(rng: random.Random) -> Run:
    """FLOPs since the start over one window's time: seen in the window's own FLOPs, or in how MFU grows."""
    steps = 10
    truth = random_truth(rng, highest_mfu=0.6, accumulate=1, experts=1, steps=steps, first_step=rng.randrange(50, 3000))
    batches = truth.first_step + steps
    factor = batches / steps
    if rng.random() < 0.5:
        total = truth.model_flops * batches
        window = window_of(truth, rng, model_flops=total, world_model_flops=total * truth.ranks)
        reading = reading_of(truth, window, factor=factor)
        evidence = evidence_of(truth, rng, **NO_CLAIMS, mfu_history=())
        return Run(reading=reading, record=record_of(truth), peak=truth.device, evidence=evidence)
    earlier = [round(batches * share) for share in (0.2, 0.4, 0.6, 0.8)]
    history = tuple((step - 1, truth.mfu * step / steps * rng.uniform(0.99, 1.01)) for step in earlier)
    reading = dataclasses.replace(reading_of(truth, window_of(truth, rng), factor=factor))
    evidence = evidence_of(truth, rng, **NO_CLAIMS, mfu_history=history)
    return Run(reading=reading, record=None, peak=truth.device, evidence=evidence)


def unsynced_timer(rng: random.Random) -> Run:
    """The host's clock around queued work: the window's seconds are its own, the device's are known beside them."""
    truth = random_truth(rng, highest_mfu=0.6)
    device_s = truth.step_s * truth.steps
    host_s = device_s * rng.uniform(0.01, 0.4)
    window = window_of(truth, rng, elapsed_s=host_s, host_elapsed_s=host_s, wall_s=host_s)
    reading = reading_of(truth, window, factor=device_s / host_s)
    evidence = evidence_of(truth, rng, **NO_CLAIMS, device_elapsed_s=device_s, step_times_s=())
    return Run(reading=reading, record=record_of(truth), peak=truth.device, evidence=evidence)


def warmup_in_window(rng: random.Random) -> Run:
    """The first steps compile: the window's average is lower than any usual step's."""
    truth = random_truth(rng, lowest_mfu=0.1, highest_mfu=0.6, accumulate=1, steps=20, first_step=0)
    slow = [truth.step_s * rng.uniform(8, 60) for _ in range(rng.choice([1, 1, 2]))]
    usual = [truth.step_s * rng.uniform(0.97, 1.05) for _ in range(truth.steps - len(slow))]
    elapsed_s = sum(slow) + sum(usual)
    window = window_of(truth, rng, elapsed_s=elapsed_s, host_elapsed_s=elapsed_s, wall_s=elapsed_s, recompiles=1)
    reading = reading_of(truth, window, factor=truth.step_s * truth.steps / elapsed_s)
    evidence = evidence_of(truth, rng, **NO_CLAIMS, step_times_s=(*slow, *usual), mfu_history=())
    return Run(reading=reading, record=record_of(truth), peak=truth.device, evidence=evidence)


def clock_went_backwards(rng: random.Random) -> Run:
    """The wall clock was set back: within the window, or between two entries of a log."""
    truth = random_truth(rng, highest_mfu=0.6)
    run = healthy(truth, rng)
    if rng.random() < 0.5:
        times = [float(i) for i in range(10)]
        times[rng.randrange(1, 9)] -= 3600.0
        evidence = evidence_of(truth, rng, timestamps_s=tuple(times))
        return dataclasses.replace(run, evidence=evidence)
    window = dataclasses.replace(run.reading.window, elapsed_s=-rng.uniform(0.1, 10), host_elapsed_s=None)
    return dataclasses.replace(
        run, reading=reading_of(truth, window, mfu=None, hfu=None, reason="the clock ran backwards")
    )


FAULTS: dict[str, Callable[[random.Random], Run]] = {
    "sparse_peak": sparse_peak,
    "wrong_precision_peak": wrong_precision_peak,
    "wrong_device_peak": wrong_device_peak,
    "macs_as_flops": macs_as_flops,
    "forward_only": forward_only,
    "double_counted": double_counted,
    "recompute_in_mfu": recompute_in_mfu,
    "causal_counted_dense": causal_counted_dense,
    "wrong_N": wrong_n,
    "wrong_token_count": wrong_token_count,
    "world_size": world_size,
    "accumulation": accumulation,
    "cumulative_numerator": cumulative_numerator,
    "unsynced_timer": unsynced_timer,
    "warmup_in_window": warmup_in_window,
    "clock_went_backwards": clock_went_backwards,
    "autocast_not_active": autocast_not_active,
    "nominal_clock_exceeded": nominal_clock_exceeded,
}
