"""Counting on two processes: each rank counts what it runs itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

WORLD = 2
TP_FORWARD = 2 * 4 * 16 * 64 + 2 * 4 * 64 * 16  # Linear(16,64)-ReLU-Linear(64,16), 4 tokens


def _start(rank: int, rendezvous: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def _tensor_parallel(rank: int, rendezvous: str, out: str) -> None:
    _start(rank, rendezvous)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from mfu_monitor.counting.counter import FlopCounter

    mesh = init_device_mesh("cpu", (WORLD,))
    model = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(4, 16, requires_grad=True)
    with torch.no_grad(), FlopCounter(model) as forward:
        model(x)
    with FlopCounter(model) as training:
        model(x).sum().backward()
    _save(out, rank, forward.record, training.record)


def _fully_sharded(rank: int, rendezvous: str, out: str) -> None:
    _start(rank, rendezvous)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from mfu_monitor.counting.counter import FlopCounter

    mesh = init_device_mesh("cpu", (WORLD,))
    model = _model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(4, 16)
    with torch.no_grad(), FlopCounter(model) as forward:
        model(x)
    with FlopCounter(model) as training:
        model(x).sum().backward()
    _save(out, rank, forward.record, training.record)


def _data_parallel(rank: int, rendezvous: str, out: str) -> None:
    _start(rank, rendezvous)
    from mfu_monitor.counting.counter import FlopCounter

    model = nn.parallel.DistributedDataParallel(_model())
    x = torch.ones(4, 16)
    with torch.no_grad(), FlopCounter(model) as forward:
        model(x)
    with FlopCounter(model) as training:
        model(x).sum().backward()
    _save(out, rank, forward.record, training.record)


def _save(out: str, rank: int, forward, training) -> None:
    modules = {name: t.model_flops for name, t in training.by_module().items() if t.model_flops}
    result = (forward.model_flops, training.model_flops, training.hardware_flops, modules, training.notes,
              [u.op for u in training.unsupported_ops], [p.name for p in training.uncovered_parameters])  # fmt: skip
    torch.save(result, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def run_on_two(work, tmp_path: Path) -> list:
    mp.spawn(work, args=(str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=WORLD, join=True)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def test_c23_each_rank_counts_its_own_half_under_tensor_parallelism(tmp_path):
    for forward, training, hardware, modules, notes, unsupported, uncovered in run_on_two(_tensor_parallel, tmp_path):
        assert forward == TP_FORWARD // 2 == 8_192
        assert training == hardware == 3 * TP_FORWARD // 2
        assert modules == {"": training, "0": training // 2, "2": training // 2}
        assert (list(notes), unsupported, uncovered) == ([], [], [])


@pytest.mark.parametrize("work", [_fully_sharded, _data_parallel])
def test_c23_each_rank_counts_the_whole_product_where_weights_are_gathered(work, tmp_path):
    # The batch needs no gradient: one input gradient less.
    first, second = 2 * 4 * 16 * 64, 2 * 4 * 64 * 16
    for forward, training, hardware, modules, notes, unsupported, uncovered in run_on_two(work, tmp_path):
        assert forward == TP_FORWARD
        assert training == hardware == 2 * first + 3 * second == 40_960
        assert modules == {"": training, "0": 2 * first, "2": 3 * second}
        assert (list(notes), unsupported, uncovered) == ([], [], [])
