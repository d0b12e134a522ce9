"""Eight kinds of public training scripts, written small: bits equal, FLOPs by hand, tokens right, a console to read.

Each script takes the monitor's ``step`` as the one thing that is added to it; without a monitor it is the bare script.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mfu_monitor as mm
from mfu_monitor.sinks import read_jsonl

STEPS = 6


class Bare:
    """No monitor: the script as it was."""

    @contextlib.contextmanager
    def step(self, *args: Any) -> Iterator[None]:
        yield

    micro_batch = step


Watch = Callable[[nn.Module], Any]


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


# nanoGPT: accumulation of four micro-batches.

B, T, C, V, HEADS = 2, 8, 16, 32, 2


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down, self.head = nn.Linear(C, 4 * C), nn.Linear(4 * C, C), nn.Linear(C, V)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(T))
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(x).split(C, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def nanogpt(watch: Watch) -> nn.Module:
    model = Gpt()
    optimizer, monitor = torch.optim.AdamW(model.parameters(), lr=1e-2), watch(model)
    for _ in range(STEPS):
        with monitor.step():
            for _ in range(4):
                ids = torch.randint(0, V, (B, T + 1))
                x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
                with monitor.micro_batch((x, y)):
                    (model(x, y) / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update(optimizer)
    return model


# All products three times (the embeddings are trained); T(T+1)/2 pairs of attention, two products of them.
NANOGPT = 3 * (2 * B * T * (C * 3 * C + C * C + 2 * 4 * C * C + C * V) + 2 * 2 * B * C * T * (T + 1) // 2)


# Supervised fine-tuning: batches padded to their longest row, prompts left out of the loss.


def sft(watch: Watch) -> nn.Module:
    model = nn.ModuleDict({"wte": nn.Embedding(V, C), "head": nn.Linear(C, V)})
    optimizer, monitor = torch.optim.AdamW(model.parameters(), lr=1e-2), watch(model)
    for lengths in SFT_LENGTHS:
        longest = max(lengths)
        ids = torch.randint(1, V, (len(lengths), longest))
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
        with monitor.step(batch):
            logits = model["head"](model["wte"](batch["input_ids"]))
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100).backward()
            update(optimizer)
    return model


SFT_LENGTHS = [(3, 5), (8, 2), (4, 4), (3, 5), (7, 7), (8, 1)] * 6
SFT = {longest: 3 * (2 * 2 * longest * C * V) for longest in (5, 8, 4, 7)}


# GAN: two optimizers in one step, the generator's output used twice.


def gan(watch: Watch) -> nn.Module:
    nets = nn.ModuleDict({"g": nn.Linear(4, 8), "d": nn.Linear(8, 1)})
    g, d = nets["g"], nets["d"]
    of_d, of_g = torch.optim.Adam(d.parameters()), torch.optim.Adam(g.parameters())
    monitor = watch(nets)
    for _ in range(STEPS):
        real = torch.randn(6, 8)
        with monitor.step(real):
            fake = g(torch.randn(6, 4))
            d.zero_grad()
            (F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()).backward()
            of_d.step()
            g.zero_grad()
            F.softplus(-d(fake)).mean().backward()
            of_g.step()
    return nets


# g: forward, weight gradient. d: (forward, weight gradient) on real and on fake; forward, both gradients for g.
GAN = 2 * (2 * 6 * 4 * 8) + 7 * (2 * 6 * 8 * 1)


# Fine-tuning: the backbone is frozen for the first half.


def unfreezing(watch: Watch) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    optimizer, monitor = torch.optim.SGD(model.parameters(), lr=0.1), watch(model)
    for step in range(2 * STEPS):
        if step == STEPS:
            model[0].requires_grad_(True)
        x, y = torch.randn(4, 8), torch.randint(0, 2, (4,))
        with monitor.step((x, y)):
            F.cross_entropy(model(x), y).backward()
            update(optimizer)
    return model


# Frozen: two forwards and the head's weight gradient; then the backbone's weight gradient and the way to it.
FROZEN = 2 * 4 * 8 * 8 + 2 * (2 * 4 * 8 * 2)
THAWED = 2 * (2 * 4 * 8 * 8) + 3 * (2 * 4 * 8 * 2)


# DPO with LoRA: the reference is the model without its adapters, without gradient.


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.base = nn.Embedding(V, 8).requires_grad_(False), nn.Linear(8, V).requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, V, bias=False)

    def forward(self, ids: Tensor, *, adapted: bool) -> Tensor:
        x = self.wte(ids)
        logits = self.base(x) + (self.b(self.a(x)) if adapted else 0.0)
        return logits.log_softmax(-1).gather(-1, ids[..., None]).sum((1, 2))


def dpo(watch: Watch) -> nn.Module:
    model = Lora()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    monitor = watch(model)
    for _ in range(STEPS):
        batch = {"input_ids": torch.randint(0, V, (6, 4))}  # three chosen, three rejected
        with monitor.step(batch):
            policy = model(batch["input_ids"], adapted=True)
            with torch.no_grad():
                reference = model(batch["input_ids"], adapted=False)
            gain = policy - reference
            (-F.logsigmoid(0.1 * (gain[:3] - gain[3:]))).mean().backward()
            update(optimizer)
    return model


# 24 tokens. The base forward only; a: forward and weight gradient; b: forward and both gradients.
DPO_BASE = 2 * 24 * 8 * V
DPO = DPO_BASE + 2 * (2 * 24 * 8 * 2) + 3 * (2 * 24 * 2 * V)


# Diffusion: noise prediction, and an average of the weights.


def diffusion(watch: Watch) -> nn.Module:
    model = nn.Conv2d(3, 3, 3, padding=1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer, monitor = torch.optim.AdamW(model.parameters(), lr=1e-2), watch(model)
    for _ in range(STEPS):
        images = torch.randn(2, 3, 8, 8)
        with monitor.step(images):
            noise, t = torch.randn_like(images), torch.rand(2, 1, 1, 1)
            F.mse_loss(model((1 - t) * images + t * noise), noise).backward()
            update(optimizer)
            average.update_parameters(model)
    return nn.ModuleList([model, average])


DIFFUSION = 2 * (2 * 2 * 8 * 8 * 3 * 3 * 9)  # forward and weight gradient


# Reinforcement learning: five actions of three environments without gradient, then one update on all fifteen.


def rollouts(watch: Watch) -> nn.Module:
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer, monitor = torch.optim.Adam(policy.parameters(), lr=1e-2), watch(policy)
    for _ in range(STEPS):
        state = torch.randn(3, 4)
        with monitor.step(state):
            seen = []
            for _ in range(5):
                with torch.no_grad():
                    action = torch.distributions.Categorical(logits=policy(state)).sample()
                seen.append((state, action))
                state = state + 0.1 * action[:, None] + 0.01 * torch.randn_like(state)
            states, actions = (torch.cat(parts) for parts in zip(*seen, strict=True))
            F.cross_entropy(policy(states), actions).backward()
            update(optimizer)
    return policy


ROLLOUTS = 2 * (2 * 15 * 4 * 8) + 3 * (2 * 15 * 8 * 2)
ACTIONS = 5 * (2 * 3 * 4 * 8 + 2 * 3 * 8 * 2)

# Script, what its steps may be (model FLOPs, hardware FLOPs), tokens of a step.
SCRIPTS: dict[str, tuple[Callable[[Watch], nn.Module], set[tuple[int, int]], int | None]] = {
    "nanogpt": (nanogpt, {(NANOGPT, NANOGPT)}, B * T),
    "sft": (sft, {(flops, flops) for flops in SFT.values()}, None),
    "gan": (gan, {(GAN, GAN)}, None),
    "unfreezing": (unfreezing, {(FROZEN, FROZEN), (THAWED, THAWED)}, None),
    "dpo": (dpo, {(DPO, DPO + DPO_BASE)}, 24),
    "diffusion": (diffusion, {(DIFFUSION, DIFFUSION)}, None),
    "rollouts": (rollouts, {(ROLLOUTS, ROLLOUTS + ACTIONS)}, None),
}


def run(name: str, watch: Watch) -> tuple[list[Tensor], Tensor]:
    """Weights and gradients of the script, and the state of the random numbers after it."""
    torch.manual_seed(0)
    model = SCRIPTS[name][0](watch)
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return tensors, torch.get_rng_state()


@pytest.mark.parametrize("count", ["auto", "every_step"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_public_script(
    name: str, count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monitors: list[mm.Monitor] = []

    def watch(model: nn.Module) -> mm.Monitor:
        options: dict[str, Any] = {"jsonl": tmp_path / "a.jsonl", "console": True, "log_every_n_steps": 3}
        monitors.append(mm.Monitor(model, peak=1e12, count=count, **options))
        return monitors[0]

    bare = run(name, lambda model: Bare())
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = run(name, watch)
        monitors[0].close()
    assert all(torch.equal(a, b) for a, b in zip(ours[0], bare[0], strict=True))
    assert torch.equal(ours[1], bare[1])

    _, flops, tokens = SCRIPTS[name]
    kept = read_jsonl(tmp_path / "a.jsonl")
    assert {
        (record.model_flops, record.hardware_flops - record.kernel_recompute_flops) for record in kept.records
    } == flops
    assert all(not record.is_lower_bound for record in kept.records)
    if tokens is not None:
        assert all(reading.window.tokens == tokens * reading.window.steps for reading in kept.readings)
    if name == "sft":
        assert monitors[0].totals["tokens"] == sum(2 * max(lengths) for lengths in SFT_LENGTHS)

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(kept.readings) > 0
    assert all(line.startswith("mfu-monitor steps ") and len(line) <= 120 for line in lines)
    assert not [line for line in lines if re.search(r"e[+]\d|\(\w+=|None|nan", line)]
    assert [r.getMessage() for r in caplog.records] == []


def test_a_vision_transformer_in_bf16_mixed(tmp_path: Path) -> None:
    """Patches of 4 x 4, one token layer and a head, with a real Lightning trainer."""
    L = pytest.importorskip("lightning")
    from mfu_monitor.callbacks import MFUMonitor

    class Vit(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.patches, self.mix, self.head = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 8), nn.Linear(8, 5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self.head(self.mix(self.patches(x).flatten(2).mT).mean(1)), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(*callbacks: Any) -> list[Tensor]:
        draw = torch.Generator().manual_seed(1)
        data = [(torch.randn(3, 8, 8, generator=draw), k % 5) for k in range(16)]
        options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", precision="bf16-mixed", callbacks=list(callbacks), log_every_n_steps=4,
            enable_model_summary=False, default_root_dir=tmp_path, **options,
        )  # fmt: skip
        module = Vit()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
        return list(module.parameters())

    callback = MFUMonitor(peak=1e12, jsonl=str(tmp_path / "a.jsonl"))
    assert all(torch.equal(a, b) for a, b in zip(fit(callback), fit(), strict=True))
    records = read_jsonl(tmp_path / "a.jsonl").records
    # Convolution: forward and weight gradient; mixing on 2 x 4 tokens and the head on 2 rows: all three products.
    patches, mix, head = 2 * 2 * 4 * 8 * 48, 2 * (2 * 4) * 8 * 8, 2 * 2 * 8 * 5
    assert {record.model_flops for record in records} == {2 * patches + 3 * mix + 3 * head}
    assert {tuple(record.by_dtype()) for record in records} == {("bf16",)}
    assert callback.reading is not None
    assert callback.reading.window.samples == 2 * callback.reading.window.steps
