"""Where readings go: console, TensorBoard or JSON lines."""

from mfu_monitor.sinks.base import Event, Sink
from mfu_monitor.sinks.card import CardMaker, text_card
from mfu_monitor.sinks.console import ConsoleSink
from mfu_monitor.sinks.jsonl import JsonlRun, JsonlSink, read_jsonl
from mfu_monitor.sinks.tensorboard import TensorBoardSink

__all__ = [
    "CardMaker",
    "ConsoleSink",
    "Event",
    "JsonlRun",
    "JsonlSink",
    "Sink",
    "TensorBoardSink",
    "read_jsonl",
    "text_card",
]
