"""Counting compiled models on the inductor backend: to the FLOP, and without disturbing them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting import observer as observer_module
from mfu_monitor.counting.compiled import agreement, runs
from mfu_monitor.counting.compiled import watch as inductor
from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord

compiled_code_runs_under_a_mode = pytest.mark.skipif(
    inductor.guards_notice_modes(), reason="before torch 2.10 counted steps run in eager, which has tests of its own"
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def count(model: nn.Module | None, run) -> StepRecord:
    with FlopCounter(model) as counter:
        run()
    assert not counter.record.notes, counter.record.notes
    return counter.record


def mlp(depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(256, 256), nn.GELU())])


F_LAYER = 2 * 64 * 256 * 256


@compiled_code_runs_under_a_mode
@pytest.mark.parametrize(("budget", "recomputed"), [(1.0, 0), (0.2, 5), (0.0, 6)])
@pytest.mark.parametrize("warm", [False, True])
def test_c16_the_compilers_recomputation_is_hardware_and_not_model(budget, recomputed, warm):
    model = mlp()
    compiled = torch.compile(model)
    x = torch.randn(64, 256)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        if warm:
            compiled(x).sum().backward()
        record = count(model, lambda: compiled(x).sum().backward())
    assert record.model_flops == 17 * F_LAYER
    assert record.hardware_flops == (17 + recomputed) * F_LAYER
    assert record.hardware_flops == {1.0: 142_606_336, 0.2: 184_549_376, 0.0: 192_937_984}[budget]
    assert record.recompute_flops == recomputed * F_LAYER


@compiled_code_runs_under_a_mode
def test_modules_of_a_compiled_model_are_found_by_their_parameters():
    model = mlp()
    compiled = torch.compile(model)
    x = torch.randn(64, 256)
    record = count(model, lambda: compiled(x).sum().backward())
    modules = record.by_module(inclusive=False)
    assert modules["0"].model_flops == 2 * F_LAYER
    assert all(modules[str(2 * i)].model_flops == 3 * F_LAYER for i in range(1, 6))


@compiled_code_runs_under_a_mode
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_c17_counting_leaves_compiled_code_in_use(warm, dynamic):
    backend = CompileCounterWithBackend("inductor")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    x = torch.randn(4, 16, requires_grad=True)
    if warm:
        compiled(x).sum().backward()
    record = count(model, lambda: compiled(x).sum().backward())
    eager = count(model, lambda: model(x).sum().backward())
    frames = backend.frame_count
    assert frames == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(x).sum().backward()
    assert backend.frame_count == frames
    assert any("Torch-Compiled Region" in event.name for event in profile.events())
    assert record.model_flops == eager.model_flops == 3 * (2 * 4 * 16 * 32 + 2 * 4 * 32 * 8)


@compiled_code_runs_under_a_mode
def test_dynamic_shapes_are_counted_for_the_sizes_that_ran():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    compiled = torch.compile(model, dynamic=True)
    for rows in (5, 7, 12):
        x = torch.randn(rows, 8, requires_grad=True)
        record = count(model, lambda: compiled(x).sum().backward())  # noqa: B023
        assert record.model_flops == 3 * (2 * rows * 8 * 16 + 2 * rows * 16 * 4)


@compiled_code_runs_under_a_mode
def test_c5_compiled_flex_attention_counts_attended_pairs():
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    compiled = torch.compile(flex_attention)
    dense = count(None, lambda: compiled(q, k, v))
    assert dense.model_flops == 2 * 2 * (2 * 128 * 128 * 16) == 2_097_152
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    causal = count(None, lambda: compiled(q, k, v, block_mask=mask))
    assert causal.model_flops == 2 * 2 * (2 * (128 * 129 // 2) * 16) == 1_056_768
    eager = count(None, lambda: flex_attention(q, k, v, block_mask=mask))
    assert eager.model_flops == 1_056_768


@compiled_code_runs_under_a_mode
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_attention_has_the_model_flops_of_eager(backend, is_causal):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    # The compiler's graph cache does not know which attention backend was asked for.
    with sdpa_kernel(backend), torch._inductor.config.patch(force_disable_caches=True):
        record = count(None, lambda: compiled(q, k, v).sum().backward())
    pairs = 16 * 17 // 2 if is_causal else 16 * 16
    assert record.model_flops == 6 * (2 * 2 * 3 * pairs * 8)
    assert record.palm_model_flops == 6 * (2 * 2 * 3 * 16 * 16 * 8)
    if backend == SDPBackend.MATH:
        assert record.hardware_flops == 6 * (2 * 2 * 3 * 16 * 16 * 8)


@compiled_code_runs_under_a_mode
@pytest.mark.parametrize("mask_of_input", [True, False])
def test_hand_written_attention_that_the_compiler_fuses_counts_as_in_eager(mask_of_input):
    """Two products and a softmax are two dense products, also where inductor makes an attention call of them."""

    def attention(q, k, v, mask):
        if not mask_of_input:
            mask = torch.full((2, 3, 16, 16), float("-inf")).triu(1)
        return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5 + mask, -1) @ v

    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    mask = torch.full((2, 3, 16, 16), float("-inf")).triu(1)
    eager = count(None, lambda: attention(q, k, v, mask).sum().backward())
    compiled = torch.compile(attention)
    record = count(None, lambda: compiled(q, k, v, mask).sum().backward())
    assert record.model_flops == eager.model_flops == 6 * (2 * 2 * 3 * 16 * 16 * 8)
    assert record.other_flops == 0


@compiled_code_runs_under_a_mode
def test_a_mask_passed_to_a_compiled_function_counts_by_content():
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    compiled = torch.compile(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m))
    record = count(None, lambda: compiled(q, k, v, mask).sum().backward())
    assert record.model_flops == 6 * (2 * 2 * 3 * (16 * 17 // 2) * 8)


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@compiled_code_runs_under_a_mode
def test_compiled_blocks_inside_an_eager_model_and_checkpointing_around_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
            )
            for block in self.blocks:
                block.compile()
            self.head = nn.Linear(32, 5)

        def forward(self, x, *, checkpointed):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            return self.head(x)

    model = Net()
    x = torch.randn(8, 32, requires_grad=True)
    block, head = 2 * (2 * 8 * 32 * 64), 2 * 8 * 32 * 5
    record = count(model, lambda: model(x, checkpointed=False).sum().backward())
    assert record.model_flops == record.hardware_flops == 3 * (3 * block + head)
    assert record.by_module()["blocks.1"].model_flops == 3 * block
    record = count(model, lambda: model(x, checkpointed=True).sum().backward())
    assert record.model_flops == 3 * (3 * block + head)
    # Before 2.14 torch turns the compiler off around an eager checkpoint, so a block stops early: its second product is
    # not rerun. Since 2.14 the block runs compiled there, and a compiled graph is rerun whole (the profiler's event
    # tree shows a compiled region for each of the six runs, with and without a counter).
    rerun = block if torch_version() >= (2, 14) else 2 * 8 * 32 * 64
    assert record.recompute_flops == 3 * rerun


@compiled_code_runs_under_a_mode
def test_checkpointing_inside_a_compiled_model_is_recompute():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
            self.head = nn.Linear(64, 5)

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    model = Net()
    compiled = torch.compile(model)
    x = torch.randn(16, 64, requires_grad=True)
    record = count(model, lambda: compiled(x).sum().backward())
    f, head = 2 * 16 * 64 * 64, 2 * 16 * 64 * 5
    assert record.model_flops == 3 * (2 * f + head)
    assert record.recompute_flops == 2 * f  # the head's weight gradient needs the block's result
    assert record.by_module()["block"].recompute_flops == 2 * f


@compiled_code_runs_under_a_mode
def test_convolutions_and_frozen_layers_count_as_in_eager():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    compiled = torch.compile(model)
    x = torch.randn(2, 4, 8, 8)
    conv, linear = 2 * 2 * 8 * 36 * (4 // 2) * 9, 2 * 2 * 288 * 4
    assert count(model, lambda: compiled(x).sum().backward()).model_flops == 2 * conv + 3 * linear
    model[0].requires_grad_(False)
    assert count(model, lambda: compiled(x).sum().backward()).model_flops == conv + 2 * linear
    with torch.no_grad():
        assert count(model, lambda: compiled(x)).model_flops == conv + linear


@compiled_code_runs_under_a_mode
def test_a_compiled_teacher_without_gradient_is_other():
    teacher, student = nn.Linear(16, 16), nn.Linear(16, 16)
    run_teacher, run_student = torch.compile(teacher), torch.compile(student)
    x = torch.randn(4, 16)

    def step():
        with torch.no_grad():
            target = run_teacher(x)
        F.mse_loss(run_student(x), target).backward()

    step()
    record = count(nn.ModuleDict({"teacher": teacher, "student": student}), step)
    f = 2 * 4 * 16 * 16
    assert (record.model_flops, record.other_flops) == (2 * f, f)


def test_the_compilers_own_method_is_back_after_counting_and_after_an_exception():
    from torch._inductor.output_code import CompiledFxGraph

    original = CompiledFxGraph.__call__
    count(None, lambda: None)
    assert CompiledFxGraph.__call__ is original

    def dies():
        with FlopCounter():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dies()
    assert CompiledFxGraph.__call__ is original


@compiled_code_runs_under_a_mode
def test_a_graph_that_cannot_be_read_makes_a_lower_bound_that_says_so(monkeypatch):
    model = nn.Linear(16, 16)
    compiled = torch.compile(model)
    x = torch.randn(4, 16)
    compiled(x).sum().backward()
    monkeypatch.setattr(inductor, "unavailable_reason", lambda: "this torch keeps no text of its compiled graphs")
    with FlopCounter(model) as counter:
        compiled(x).sum().backward()
    record = counter.record
    assert record.is_lower_bound
    assert "keeps no text" in record.notes[0]
    assert record.hardware_flops == 2 * (2 * 4 * 16 * 16)


@compiled_code_runs_under_a_mode
@pytest.mark.parametrize(
    ("name", "gives", "said"),
    [("compiled_graph_class", None, "no CompiledFxGraph"), ("dtypes_by_abbreviation", {}, "no names of dtypes")],
)
def test_what_a_torch_keeps_no_more_of_its_compiled_graphs_makes_a_lower_bound(monkeypatch, name, gives, said):
    monkeypatch.setattr(inductor, name, lambda: gives)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    compiled = torch.compile(model)
    x = torch.randn(4, 16)
    compiled(x).sum().backward()
    with FlopCounter(model) as counter:
        compiled(x).sum().backward()
    assert counter.record.is_lower_bound
    assert any(said in note for note in counter.record.notes)
    assert counter.record.hardware_flops == 2 * (2 * 4 * 16 * 32) + 3 * (2 * 4 * 32 * 8)


def test_before_torch_2_10_a_counted_step_runs_in_eager_and_compiled_code_stays(monkeypatch):
    for module in (inductor, observer_module):
        monkeypatch.setattr(module, "guards_notice_modes", lambda: True)
    backend = CompileCounterWithBackend("inductor")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(4, 16, requires_grad=True)
    compiled(x).sum().backward()
    for _ in range(3):
        with FlopCounter(model) as counter:
            compiled(x).sum().backward()
        compiled(x).sum().backward()
    assert backend.frame_count == 1
    assert counter.record.model_flops == 3 * (2 * 4 * 16 * 32 + 2 * 4 * 32 * 8)
    assert counter.record.is_lower_bound
    assert "before 2.10" in counter.record.notes[0]


@pytest.mark.parametrize(("version", "notices"), [("2.9.1+cu128", True), ("2.10.0", False), ("2.13.0a0+git1", False)])
def test_guards_notice_modes_before_torch_2_10(version, notices):
    assert inductor.guards_notice_modes(version) is notices


@compiled_code_runs_under_a_mode
def test_where_a_torch_keeps_little_of_its_graphs_no_compiled_count_is_exact(monkeypatch):
    assert [agreement.keeps_little(v) for v in ("2.10.0", "2.11.1+cu128", "2.12.0", "2.15.0")] == [
        True,
        True,
        False,
        False,
    ]
    monkeypatch.setattr(runs, "keeps_little", lambda: True)
    model, x = nn.Linear(6, 10), torch.ones(4, 6)
    compiled = torch.compile(model)
    compiled(x).sum().backward()
    with FlopCounter(model) as counter:
        compiled(x).sum().backward()
    assert counter.record.is_lower_bound
    assert any("before 2.12" in note for note in counter.record.notes)
    assert counter.record.model_flops == 2 * (2 * 4 * 6 * 10)
    with FlopCounter(model) as counter:
        model(x).sum().backward()
    assert not counter.record.is_lower_bound
