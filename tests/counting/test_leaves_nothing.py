"""A counter as a guest of torch: modes, classes and copies are as without it, in whatever order things end."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import mfu_monitor as mm
from mfu_monitor.counting.compiled import watch
from mfu_monitor.counting.storages import Storages
from mfu_monitor.formulas.registry import register_module_formula, unregister_module_formula

pytestmark = pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning")
CALL = CompiledFxGraph.__call__
F = 2 * 4 * 8 * 8


class Opaque(nn.Linear):
    """A layer with a formula of its own."""


class UsersMode(TorchDispatchMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def left() -> list[str]:
    """What is still installed."""
    names = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    names += ["CompiledFxGraph"] if CompiledFxGraph.__call__ is not CALL else []
    return names + (["Opaque"] if "__call__" in vars(Opaque) else [])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert left() == []


@pytest.fixture
def opaque() -> Iterator[nn.Module]:
    register_module_formula(Opaque)(lambda module, x: 2 * x.numel() * module.out_features)
    yield nn.Sequential(Opaque(8, 8))
    unregister_module_formula(Opaque)


def run(model: nn.Module) -> None:
    model(torch.ones(4, 8)).sum().backward()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_counters_that_end_in_any_order_each_see_their_own_part(order: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    counters = [mm.FlopCounter(model) for _ in order]
    for counter in counters:
        counter.__enter__()
    for place in order:
        run(model)  # forward and the weight's gradient
        counters[place].__exit__(None, None, None)
    assert [counters[place].record.model_flops for place in order] == [2 * F, 4 * F, 6 * F]


def test_a_users_mode_entered_in_the_block_stays_and_goes_on_seeing() -> None:
    model, mode, counter = nn.Linear(8, 8), UsersMode(), mm.FlopCounter()
    counter.__enter__()
    mode.__enter__()
    run(model)
    counter.__exit__(None, None, None)
    assert left() == ["UsersMode"]
    before = mode.seen
    torch.ones(2).add(1)
    assert mode.seen == before + 2
    mode.__exit__(None, None, None)


def test_a_users_mode_left_in_the_block_takes_ours_off_and_the_count_says_so() -> None:
    model, mode, counter = nn.Linear(8, 8), UsersMode(), mm.FlopCounter()
    mode.__enter__()
    counter.__enter__()
    mode.__exit__(None, None, None)  # torch takes off what lies on top
    run(model)
    counter.__exit__(None, None, None)
    assert counter.record.is_lower_bound
    assert any("dispatch mode was not where it was put" in note for note in counter.record.notes)


def test_a_step_that_is_never_ended_or_a_generator_that_is_dropped_leaves_nothing() -> None:
    model = nn.Linear(8, 8)

    def steps() -> Iterator[None]:
        monitor = mm.Monitor(model, console=False)
        with monitor.step(torch.ones(4, 8)):
            yield

    generator = steps()
    next(generator)
    with UsersMode() as mode:
        del generator
        gc.collect()
        before = mode.seen
        torch.ones(2)
        assert mode.seen == before + 1
    monitor = mm.Monitor(model, console=False)
    monitor.begin_step(torch.ones(4, 8))
    del monitor
    gc.collect()


def test_a_step_ended_on_another_thread_is_a_bound_and_its_mode_goes_when_the_thread_comes_back() -> None:
    model = nn.Linear(8, 8)
    counter, ended, seen = mm.FlopCounter(model), threading.Event(), []
    began = threading.Event()

    def work() -> None:
        counter.__enter__()
        run(model)
        began.set()
        ended.wait()
        run(model)  # passed on, and not counted
        with mm.FlopCounter(model):
            pass
        seen.append(left())

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    counter.__exit__(None, None, None)
    ended.set()
    thread.join()
    assert seen == [[]]
    assert counter.record.model_flops == 2 * F
    assert counter.record.is_lower_bound


def test_steps_of_two_threads_at_once_leave_nothing_and_are_told_apart() -> None:
    model = nn.Linear(8, 8)
    monitor = mm.Monitor(model, console=False, count="every_step")
    stacks: list[Any] = []

    def loop() -> None:
        for _ in range(20):
            with monitor.step(torch.ones(4, 8)):
                run(model)
        stacks.append(left())

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.close()
    assert all("CountingMode" not in names for names in stacks)
    assert {record.model_flops for record in monitor.records.values()} == {2 * F}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_in_the_block_is_free_of_it() -> None:
    with mm.FlopCounter(nn.Linear(8, 8)) as counter:
        pid = os.fork()
        if not pid:
            os._exit(len(left()))
        assert os.waitpid(pid, 0)[1] == 0
        run(nn.Linear(8, 8))
    assert counter.record.model_flops == 2 * F


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: torch.save(model, io.BytesIO())])
def test_a_model_is_copied_and_saved_in_the_block_as_without_us(opaque: nn.Module, copied: Any) -> None:
    with mm.FlopCounter(opaque) as counter:
        run(opaque)
        twin = copied(opaque)
        assert not any(module._forward_hooks for module in opaque.modules())
        if twin is not None:
            assert vars(twin[0]).keys() == vars(opaque[0]).keys()
    # Data and weight: the forward, and one gradient of the weight.
    assert counter.record.model_flops == 2 * F


def test_a_counter_copied_in_its_block_is_idle() -> None:
    model = nn.Linear(8, 8)
    with mm.FlopCounter(model) as counter:
        run(model)
        twin = copy.deepcopy(counter)
    assert twin.record.model_flops == 0
    with twin:
        pass
    assert counter.record.model_flops == 2 * F


def test_a_copy_of_what_is_known_of_storages_frees_nothing_twice() -> None:
    known = Storages()
    tensor = torch.ones(3)
    known.of(tensor).writes = 1
    for _ in range(50):
        twin = copy.deepcopy(known)
        assert len(twin) == 0
        del twin
    assert known.of(tensor).writes == 1
    gc.collect()
    assert tensor.sum() == 3


def test_a_class_with_a_call_of_its_own_gets_it_back() -> None:
    class Own(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    own = vars(Own)["__call__"]
    register_module_formula(Own)(lambda module, x: 2 * x.numel() * module.out_features)
    try:
        model = nn.Sequential(Own(8, 8))
        with mm.FlopCounter(model) as counter:
            run(model)
        assert counter.record.model_flops == 2 * F
        assert vars(Own)["__call__"] is own
    finally:
        unregister_module_formula(Own)


def test_counters_that_end_in_any_order_leave_the_compilers_stance_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stances = ["default"]

    class Stance:
        def __init__(self, name: str) -> None:
            self._before = stances[-1]
            stances.append(name)

        def __exit__(self, *_: object) -> None:
            stances.append(self._before)

    monkeypatch.setattr(watch, "guards_notice_modes", lambda: True)
    monkeypatch.setattr(torch.compiler, "set_stance", Stance)
    first, second = mm.FlopCounter(), mm.FlopCounter()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert stances[-1] == "force_eager"
    second.__exit__(None, None, None)
    second._installed.leave()
    assert stances == ["default", "force_eager", "default"]
