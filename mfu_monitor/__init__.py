"""How well is the training hardware really used: exact MFU and HFU, live."""

__version__ = "0.1.0"
