"""The byte-level GPT: its FLOPs have a closed form, and its data is the same on every start."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from mfu_monitor import FlopCounter, StepRecord

EXAMPLES = Path(__file__).parents[2] / "examples"

LAYERS, HEADS, C, S, B = 2, 2, 16, 12, 3
T = B * S
PAIRS = S * (S + 1) // 2
# Per block: Linear C->3C, C->C, C->4C and 4C->C, each 2 x tokens x in x out; one attention of QK^T and PV over the
# causal pairs, 2 x 2 x B x (heads x head width = C) x pairs. Then the head, C->256.
QKV, PROJECTION, UP, DOWN = 2 * T * C * 3 * C, 2 * T * C * C, 2 * T * C * 4 * C, 2 * T * 4 * C * C
ATTENTION = 2 * 2 * B * C * PAIRS
HEAD = 2 * T * C * 256
FORWARD = LAYERS * (QKV + PROJECTION + UP + DOWN + ATTENTION) + HEAD


def load_example(name: str) -> ModuleType:
    """Import a script of ``examples/`` by its path; it is no package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("lightning_gpt")


def count(example: ModuleType, checkpointing: str) -> StepRecord:
    config = example.GPTConfig(layers=LAYERS, heads=HEADS, width=C, sequence_length=S, checkpointing=checkpointing)
    model = example.build_model(config)
    ids = torch.zeros(B, S, dtype=torch.long)
    with FlopCounter(model) as counter:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return counter.record


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_model_flops_are_three_forwards_whatever_the_checkpointing(example: ModuleType, checkpointing: str) -> None:
    # Every product has a weight and an input that need gradients (the embeddings are trained): forward + 2 backward.
    assert count(example, checkpointing).model_flops == 3 * FORWARD


def test_full_checkpointing_adds_exactly_the_forward_products_that_are_rerun(example: ModuleType) -> None:
    plain, full = count(example, "none"), count(example, "full")
    # Non-reentrant checkpointing stops as soon as all it needs is there: the last product of a block is not run again.
    rerun = LAYERS * (QKV + PROJECTION + UP + ATTENTION)
    assert plain.recompute_flops == 0
    assert full.recompute_flops == rerun
    assert full.hardware_flops - plain.hardware_flops == rerun


def test_selective_checkpointing_reruns_no_product(example: ModuleType) -> None:
    assert count(example, "selective").hardware_flops == count(example, "none").hardware_flops


def test_modules_own_their_products_forward_and_backward(example: ModuleType) -> None:
    by_module = count(example, "full").by_module()
    assert by_module["blocks.0.mlp"].model_flops == 3 * (UP + DOWN)
    assert by_module["blocks.1.attention"].model_flops == 3 * (QKV + PROJECTION + ATTENTION)
    assert by_module["head"].model_flops == 3 * HEAD


def test_everything_in_the_model_is_counted(example: ModuleType) -> None:
    assert not count(example, "full").is_lower_bound


def test_the_default_model_has_a_few_million_parameters(example: ModuleType) -> None:
    parameters = sum(p.numel() for p in example.build_model().parameters())
    # 4 blocks of 12 C^2 weights, 13 C biases and norms; two embeddings, the last norm and the head, C = 256.
    assert parameters == 4 * (12 * 256**2 + 13 * 256) + (256 + 128 + 2 + 256) * 256


def test_batches_are_the_same_on_every_start_and_labels_are_the_next_bytes(example: ModuleType) -> None:
    config = example.GPTConfig(sequence_length=32)
    first = next(iter(example.build_loader(config, batch_size=4)))
    again = next(iter(example.build_loader(config, batch_size=4)))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert torch.equal(first["input_ids"][:, 1:], first["labels"][:, :-1])


def test_another_seed_gives_another_order(example: ModuleType) -> None:
    config = example.GPTConfig(sequence_length=32)
    first = next(iter(example.build_loader(config, batch_size=4, seed=0)))
    other = next(iter(example.build_loader(config, batch_size=4, seed=1)))
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_the_text_is_the_standard_librarys_source(example: ModuleType) -> None:
    text = bytes(example.SourceCode(128).text.tolist())
    assert len(text) == 4_000_000
    assert (Path(sysconfig.get_path("stdlib")) / "__future__.py").read_bytes() in text


def test_learning_happens_within_a_few_steps(example: ModuleType) -> None:
    torch.manual_seed(0)
    config = example.GPTConfig(layers=1, heads=2, width=32, sequence_length=32)
    model = example.build_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _, batch in zip(range(40), example.build_loader(config, batch_size=8), strict=False):
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0
