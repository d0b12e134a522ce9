"""Importing is light, and what is missing is named when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OPTIONAL = ("lightning", "pytorch_lightning", "transformers", "matplotlib", "fvcore", "tensorboard", "pynvml", "scipy")


def run(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["mfu_monitor", "mfu_monitor.callbacks", "mfu_monitor.cli"])
def test_importing_pulls_in_no_optional_package(module: str) -> None:
    loaded = json.loads(run(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"))
    assert [name for name in OPTIONAL if name in loaded] == []


WITHOUT = "import sys; sys.modules.update(dict.fromkeys(({names}), None)); import mfu_monitor.callbacks as c\n"


@pytest.mark.parametrize(
    ("name", "missing", "install"),
    [
        ("MFUMonitor", "'lightning', 'pytorch_lightning'", "mfu-monitor[lightning]"),
        ("MFUCallback", "'transformers',", "mfu-monitor[transformers]"),
    ],
)
def test_a_missing_framework_is_named_with_the_command_that_installs_it(name: str, missing: str, install: str) -> None:
    code = WITHOUT.format(names=missing) + f"try:\n    c.{name}\nexcept ImportError as e:\n    print(e)"
    message = run(code)
    assert name in message
    assert f"pip install '{install}'" in message


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    code = "import mfu_monitor.callbacks as c\ntry:\n    c.MfuMonitor\nexcept AttributeError as e:\n    print(e)"
    message = run(code)
    assert "MfuMonitor" in message
    assert "MFUMonitor" in message
    assert run("import mfu_monitor.callbacks as c; print(hasattr(c, 'nothing'))").strip() == "False"
