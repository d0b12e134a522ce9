"""What a test makes missing is forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mfu_monitor.counting import calls, self_check
from mfu_monitor.internals import dispatcher, facts, stack


def _forget() -> None:
    for cached in (stack.known_codes, dispatcher.is_composite):
        cached.cache_clear()
    calls._operators.clear()


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(facts, "_missing", {})
    monkeypatch.setattr(self_check, "_found", {})
    _forget()
    yield
    _forget()
