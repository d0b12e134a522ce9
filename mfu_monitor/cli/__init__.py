"""The command line, ``mfu-monitor``: one file per command, each with a ``register(app)``."""

from __future__ import annotations

import importlib
import sys
import traceback

import typer

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.sinks.console import printable

__all__ = ["build_app", "main"]

COMMAND_MODULES = (
    "peaks_command",
    "bench_command",
    "count_command",
    "estimate_command",
    "roofline_command",
    "audit.audit_command",
    "report.report_command",
)


def build_app() -> typer.Typer:
    """The application with every command registered."""
    app = typer.Typer(
        name="mfu-monitor",
        help="How well is the hardware really used? Peaks, counts, estimates, audits and reports.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _root() -> None:
        """Keep commands as sub-commands even where only one is registered."""

    for name in COMMAND_MODULES:
        importlib.import_module(f"{__name__}.{name}").register(app)
    return app


EXIT_BAD_INPUT = 2
EXIT_CRASHED = 70
"""EX_SOFTWARE of sysexits.h: a fault of ours must not look like a verdict of ``audit``."""
EXIT_PIPE_CLOSED = 141
"""128 + SIGPIPE, as a shell has it."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; wrong input goes to stderr with exit code 2, and a crash has a code of its own."""
    try:
        build_app()(args=arguments)
    except ConfigurationError as error:
        print(f"mfu-monitor: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # click and rich end with 1 then
            raise SystemExit(EXIT_PIPE_CLOSED) from None
        raise
    except Exception:  # noqa: BLE001  # the traceback is for whoever reports it
        traceback.print_exc()
        raise SystemExit(EXIT_CRASHED) from None
