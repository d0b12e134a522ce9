"""The command line, ``mfu-monitor``: one file a command, each with a ``register(app)``."""

from __future__ import annotations

import importlib
import sys

import typer

from mfu_monitor.errors import ConfigurationError

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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; wrong input goes to stderr with exit code 2."""
    try:
        build_app()(args=arguments)
    except ConfigurationError as error:
        print(f"mfu-monitor: {error}", file=sys.stderr)
        raise SystemExit(2) from None
