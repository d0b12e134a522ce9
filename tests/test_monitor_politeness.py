"""The monitor as a guest in a training run: what a replayed step does, what stays behind, and what changes."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mfu_monitor as mm
from mfu_monitor.counting.compiled.watch import guards_notice_modes
from mfu_monitor.timing.clock import CudaEventClock

approx: Any = pytest.approx

PEAK = 1000.0
"""FLOP/s, so that the fake record of 600 model and 700 hardware FLOPs in a second gives 0.6 and 0.7."""
pytestmark = pytest.mark.filterwarnings("ignore:.*less than a megaflop.*")


Bench = Any
"""The fixture ``bench`` of conftest.py: a monitor on fake parts, and a loop for it."""


class _BrokenError(RuntimeError):
    pass


def _broken(*_: Any, **__: Any) -> Any:
    raise _BrokenError("on purpose")


class TestReplayedStep:
    """No tensor work, nothing installed, no wait."""

    def test_nothing_waits_and_nothing_is_read_from_a_tensor(
        self, bench: Bench, fake_device: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monitor = bench.monitor(clock=CudaEventClock("cuda", event_factory=fake_device.event), log_every_n_steps=4)
        ids = torch.zeros(2, 8, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        for _ in range(3):
            bench.run(monitor, 1, batch=batch)
        called: list[str] = []
        for owner, names in (
            (torch.Tensor, ("item", "cpu", "tolist", "numpy", "sum", "__bool__", "__int__")),
            (torch.cuda, ("synchronize", "current_stream")),
        ):
            for name in names:
                monkeypatch.setattr(owner, name, lambda *_, name=name, **__: called.append(name))
        with _NoDispatch() as dispatched:
            for _ in range(20):
                bench.run(monitor, 1, batch=batch)
                fake_device.advance(0.01)
                fake_device.catch_up()
        assert called == []
        assert dispatched.operators == []
        assert fake_device.waits == []
        assert len(bench.sink.of_kind("reading")) == 5

    def test_a_reading_known_late_is_logged_at_its_windows_step(self, bench: Bench, fake_device: Any) -> None:
        monitor = bench.monitor(clock=CudaEventClock("cuda", event_factory=fake_device.event), log_every_n_steps=2)
        for step in range(5):
            with monitor.step(torch.zeros(2, 8, dtype=torch.long)):
                fake_device.advance(0.5)
            assert step == 4 or not bench.sink.of_kind("reading")
            if step == 3:
                fake_device.catch_up()
        assert [event.step for event in bench.sink.of_kind("reading")] == [1, 3]
        late = bench.sink.of_kind("reading")[0]
        assert late.payload["window"]["elapsed_s"] == approx(0.5)

    def test_it_takes_few_calls(self, bench: Bench) -> None:
        monitor = mm.Monitor(nn.Linear(4, 4), peak=1e12, max_overhead=0.0)
        batch = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
        calls: list[str] = []
        for _ in range(3):
            with monitor.step(batch):
                pass
        sys.setprofile(lambda frame, event, arg: calls.append(event) if event in ("call", "c_call") else None)
        try:
            monitor.begin_step(batch)
            monitor.end_step()
        finally:
            sys.setprofile(None)
        # About 80 calls took 11 µs on one core; a hundred and fifty would be 20 µs, a thousandth of a step of 20 ms.
        assert len(calls) < 150

    def test_no_hook_and_no_mode_is_there_during_a_replayed_step(self, bench: Bench) -> None:
        model = nn.Linear(4, 4)
        monitor = mm.Monitor(model, peak=1e12, max_overhead=0.0)
        x = torch.randn(2, 4)
        for _ in range(2):
            with monitor.step(x):
                model(x)
        before = _installed()
        with monitor.step(x):
            assert _installed() == before
        assert before["modes"] == 0
        assert before["module hooks"] == 0


class _NoDispatch(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every operator that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "zeros" not in str(func):  # the loop's own batch
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def _installed() -> dict[str, int]:
    module = torch.nn.modules.module
    return {
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "module hooks": sum(
            len(getattr(module, name))
            for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
        ),
    }


class _Block(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.first, self.dropout, self.second = nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8)

    def _body(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, x + self.second(self.dropout(torch.relu(self.first(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_checkpointed:
            return self._body(x)
        return cast(torch.Tensor, checkpoint(self._body, x, use_reentrant=False))


def _train(is_checkpointed: bool, make_monitor: Callable[[nn.Module], mm.Monitor] | None) -> list[Any]:
    """Fifty steps; everything that must not depend on the monitor."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(*[_Block(is_checkpointed) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = None if make_monitor is None else make_monitor(model)
    losses = []
    for _ in range(50):
        x = torch.randn(4, 8)
        if monitor is not None:
            monitor.begin_step(x)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.end_step(optimizer_step=True)
        losses.append(loss.detach())
    if monitor is not None:
        monitor.close()
        assert monitor.reading is not None
    state = model.state_dict()
    return [losses, list(state), list(state.values()), torch.get_rng_state(), random.getstate(), np.random.get_state()]


