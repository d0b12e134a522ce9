"""Real ranks: what the world is told of work and tokens, in every layout the model's own FLOPs and the batch's tokens.

The model: 2 layers of width 32, hidden width 64, vocabulary 64; 4 sequences of 16 tokens in all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HIDDEN, WORDS, SEQUENCES, LENGTH = 2, 32, 64, 64, 4, 16
TOKENS = SEQUENCES * LENGTH
PROJECTIONS = 2 * TOKENS * 4 * WIDTH * WIDTH * LAYERS
ATTENTION = 2 * SEQUENCES * (LENGTH * (LENGTH + 1) // 2) * 2 * WIDTH * LAYERS
MLP = 2 * TOKENS * 3 * WIDTH * HIDDEN * LAYERS
HEAD = 2 * TOKENS * WIDTH * WORDS
MODEL_FLOPS = 3 * (PROJECTIONS + ATTENTION + MLP + HEAD)
"""Forward once and backward twice."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLPs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2, self.attention, self.mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention(), MLPs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))


def data_parallel(rank: int, world: int) -> tuple[nn.Module, Any]:
    return nn.parallel.DistributedDataParallel(Model()), lambda ids: ids.chunk(world)[rank]


def without_sampler(rank: int, world: int) -> tuple[nn.Module, Any]:
    return nn.parallel.DistributedDataParallel(Model()), lambda ids: ids


def with_dropout(rank: int, world: int) -> tuple[nn.Module, Any]:
    """Each rank draws its own noise: whether it is one piece of work or two cannot be told."""
    model = Model()
    model.embedding = nn.Sequential(model.embedding, nn.Dropout(0.5))
    torch.manual_seed(rank)
    return model, lambda ids: ids


def sharded(rank: int, world: int) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (world,)), Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), lambda ids: ids.chunk(world)[rank]


def tensor_parallel_mlp(rank: int, world: int) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    model = Model()
    _split_mlps(model, init_device_mesh("cpu", (world,)))
    return model, lambda ids: ids


