"""What only a CUDA device can show. Run by ``make gpu-check``; no result of these is claimed where they did not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import mfu_monitor as mm
from mfu_monitor.counting.step_record import StepRecord

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B, H, S, D = 2, 8, 512, 64


def count(model: nn.Module | None, run: Any) -> StepRecord:
    with mm.FlopCounter(model) as counter:
        run()
    assert not counter.record.notes, counter.record.notes
    assert not counter.record.unsupported_ops, counter.record.unsupported_ops
    return counter.record


def queries(*, grad: bool = True, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(B, H, S, D, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "backend",
    [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
)
def test_model_flops_of_attention_do_not_depend_on_the_backend(backend, is_causal):
    q, k, v = queries()
    with sdpa_kernel(backend):
        record = count(None, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward())
    pairs = S * (S + 1) // 2 if is_causal else S * S
    assert record.model_flops == 6 * (2 * B * H * pairs * D)
    fused = backend != SDPBackend.MATH
    assert record.kernel_recompute_flops == (2 * B * H * pairs * D if fused else 0)


def test_backward_threads_find_the_module_of_their_forward():
    """On CUDA backward runs on a thread of the device's own, with sequence numbers of its own."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)]).cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    f = 2 * 32 * 64 * 64
    for reentrant in (None, False, True):

        def step(reentrant: bool | None = reentrant) -> None:
            y = x
            for block in model:
                y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
            y.sum().backward()

        record = count(model, step)
        modules = record.by_module()
        assert record.model_flops == 4 * 2 * 3 * f
        assert all(modules[f"{i}.{j}"].model_flops == 3 * f for i in range(4) for j in (0, 2))
        assert record.recompute_flops == {None: 0, False: 4 * f, True: 8 * f}[reentrant]


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_fp32_products_are_split_from_tf32_by_the_setting(setting):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        a = torch.randn(64, 64, device="cuda")
        record = count(None, lambda: a @ a)
    finally:
        torch.set_float32_matmul_precision(before)
    expected = "tf32" if setting == "high" and torch.cuda.get_device_capability() >= (8, 0) else "fp32"
    assert set(record.by_dtype()) == {expected}


def test_fp8_products_count_as_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no FP8")
    a = torch.randn(48, 80, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(112, 80, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    record = count(None, lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16))
    assert record.model_flops == 860_160 == record.by_dtype()["fp8"].model_flops


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_flex_attention_counts_forward_and_backward(is_causal):
    q, k, v = queries()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cuda") if is_causal else None
    compiled = torch.compile(flex_attention)
    record = count(None, lambda: compiled(q, k, v, block_mask=mask).sum().backward())
    pairs = S * (S + 1) // 2 if is_causal else S * S
    assert record.model_flops == 6 * (2 * B * H * pairs * D)
    assert record.hardware_flops > record.model_flops


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_and_triton_templates_are_counted(mode):
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()
    compiled = torch.compile(model, mode=mode)
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):  # warm up, record, replay
        record = count(model, lambda: compiled(x).sum().backward())
        first, second = 2 * 128 * 256 * 512, 2 * 128 * 512 * 256
        assert record.model_flops == 2 * first + 3 * second


def test_replayed_steps_never_wait_for_the_device():
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = mm.Monitor(model, log_every_n_steps=5, alerts=False)
    batch = torch.randn(256, 512, device="cuda")

    def step() -> None:
        with monitor.step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    for _ in range(10):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monitor.close()
    assert monitor.reading is not None
    assert monitor.reading.window.clock_name != "host"


def test_a_training_step_of_large_products_reads_a_plausible_mfu():
    peak = mm.device_peak(torch.device("cuda"))
    assert peak is not None, "the device is not in the table: pass its name on"
    model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(4)]).cuda().bfloat16()
    monitor = mm.Monitor(model, log_every_n_steps=10, alerts=False)
    batch = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(40):
        with monitor.step(batch):
            model(batch).sum().backward()
            model.zero_grad(set_to_none=True)
    monitor.close()
    assert monitor.reading is not None
    assert monitor.reading.precision == "bf16"
    assert monitor.reading.mfu is not None
    assert 0.3 < monitor.reading.mfu <= monitor.reading.hfu <= 1.05


def test_results_do_not_change_by_a_bit():
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.GELU(), nn.Linear(128, 64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        monitor = mm.Monitor(model, log_every_n_steps=5, alerts=False) if watched else None
        losses = []
        for _ in range(50):
            batch = torch.randn(32, 64, device="cuda")
            if monitor is not None:
                monitor.begin_step(batch)
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.end_step()
            losses.append(loss.detach())
        return [*losses, *model.parameters(), torch.cuda.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
