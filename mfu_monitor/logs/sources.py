"""From a path to text: plain, compressed or from standard input; what is not text is refused by what it looks like."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import re
import sys
import zlib
from pathlib import Path
from typing import Any

from mfu_monitor.errors import ConfigurationError

__all__ = ["STDIN", "read_text", "without_control"]

STDIN = Path("-")
MOST_BYTES = 1 << 29
"""512 MiB of text, unpacked: the longest public logs have a hundredth of it."""

_SIGNATURES = (
    (b"PAR1", "a Parquet file", "export it as CSV: pandas.read_parquet(file).to_csv('log.csv')"),
    (b"PK\x03\x04", "a zip archive (or a torch checkpoint, or a spreadsheet)", "unpack it and give the log inside"),
    (b"SQLite format 3", "an SQLite database", "export its metrics table as CSV"),
    (b"\x93NUMPY", "a NumPy array", "write its columns as CSV with a header"),
    (b"\x80\x04", "a Python pickle", "write its columns as CSV with a header"),
    (b"\x1f\x9d", "a file of compress (.Z)", "unpack it"),
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def read_text(path: Path) -> str:
    """The text of a log, without colours and control characters; carriage returns of progress bars end lines.

    Args:
        path: a file, plain or packed by gzip, bzip2, xz or (Python 3.14) zstandard; ``-`` is standard input.

    Raises:
        ConfigurationError: it cannot be read, is empty, too large, or no text.

    Example:
        >>> read_text(Path("train.log.gz")).splitlines()[0]
    """
    try:
        with sys.stdin.buffer if path == STDIN else path.open("rb") as file:
            packed = file.read(MOST_BYTES + 1)
        raw = _unpacked(path, packed)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path} cannot be read ({type(error).__name__}: {error}); is it complete?") from None
    if len(raw) > MOST_BYTES:
        raise ConfigurationError(f"{path} holds more than {MOST_BYTES >> 20} MiB; give a part: head -n 100000")
    text = _decoded(path, raw)
    if not text.strip():
        raise ConfigurationError(f"{path} is empty; expected lines of metrics, or a header and a row of numbers")
    return without_control(text)


def without_control(text: str) -> str:
    """Text that commands no terminal: colours and control characters are left out, ``\\r`` ends a line."""
    return _CONTROL.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def _unpacked(path: Path, raw: bytes) -> bytes:
    stream: Any = None
    if raw.startswith(b"\x1f\x8b"):
        stream = gzip.GzipFile(fileobj=io.BytesIO(raw))
    elif raw.startswith(b"BZh"):
        stream = bz2.BZ2File(io.BytesIO(raw))
    elif raw.startswith(b"\xfd7zXZ\x00"):
        stream = lzma.LZMAFile(io.BytesIO(raw))  # noqa: SIM115  # read to its end by the caller
    elif raw.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            stream = importlib.import_module("compression.zstd").ZstdFile(io.BytesIO(raw))
        except ImportError:
            raise ConfigurationError(
                f"{path} is packed by zstandard, which this Python cannot read; zstd -dc {path} | mfu-monitor audit -"
            ) from None
    return raw if stream is None else _whole_or_cut(stream)


def _whole_or_cut(stream: Any) -> bytes:
    """What can be unpacked: the archive of a run that was killed ends early."""
    found = bytearray()
    try:
        while len(found) <= MOST_BYTES and (part := stream.read1(1 << 16)):
            found += part
    except (EOFError, OSError, lzma.LZMAError, zlib.error):
        if not found:
            raise
    return bytes(found)


def _decoded(path: Path, raw: bytes) -> str:
    for signature, what, advice in _SIGNATURES:
        if raw.startswith(signature):
            raise ConfigurationError(f"{path} looks like {what}; {advice}")
    is_wide = raw[:2] in (b"\xff\xfe", b"\xfe\xff") and len(raw) % 2 == 0 and raw.count(0) > len(raw) // 3
    encoding = "utf-16" if is_wide else "utf-8-sig"
    text = raw.decode(encoding, errors="replace")
    damaged = text.count("�") + 20 * text.count("\0")
    if damaged > max(8, len(text) // 100) or (damaged and len(text) < 100):
        raise ConfigurationError(
            f"{path} cannot be read as text: it looks like binary data. Give a console log, CSV, JSON, JSON lines or "
            "Markdown in UTF-8, or the directory of a TensorBoard or MLflow run"
        )
    return text
