"""A failing adapter is turned off, and a wrapped method comes back."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from mfu_monitor.callbacks._patch import wrap_method
from mfu_monitor.errors import Guarded, ImpossibleReadingError, StageDisabledWarning, guarded_hook


class Adapter(Guarded):
    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.calls, self.released = error, 0, 0

    @guarded_hook
    def hook(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error

    def _release(self) -> None:
        self.released += 1


class Trainer:
    def save(self, path: str) -> str:
        if not path:
            raise OSError("no path")
        return f"saved {path}"


def test_the_first_failure_turns_the_adapter_off_with_one_warning_that_carries_the_traceback() -> None:
    adapter = Adapter(ZeroDivisionError("in a hook of ours"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            adapter.hook()
    (warning,) = caught
    assert warning.category is StageDisabledWarning
    assert "Adapter failed in hook and is turned off" in str(warning.message)
    assert "ZeroDivisionError: in a hook of ours" in str(warning.message)
    assert (adapter.calls, adapter.released) == (1, 1)


def test_an_adapter_that_does_not_fail_stays_on_and_warns_of_nothing() -> None:
    adapter = Adapter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.hook()
        adapter.hook()
    assert (adapter.calls, adapter.released) == (2, 0)


def test_a_failure_raises_nothing_even_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Adapter(ZeroDivisionError()).hook()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), ImpossibleReadingError("asked for")])
def test_ctrl_c_exit_and_what_the_user_asked_to_raise_pass(error: BaseException) -> None:
    with pytest.raises(type(error)):
        Adapter(error).hook()


def test_a_clean_up_that_fails_too_is_told_in_the_same_warning() -> None:
    class Worse(Adapter):
        def _release(self) -> None:
            raise RuntimeError("cannot let go")

    with pytest.warns(StageDisabledWarning, match="(?s)ValueError: first.*could not clean up: .*cannot let go"):
        Worse(ValueError("first")).hook()


def tracing(seen: list[str]) -> Any:
    @contextlib.contextmanager
    def around(path: str) -> Iterator[None]:
        seen.append(f"before {path}")
        try:
            yield
        finally:
            seen.append("after")

    return around


def test_a_wrapped_method_runs_inside_the_context_and_keeps_its_result() -> None:
    trainer = Trainer()
    seen: list[str] = []
    wrap_method(trainer, "save", tracing(seen))
    assert trainer.save("a") == "saved a"
    assert seen == ["before a", "after"]


def test_an_exception_of_the_method_passes_through_the_context() -> None:
    trainer = Trainer()
    seen: list[str] = []
    wrap_method(trainer, "save", tracing(seen))
    with pytest.raises(OSError, match="no path"):
        trainer.save("")
    assert seen == ["before ", "after"]


def test_restoring_leaves_the_object_as_it_was() -> None:
    trainer = Trainer()
    seen: list[str] = []
    before = dict(trainer.__dict__)
    wrap_method(trainer, "save", tracing(seen))()
    assert trainer.__dict__ == before
    assert trainer.save("a") == "saved a"
    assert seen == []


def test_a_wrapper_of_the_users_from_before_comes_back() -> None:
    trainer = Trainer()
    mine = lambda path: f"mine {path}"  # noqa: E731
    trainer.save = mine  # type: ignore[method-assign]
    wrap_method(trainer, "save", tracing([]))()
    assert trainer.save is mine


def test_a_wrapper_of_the_users_from_later_stays_and_ours_below_it_falls_silent() -> None:
    trainer = Trainer()
    seen: list[str] = []
    restore = wrap_method(trainer, "save", tracing(seen))
    ours = trainer.save
    trainer.save = lambda path: ours(path).upper()  # type: ignore[method-assign]
    restore()
    assert trainer.save("a") == "SAVED A"
    assert seen == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_of_the_object_has_its_own_method_and_no_wrapper(copied: Any) -> None:
    trainer = Trainer()
    seen: list[str] = []
    wrap_method(trainer, "save", tracing(seen))
    other = copied(trainer)
    assert other.save("a") == "saved a"
    assert other.save.__self__ is other
    assert seen == []
    assert trainer.save("b") == "saved b"
    assert seen == ["before b", "after"]
