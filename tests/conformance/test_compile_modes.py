"""Every way to compile a model counts the same, and the same as eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.compiled.watch import guards_notice_modes
from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord

pytestmark = [
    pytest.mark.skipif(guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager"),
    pytest.mark.filterwarnings("ignore:.*"),
]

ROWS, I, D, HIDDEN, O = 8, 16, 32, 64, 4  # noqa: E741
BLOCK = 2 * (2 * ROWS * D * HIDDEN)
"""Forward of one block: two layers."""
ENDS = 2 * (2 * ROWS * I * D) + 3 * (2 * ROWS * D * O)
"""The first layer has no input gradient; the head has all three products."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A layer, equal blocks, a head; gives its loss."""

    def __init__(self, *, depth: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(I, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, D)) for _ in range(depth)
        )
        self.head = nn.Linear(D, O)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(ROWS, I)


def count(model: nn.Module, run: Callable[[], Any]) -> StepRecord:
    model.zero_grad()
    with FlopCounter(model) as counter:
        run()
    assert counter.record.notes == ()
    assert not counter.record.is_lower_bound
    return counter.record


# --- torch.compile's own choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_count_the_same(mode: str) -> None:
    backend_calls = torch._dynamo.utils.counters["stats"]
    model, x = Net(), batch()
    compiled = torch.compile(model, mode=mode)
    for _ in range(2):
        record = count(model, lambda: compiled(x).backward())
        assert record.model_flops == record.hardware_flops == 2 * 3 * BLOCK + ENDS
    assert backend_calls["unique_graphs"] == 1


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_shapes_that_change_count_for_the_sizes_that_ran(dynamic: bool | None, fullgraph: bool) -> None:
    model = Net(depth=1)
    compiled = torch.compile(model, dynamic=dynamic, fullgraph=fullgraph)
    for rows in (8, 24):
        x = torch.randn(rows, I)
        record = count(model, lambda: compiled(x).backward())  # noqa: B023
        assert record.model_flops == rows // ROWS * (3 * BLOCK + ENDS)


def test_a_module_compiled_in_place_counts_under_its_own_names() -> None:
    model, x = Net(), batch()
    model.compile()
    modules = count(model, lambda: model(x).backward()).by_module(inclusive=False)
    layers = {name: t.model_flops for name, t in modules.items() if t.model_flops}
    assert layers == {
        "first": 2 * (2 * ROWS * I * D),
        "head": 3 * (2 * ROWS * D * O),
        **{f"blocks.{block}.{layer}": 3 * BLOCK // 2 for block in (0, 1) for layer in (0, 2)},
    }


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_make_no_code_count_by_dispatch(backend: str) -> None:
    model, x = Net(recompute=True), batch()
    compiled = torch.compile(model, backend=backend)
    record = count(model, lambda: compiled(x).backward())
    assert record.model_flops == 2 * 3 * BLOCK + ENDS
    assert record.recompute_flops > 0


# --- one block compiled, many instances ------------------------------------------------------------------------------


def test_instances_of_one_compiled_block_count_each_under_its_name() -> None:
    """Regional compilation: the code of the first block serves the others, whose weights are inputs."""
    backend = CompileCounterWithBackend("inductor")
    model, x = Net(depth=3), batch()
    for block in model.blocks:
        block.compile(backend=backend)
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=True):
        record = count(model, lambda: model(x).backward())
    assert record.model_flops == record.hardware_flops == 3 * 3 * BLOCK + ENDS
    assert [record.by_module()[f"blocks.{i}"].model_flops for i in range(3)] == [3 * BLOCK] * 3


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="this torch has no nested regions")
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_region_compiled_once_inside_a_graph_counts_at_every_call(dynamic: bool | None) -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, up)), down)

    class WithRegions(Net):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = region(x, block[0].weight, block[2].weight)  # type: ignore[index]
            return self.head(x).square().mean()

    model, x = WithRegions(depth=3), batch()
    compiled = torch.compile(model, dynamic=dynamic)
    record = count(model, lambda: compiled(x).backward())
    assert record.model_flops == record.hardware_flops == 3 * 3 * BLOCK + ENDS
    assert record.by_phase()["forward"].model_flops == 3 * BLOCK + 2 * ROWS * (I * D + D * O)
    assert [record.by_module()[f"blocks.{i}"].model_flops for i in range(3)] == [3 * BLOCK] * 3


# --- optimizer and backward compiled ---------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("inlined", [False, True])
def test_products_of_a_compiled_optimizer_step_are_optimizer(inlined: bool) -> None:
    layer, x = nn.Linear(I, D, bias=False), batch()
    optimizer = torch.optim.Muon(layer.parameters(), lr=0.01)
    steps = 5  # Newton-Schulz iterations, its default
    # On G = (D, I), turned to the wide side I <= D: A = G G^T, A A, then (b A + c A A) G.
    newton_schulz = steps * (2 * I * D * I + 2 * I * I * I + 2 * I * I * D)

    def plain_step() -> None:
        optimizer.step()

    compiled_step = torch.compile(plain_step if inlined else optimizer.step)

    def run(step: Callable[[], Any]) -> None:
        layer(x).square().mean().backward()
        step()

    eager = count(layer, lambda: run(optimizer.step))
    for _ in range(2):
        record = count(layer, lambda: run(compiled_step))
        assert record.model_flops == eager.model_flops == 2 * (2 * ROWS * I * D)
        assert record.optimizer_flops == eager.optimizer_flops == newton_schulz
        assert record.other_flops == 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiled_forward", [False, True])
def test_a_backward_that_compiled_autograd_runs_is_backward(compiled_forward: bool, recompute: bool) -> None:
    model, x = Net(recompute=recompute), batch()
    forward = torch.compile(model) if compiled_forward else model

    def run() -> None:
        loss = forward(x)
        with compiled_autograd._enable(lambda graph: torch.compile(graph)):
            loss.backward()

    plain = count(model, lambda: forward(x).backward())
    for _ in range(2):
        record = count(model, run)
        assert record.model_flops == plain.model_flops == 2 * 3 * BLOCK + ENDS
        assert record.recompute_flops == plain.recompute_flops
    assert (record.recompute_flops > 0) == recompute


# --- caches ----------------------------------------------------------------------------------------------------------

FROM_CACHE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from test_compile_modes import Net, batch
from mfu_monitor.counting.counter import FlopCounter
model = Net(recompute=True)
compiled = torch.compile(model)
x = batch()
with FlopCounter(model) as counter:
    compiled(x).backward()
record = counter.record
stats = torch._dynamo.utils.counters
hits = stats["aot_autograd"]["autograd_cache_hit"] + stats["inductor"]["fxgraph_cache_hit"]
print(json.dumps([hits, record.totals.as_dict(), {k: v.as_dict() for k, v in record.by_module().items()}]))
"""


@pytest.mark.slow
def test_a_process_that_compiles_from_the_on_disk_cache_counts_the_same(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FROM_CACHE, str(Path(__file__).parent)]
    cold, cached = (
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    )
    assert cold[0] == 0
    assert cached[0] > 0
    assert cached[1:] == cold[1:]
    assert cold[1]["model_flops"] == 2 * 3 * BLOCK + ENDS