def _split_mlps(model: Model, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        plan = {"mlp.up": ColwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def context_parallel(rank: int, world: int) -> tuple[nn.Module, Any]:
    """Keys and values of all ranks gathered, the local queries against all of them."""
    import torch.distributed._functional_collectives as collectives

    class Gathered(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            group = torch.distributed.group.WORLD
            k, v = (collectives.all_gather_tensor_autograd(t.contiguous(), 2, group) for t in (k, v))
            places = torch.arange(q.shape[2]) + rank * q.shape[2]
            mask = places[:, None] >= torch.arange(k.shape[2])[None]
            return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    model = Model()
    for layer in model.layers:
        layer.attention.__class__ = Gathered
    return model, lambda ids: ids.chunk(world, dim=1)[rank]


def sharded_and_tensor_parallel(rank: int, world: int) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), Model()
    _split_mlps(model, mesh["tensor"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"]), lambda ids: ids.chunk(2)[rank // 2]


Layout = Callable[[int, int], tuple[nn.Module, Any]]
LAYOUTS: dict[int, dict[Layout, int]] = {
    2: {data_parallel: 60, without_sampler: 20, with_dropout: 20, sharded: 20, tensor_parallel_mlp: 60,
        context_parallel: 20},
    4: {sharded_and_tensor_parallel: 20},
}  # fmt: skip
"""By number of ranks, with the steps to run."""


class Sink:
    """Keeps readings and diagnoses as they are written."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any]] = []

    def emit(self, event: Any) -> None:
        if event.kind in ("reading", "diagnosis", "record"):
            self.kept.append((event.kind, event.payload))

    def close(self) -> None: ...


class Stage(nn.Module):
    """One layer, the first with the embedding and the last with the head."""

    def __init__(self, model: Model, rank: int) -> None:
        super().__init__()
        self.embedding = model.embedding if rank == 0 else nn.Identity()
        self.layers = nn.ModuleList([model.layers[rank]])
        self.head = model.head if rank == LAYERS - 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.embedding(x)))


def _pipeline(rank: int, world: int) -> list[tuple[str, Any]]:
    """Four micro-batches of one sequence over two stages; the batch is given to both."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import mfu_monitor as mm

    stage, sink = Stage(Model(), rank), Sink()
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, world, torch.device("cpu")),
        n_microbatches=SEQUENCES,
        loss_fn=lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()),
    )
    monitor = mm.Monitor(stage, log_every_n_steps=5, peak=1e12, sinks=[sink])
    for step in range(20):
        ids = batch(step)
        with monitor.step(ids):
            schedule.step(*([ids] if rank == 0 else []), **({"target": ids} if rank == world - 1 else {}))
    monitor.close()
    return sink.kept


def _run(rank: int, world: int, out: str) -> None:
    import mfu_monitor as mm

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=world)
    results = {}
    for layout, steps in LAYOUTS[world].items():
        model, part_of = layout(rank, world)
        sink = Sink()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        monitor = mm.Monitor(model, log_every_n_steps=5, peak=1e12, sinks=[sink])
        for step in range(steps):
            ids = part_of(batch(step))
            with monitor.step(ids):
                F.cross_entropy(
                    model(ids).flatten(0, 1), batch(step + 1)[: len(ids), : ids.shape[1]].flatten()
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
        monitor.close()
        results[layout.__name__] = sink.kept
    if world == LAYERS:
        results[_pipeline.__name__] = _pipeline(rank, world)
    torch.save(results, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _ranks(world: int, tmp_path: Path) -> list[dict[str, Any]]:
    mp.spawn(_run, args=(world, str(tmp_path)), nprocs=world, join=True)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _ranks(2, tmp_path_factory.mktemp("two"))


def _last_readings(ranks: list[dict[str, Any]], layout: Layout) -> list[dict[str, Any]]:
    """Of every rank; what the world is told is equal on all of them, to the last digit."""
    shown = [[payload for kind, payload in rank[layout.__name__] if kind == "reading"] for rank in ranks]
    names = ("mfu", "hfu", "tokens_per_s", "exactness", "not_known")
    assert len({str([[reading[name] for name in names] for reading in readings]) for readings in shown}) == 1
    return [readings[-1] for readings in shown]


def _per_step(reading: dict[str, Any], name: str) -> float:
    return reading["window"][f"world_{name}"] / reading["window"]["world_steps"]


SPLIT = [data_parallel, sharded, context_parallel]


@pytest.mark.parametrize("layout", SPLIT, ids=lambda layout: layout.__name__)
def test_work_that_is_split_adds_up_to_the_model(layout: Layout, two_ranks: list[dict[str, Any]]) -> None:
    assert MODEL_FLOPS == 9_068_544
    for reading in _last_readings(two_ranks, layout):
        assert _per_step(reading, "model_flops") == MODEL_FLOPS
        assert _per_step(reading, "repeated_flops") == 0
        assert _per_step(reading, "tokens") == TOKENS
        assert reading["window"]["world_repeats_known"] is True


def test_work_on_every_rank_counts_once_and_its_repeats_are_other(two_ranks: list[dict[str, Any]]) -> None:
    repeats = 3 * (PROJECTIONS + ATTENTION + HEAD)
    assert repeats == 4_349_952
    readings = _last_readings(two_ranks, tensor_parallel_mlp)
    for reading in readings:
        assert _per_step(reading, "model_flops") == MODEL_FLOPS
        assert _per_step(reading, "repeated_flops") == repeats
        assert _per_step(reading, "tokens") == TOKENS
        assert reading["exactness"] == "exact"
        # What autograd's attention kernel runs beside the model: masked pairs and its fifth product, on both ranks.
        window = reading["window"]
        assert window["hardware_flops"] == sum(
            window[f"{part}_flops"] for part in ("model", "recompute", "kernel_recompute", "optimizer", "other")
        )
    assert {r["window"]["model_flops"] / r["window"]["steps"] for r in readings} == {MODEL_FLOPS / 2}


def test_a_world_whose_work_and_batches_were_compared_is_exact(two_ranks: list[dict[str, Any]]) -> None:
    assert {r["exactness"] for r in _last_readings(two_ranks, data_parallel)} == {"exact"}
    first = next(payload for kind, payload in two_ranks[0]["data_parallel"] if kind == "reading")
    assert first["exactness"] == "upper_bound"  # nothing had been compared when its row was sent
    assert "not known" in first["not_known"]


def test_ranks_that_read_the_same_batch_do_the_model_once(two_ranks: list[dict[str, Any]]) -> None:
    for reading in _last_readings(two_ranks, without_sampler):
        assert _per_step(reading, "model_flops") == _per_step(reading, "repeated_flops") == MODEL_FLOPS
        assert _per_step(reading, "tokens") == TOKENS
    told = [[d["code"] for kind, p in rank["without_sampler"] if kind == "diagnosis" for d in p["diagnoses"]]
            for rank in two_ranks]  # fmt: skip
    assert [codes.count("duplicate_data") for codes in told] == [1, 1]
    told = [kind for rank in two_ranks for kind, _ in rank["tensor_parallel_mlp"] + rank["data_parallel"]]
    assert "diagnosis" not in told


def test_a_pipelines_first_window_holds_the_model_alone(two_ranks: list[dict[str, Any]]) -> None:
    """Before its first step torch runs one micro-batch through the stages, to learn shapes."""
    readings = [[payload for kind, payload in rank["_pipeline"] if kind == "reading"] for rank in two_ranks]
    for first, *_, last in readings:
        assert _per_step(first, "model_flops") == _per_step(last, "model_flops") == MODEL_FLOPS
        assert _per_step(last, "tokens") == TOKENS
        assert last["window"]["world_repeats_known"] is True
    records = [[payload for kind, payload in rank["_pipeline"] if kind == "record"] for rank in two_ranks]
    assert [[r["is_provisional"] for r in rank[:3]] for rank in records] == [[True, False, False]] * 2
    others = [[sum(op["totals"]["other_flops"] for op in r["ops"]) for r in rank[:2]] for rank in records]
    # The first stage: one layer forward on one sequence. The last one: its backward to the input as well.
    assert others[0] == [(PROJECTIONS + ATTENTION + MLP) // LAYERS // SEQUENCES, 0]
    assert others[1][0] > others[0][0]
    assert others[1][1] == 0


def test_noise_of_each_ranks_own_leaves_an_upper_bound(two_ranks: list[dict[str, Any]]) -> None:
    for reading in _last_readings(two_ranks, with_dropout):
        assert reading["exactness"].startswith("upper_bound")
        assert _per_step(reading, "model_flops") == 2 * MODEL_FLOPS


def test_four_ranks_sharded_and_tensor_parallel_say_the_models_own(tmp_path: Path) -> None:
    """Two tensor-parallel pairs with half of the sequences each; in a pair all but the MLPs runs on both ranks."""
    for reading in _last_readings(_ranks(4, tmp_path), sharded_and_tensor_parallel):
        assert _per_step(reading, "model_flops") == MODEL_FLOPS
        assert _per_step(reading, "repeated_flops") == 3 * (PROJECTIONS + ATTENTION + HEAD)
        assert _per_step(reading, "tokens") == TOKENS
        assert reading["window"]["world_repeats_known"] is True
