"""Exceptions and warning categories.

Every message says what was seen, what was expected, the likely cause and the next action.
"""

__all__ = [
    "ConfigurationError",
    "ImpossibleReadingError",
    "ImpossibleReadingWarning",
    "MFUMonitorError",
    "MFUMonitorWarning",
    "PeakUnknownWarning",
    "StageDisabledWarning",
    "UncountedWorkWarning",
]


class MFUMonitorError(Exception):
    """Base of every exception that this library raises on purpose."""


class ConfigurationError(MFUMonitorError, ValueError):
    """An argument of a constructor or a command is wrong; says what was given, what is allowed, and an example."""


class ImpossibleReadingError(MFUMonitorError, RuntimeError):
    """A reading that physics forbids, raised only when the user asked for ``on_impossible="raise"``."""


class MFUMonitorWarning(UserWarning):
    """Base of every warning that this library gives."""


class PeakUnknownWarning(MFUMonitorWarning):
    """No dense peak is known for the device at the precision in use, so no MFU is reported."""


class UncountedWorkWarning(MFUMonitorWarning):
    """Something ran whose FLOPs could not be seen; the figures are lower bounds."""


class ImpossibleReadingWarning(MFUMonitorWarning):
    """A reading cannot be right, or is hard to believe; says what was seen, what fits the evidence, and the fix."""


class StageDisabledWarning(MFUMonitorWarning):
    """A stage of ours failed inside a training run and was turned off; training goes on."""