class TestTrainingIsUnchanged:
    """Bit for bit, with the real counter, on the loop above."""

    @pytest.mark.parametrize("is_checkpointed", [False, True])
    @pytest.mark.parametrize("options", [{}, {"count": "every_step"}, {"max_overhead": 0.5}])
    def test_losses_weights_and_random_numbers_are_equal(self, is_checkpointed: bool, options: Any) -> None:
        plain = _train(is_checkpointed, None)
        monitored = _train(is_checkpointed, lambda model: mm.Monitor(model, log_every_n_steps=7, peak=1e9, **options))
        assert all(torch.equal(a, b) for a, b in zip(plain[0], monitored[0], strict=True))
        assert plain[1] == monitored[1]
        assert all(torch.equal(a, b) for a, b in zip(plain[2], monitored[2], strict=True))
        assert torch.equal(plain[3], monitored[3])
        assert plain[4] == monitored[4]
        assert all(np.array_equal(a, b) for a, b in zip(plain[5], monitored[5], strict=True))

    def test_the_same_holds_while_stages_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = _train(True, None)
        monkeypatch.setattr("mfu_monitor.timing.window.WindowBuilder.resolved", _broken)
        monkeypatch.setattr("mfu_monitor.steps.step_counter.batch_signature", _broken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make = lambda model: _WithReading(model, log_every_n_steps=7, peak=1e9)  # noqa: E731
            monitored = _train(True, make)
        assert all(torch.equal(a, b) for a, b in zip(plain[0], monitored[0], strict=True))
        assert torch.equal(plain[3], monitored[3])

    def test_probes_run_again_when_training_goes_on_after_the_end(self) -> None:
        callbacks = len(gc.callbacks)
        monitor = mm.Monitor(peak=1e12)
        for _ in range(2):
            with monitor.step(torch.zeros(2, 2)):
                assert len(gc.callbacks) == callbacks + 1
            monitor.close()
            assert len(gc.callbacks) == callbacks

    @pytest.mark.parametrize("is_ended_by_the_next_step", [False, True])
    def test_a_validation_hides_no_collection_of_the_steps_around_it(self, is_ended_by_the_next_step: bool) -> None:
        """Two collections in steps and one in the pause between them: the window has those of its steps."""
        monitor = mm.Monitor(peak=1e12, log_every_n_steps=3, max_overhead=0.0)
        seconds: list[float] = []

        def step() -> float:
            with monitor.step(torch.zeros(2, 2)):
                assert monitor._windows._probes is not None
                meter = monitor._windows._probes._gc
                before_s = meter.seconds
                gc.collect()
                return meter.seconds - before_s

        for _ in range(3):
            step()  # the first one is counted and leaves the window's figures out
        seconds += [step(), step()]
        monitor.pause("validation")
        gc.collect()
        if not is_ended_by_the_next_step:
            monitor.resume("validation")
        seconds.append(step())
        monitor.close()
        assert monitor.reading is not None
        assert monitor.reading.window.steps == 3
        assert monitor.reading.window.gc_pause_s == pytest.approx(sum(seconds), rel=0.2)

    @pytest.mark.parametrize("ending", ["end", "error", "dropped"])
    def test_nothing_stays_behind(self, ending: str) -> None:
        gc.collect()  # monitors that earlier tests dropped
        gc.collect()  # monitors that other tests dropped
        callbacks, before = len(gc.callbacks), _installed()
        model = nn.Linear(4, 4)
        keys, buffers = list(model.state_dict()), list(model.buffers())
        monitor = mm.Monitor(model, peak=1e12)
        try:
            for step in range(3):
                with monitor.step(torch.randn(2, 4)):
                    model(torch.randn(2, 4)).sum().backward()
                    if ending == "error" and step == 0:
                        raise _BrokenError
        except _BrokenError:
            pass
        if ending == "end":
            monitor.close()
        if ending == "dropped":
            del monitor
            gc.collect()
        assert len(gc.callbacks) == callbacks
        assert _installed() == before
        assert (list(model.state_dict()), list(model.buffers())) == (keys, buffers)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


class _WithReading(mm.Monitor):
    """For a loop that asks for a reading at the end, on a monitor that cannot have one."""

    reading = object()  # type: ignore[assignment]


def test_a_compiled_model_stays_compiled_and_its_compile_steps_are_left_out() -> None:
    torch._dynamo.reset()
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    monitor = mm.Monitor(model, peak=1e12, log_every_n_steps=8, max_overhead=0.0)
    for rows in (2, 2, 2, 2, 3, 3, 3, 3):
        x = torch.randn(rows, 4)
        with monitor.step(x):
            compiled(x).sum().backward()
    assert len(runs) == (6 if guards_notice_modes() else 8)  # before torch 2.10 the two counted steps run in eager
    assert monitor.reading is not None
    window = monitor.reading.window
    assert window.recompiles == 1
    assert window.steps == 8 - 2 * 2  # each shape: one step that compiled, one counted once it had settled
    assert window.model_flops == 2 * (2 * 2 * 2 * 4 * 4) + 2 * (2 * 2 * 3 * 4 * 4)  # forward and weight gradient


@pytest.fixture(autouse=True)
def _no_lightning_is_imported() -> Iterator[None]:
    had = "lightning" in sys.modules
    yield
    assert ("lightning" in sys.modules) == had
