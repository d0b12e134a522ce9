"""Several monitors in one trainer, and one after another: each has its own state, and nothing stays behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mfu_monitor.callbacks import MFUMonitor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Trainer:
    """Something with a method."""

    def save(self, path: str) -> str:
        return f"saved {path}"


def weights(module: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def test_two_monitors_in_one_trainer_leave_it_as_it_was(lightning_run: Any) -> None:
    def fit(*callbacks: Any) -> Any:
        torch.manual_seed(0)
        module, trainer = lightning_run.module(), lightning_run.trainer(*callbacks, max_epochs=2)
        trainer.fit(module, lightning_run.loader())
        owners = (trainer, trainer.strategy, trainer.fit_loop.epoch_loop)
        return weights(module), [sorted(vars(owner)) for owner in owners]

    plain, left = fit()
    pair = (MFUMonitor(peak=1e12), MFUMonitor(peak=1e12, convention="palm"))
    assert len({monitor.state_key for monitor in pair}) == 2
    watched, ours = fit(*pair)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert ours == left
    assert [monitor.monitor.totals["steps"] for monitor in pair] == [12, 12]


def test_a_monitor_that_is_made_while_another_waits_still_takes_its_state(lightning_run: Any, tmp_path: Any) -> None:
    gc.collect()
    first = MFUMonitor(peak=1e12)
    trainer = lightning_run.trainer(first)
    trainer.fit(lightning_run.module(), lightning_run.loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    waiting, second = MFUMonitor(peak=1e12), MFUMonitor(peak=1e12)
    assert second.state_key not in (waiting.state_key, first.state_key)
    trainer = lightning_run.trainer(second, max_epochs=2)
    trainer.fit(lightning_run.module(), lightning_run.loader(), ckpt_path=tmp_path / "a.ckpt")
    assert second.monitor is not None
    assert second.monitor.totals["steps"] == 12


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_wraps_taken_away_in_any_order_leave_no_layer(order: tuple[int, ...]) -> None:
    from mfu_monitor.internals.patches import Wrap

    trainer, seen = Trainer(), []

    def around(name: int) -> Any:
        def inside(call: Any, path: str) -> Any:
            seen.append(name)
            return call(path)

        return inside

    wraps = [Wrap(trainer, "save", around(number)) for number in range(3)]
    for wrap in wraps:
        wrap.attach()
        wrap.attach()  # as after an attempt that was cut short
    assert trainer.save("a") == "saved a"
    assert sorted(seen) == [0, 1, 2]
    for number in order:
        seen.clear()
        wraps[number].detach()
        wraps[number].detach()
        assert trainer.save("b") == "saved b"
        assert number not in seen
    assert vars(trainer) == {}
