"""One typed reader of logs, our own and other people's: a file or directory to columns whose meaning is known."""

from mfu_monitor.logs.columns import Column, Overrides
from mfu_monitor.logs.read import Log, read_log

__all__ = ["Column", "Log", "Overrides", "read_log"]
