"""A command is a dataclass of its options and a function that takes it; a flag is spelled the same in every command."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from mfu_monitor.cli.units import count_parser, format_quantity, fraction_parser, quantity_parser, seconds_parser
from mfu_monitor.errors import ConfigurationError

__all__ = [
    "GPU",
    "JSON",
    "PRECISION",
    "Command",
    "active_parameters",
    "add_command",
    "count",
    "quantity",
    "seconds",
    "share",
]

_Options = TypeVar("_Options")


def quantity(flag: str, text: str, *older: str) -> Any:
    """A positive number with an optional suffix: ``70B``. ``older`` spellings are read and not shown."""
    return typer.Option(flag, *older, parser=quantity_parser(flag), metavar="N", help=text)


def count(flag: str, text: str, *older: str) -> Any:
    """A whole number above zero."""
    return typer.Option(flag, *older, parser=count_parser(flag), metavar="N", help=text)


def share(flag: str, text: str, *, most: float = 1.0) -> Any:
    """A fraction, or a percentage."""
    return typer.Option(flag, parser=fraction_parser(flag, most=most), metavar="X", help=text)


def seconds(flag: str, text: str) -> Any:
    """A time above zero: ``1.25``, ``250ms``."""
    return typer.Option(flag, parser=seconds_parser(flag), metavar="T", help=text)


GPU = Annotated[str | None, typer.Option("--gpu", "--device", help='Such as "H100 SXM"; see `mfu-monitor peaks`.')]
PRECISION = Annotated[str, typer.Option("--precision", "--dtype", help="bf16, fp16, fp8, fp32, tf32, ...")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Command(TyperCommand):
    """Shows the first spelling of each option; older ones are still read, so that scripts keep working."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Click's own, without the older spellings."""
        all_spellings = {id(param): param.opts for param in self.params}
        for param in self.params:
            long = [name for name in param.opts if name.startswith("--")]
            param.opts = [name for name in param.opts if name not in long[1:]]
        super().format_help(ctx, formatter)
        for param in self.params:
            param.opts = all_spellings[id(param)]


def add_command(
    app: typer.Typer, name: str, options: Callable[..., _Options], run: Callable[[_Options], None], help: str = ""
) -> None:
    """Register ``run`` as a command whose arguments and options are the fields of the dataclass ``options``.

    Args:
        app: application or group.
        name: of the command.
        options: a keyword-only dataclass; annotations as typer has them.
        run: what is to be done; its docstring is the command's help.
        help: in place of that docstring.

    Example:
        >>> add_command(app, "audit", AuditOptions, _audit)
    """
    hints = get_type_hints(options, include_extras=True)

    def command(**given: Any) -> None:
        run(options(**given))

    command.__doc__ = help or run.__doc__
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[f.name], default=_default(f))
            for f in dataclasses.fields(options)  # type: ignore[arg-type]
        ]
    )
    app.command(name, cls=Command)(command)


def _default(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def active_parameters(params: float | None, active: float | None) -> float | None:
    """Those that work on a token: the active ones of a mixture of experts, else all.

    Raises:
        ConfigurationError: more active ones than there are.
    """
    if params is not None and active is not None and active > params:
        raise ConfigurationError(
            f"--active-params is {format_quantity(active)} of --params {format_quantity(params)}; expected at most as "
            "many: those that work on each token"
        )
    return active or params
