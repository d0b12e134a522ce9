"""Where readings go: console, TensorBoard, JSON lines, several at once, or nowhere."""

from mfu_monitor.sinks.base import Event, Sink
from mfu_monitor.sinks.card import CardMaker, text_card
from mfu_monitor.sinks.console import ConsoleSink
from mfu_monitor.sinks.fanout import FanOutSink
from mfu_monitor.sinks.jsonl import JsonlRun, JsonlSink, read_jsonl
from mfu_monitor.sinks.null import NullSink
from mfu_monitor.sinks.tensorboard import TensorBoardSink

__all__ = [
    "CardMaker",
    "ConsoleSink",
    "Event",
    "FanOutSink",
    "JsonlRun",
    "JsonlSink",
    "NullSink",
    "Sink",
    "TensorBoardSink",
    "read_jsonl",
    "text_card",
]
