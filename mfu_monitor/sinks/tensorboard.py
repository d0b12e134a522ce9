"""TensorBoard: scalars, one chart with MFU and HFU together, and text cards."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.metric_names import brief
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.card import CardMaker

__all__ = ["CUSTOM_SCALARS_LAYOUT", "TensorBoardSink"]


def _multiline(*tags: str) -> list[Any]:
    # The custom-scalars plugin takes regular expressions: an exact tag needs escaping and an end anchor, or
    # "utilization/mfu" would draw "utilization/mfu_weighted" too.
    return ["Multiline", [f"{re.escape(tag)}$" for tag in tags]]


CUSTOM_SCALARS_LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Hardware utilization": {
        "MFU and HFU (fraction of the dense peak)": _multiline("utilization/mfu", "utilization/hfu"),
        "Step time and its parts (s)": _multiline(
            "step_time/total_s",
            "step_time/data_wait_s",
            "step_time/forward_s",
            "step_time/backward_s",
            "step_time/optimizer_s",
            "step_time/other_s",
        ),
        "FLOPs per step": _multiline("flops_per_step/model", "flops_per_step/hardware", "flops_per_step/recompute"),
    }
}
"""For ``SummaryWriter.add_custom_scalars``: one category with three charts in the CUSTOM SCALARS tab."""


class TensorBoardSink:
    """Writes events to a ``torch.utils.tensorboard.SummaryWriter``, which stays the caller's to close.

    Metrics become scalars; the text of diagnoses and alerts goes to the TEXT tab, and with it two cards that say what a
    step ran, against which peak, and what was left uncounted: at the first counted step and at the end.

    Args:
        experiment: the writer; a Lightning ``TensorBoardLogger`` has it as ``.experiment``. Or the path of a folder:
            then the sink makes a writer of its own and closes it.
        scalars: write the metrics too. False where another path (Lightning's loggers) writes them already.
        detail: ``"brief"`` writes at most 15 scalars, ``"full"`` all of them.
        layout: write the custom-scalars layout with the first event. TensorBoard uses one layout a run: False keeps
            a layout of your own.

    Example:
        >>> monitor = mm.Monitor(model, sinks=[TensorBoardSink(SummaryWriter("runs/a"))])

    Raises:
        ConfigurationError: a path was given, and TensorBoard is not installed or the folder cannot be written.
    """

    shows_figures = True

    def __init__(self, experiment: Any, *, scalars: bool = True, layout: bool = True, detail: str = "brief") -> None:
        self._is_own = isinstance(experiment, str | os.PathLike)
        self._experiment = _writer(os.fspath(experiment)) if self._is_own else experiment
        self._scalars = scalars
        self._is_brief = detail == "brief"
        self._layout_due = layout
        self._cards = CardMaker()

    def emit(self, event: Event) -> None:
        """Write the event's scalars and text at the event's own step."""
        if self._layout_due:
            self._layout_due = False
            self._experiment.add_custom_scalars(CUSTOM_SCALARS_LAYOUT)
        if self._scalars:
            for name, value in self.shown(event.metrics).items():
                self._experiment.add_scalar(name, value, event.step)
        for tag, figure in event.figures.items():
            self._experiment.add_figure(tag, figure, event.step, close=False)  # it was never pyplot's
        self._write_text(event)
        self._write_text(self._cards.take(event))

    def shown(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics that this TensorBoard shows."""
        return brief(metrics) if self._is_brief else dict(metrics)

    def close(self) -> None:
        """Write the final card and what is buffered."""
        self._write_text(self._cards.final())
        self._experiment.flush()
        if self._is_own:
            self._experiment.close()  # a later event opens a new file in the same folder

    def _write_text(self, event: Event | None) -> None:
        if event is not None and event.text:
            self._experiment.add_text(f"mfu_monitor/{event.title or event.kind}", event.text, event.step)


def _writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(folder)
    except ImportError as error:
        raise ConfigurationError(
            f"tensorboard={folder!r} needs the package tensorboard, which cannot be imported ({error}). Run: "
            "pip install tensorboard"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"tensorboard={folder!r} cannot be written ({error}). Give a folder where this process may write, for "
            "example tensorboard='runs/a'."
        ) from error
