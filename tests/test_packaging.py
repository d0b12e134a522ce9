"""What a user installs: the built wheel, beside a ``callbacks.py`` of the user's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("mfu_monitor", "callbacks", "configs", "docs", "examples", "tests")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built from a copy so that the tree stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel laid out as in site-packages."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run(code: str, *, cwd: Path, site: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_listed_packages_are_the_directories_that_exist() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in (ROOT / "mfu_monitor").rglob("*.py")}
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    nested = {path.parent.relative_to(ROOT / "callbacks").parts for path in (ROOT / "callbacks").rglob("*.py")}
    expected |= {".".join(("mfu_monitor", "callbacks", *parts)) for parts in nested}
    assert sorted(listed) == sorted(expected)


def test_the_wheel_holds_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mfu_monitor"}


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    wanted = {
        *(str(p.relative_to(ROOT)) for p in (ROOT / "mfu_monitor").rglob("*") if p.suffix in (".py", ".csv", ".typed")),
        *(f"mfu_monitor/{p.relative_to(ROOT)}" for p in (ROOT / "callbacks").rglob("*.py")),
    }
    assert wanted - shipped == set()
    assert "mfu_monitor/py.typed" in shipped


def test_the_wheel_passes_check_wheel_contents(wheel: Path) -> None:
    command = [sys.executable, "-m", "check_wheel_contents", "--toplevel", "mfu_monitor", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_source_archive_holds_tests_examples_and_configs(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/test_packaging.py", "examples/lightning_gpt.py", "configs/plain.yaml", "Makefile"} <= names


def test_a_users_own_callbacks_module_goes_on_working(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "callbacks.py").write_text("MINE = 'the user wrote this'\n")
    code = (
        "import callbacks, mfu_monitor.callbacks\n"
        "from mfu_monitor.callbacks import MFUMonitor\n"
        "import callbacks as again\n"
        "print(again.MINE); print(mfu_monitor.callbacks.__file__); print(MFUMonitor.__module__)"
    )
    mine, ours, home = run(code, cwd=tmp_path, site=installed).splitlines()
    assert mine == "the user wrote this"
    assert Path(ours) == installed / "mfu_monitor" / "callbacks" / "__init__.py"
    assert home.startswith("mfu_monitor.callbacks")


def test_without_a_users_module_no_top_level_callbacks_can_be_imported(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util, mfu_monitor.callbacks; print(importlib.util.find_spec('callbacks'))"
    assert run(code, cwd=tmp_path, site=installed).strip() == "None"
