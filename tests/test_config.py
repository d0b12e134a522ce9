"""Options are checked when they are given, and the message helps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mfu_monitor.checks.run_facts import RunFacts
from mfu_monitor.config import MonitorConfig
from mfu_monitor.errors import ConfigurationError


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("log_every_n_steps", 0, "a whole number of steps, 1 or more"),
        ("log_every_n_steps", 2.5, "a whole number of steps, 1 or more"),
        ("log_every_n_steps", True, "a whole number of steps, 1 or more"),
        ("max_overhead", -0.1, "from 0 to 1"),
        ("max_overhead", 2, "from 0 to 1"),
        ("max_overhead", float("nan"), "from 0 to 1"),
        ("max_overhead", "0.1", "from 0 to 1"),
        ("convention", "PaLM", "'exact' or 'palm'"),
        ("count", "all", "'auto' or 'every_step'"),
        ("count", ["auto"], "'auto' or 'every_step'"),
        ("names", "lightning", "'mfu_monitor' or 'throughput_monitor'"),
        ("on_impossible", "ignore", "'warn' or 'raise' or 'stop'"),
        ("count_padding", 1, "True or False"),
        ("device", "gpu0", "a torch device"),
        ("jsonl", 5, "the path of a file"),
        ("jsonl", "", "the path of a file"),
        ("jsonl", "/", "not of a folder"),
        ("jsonl", "runs\0/mfu.jsonl", "the path of a file"),
        ("flops_per_batch", 0, "a number above 0"),
        ("flops_per_batch", float("nan"), "a number above 0"),
        ("flops_per_batch", 10**400, "a number above 0"),
        ("price_per_device_hour", "2", "a number above 0"),
    ],
)
def test_a_wrong_value_is_refused_by_key_value_and_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        MonitorConfig(**{key: value})
    message = str(refused.value)
    assert f"{key}={value!r}" in message
    assert allowed in message
    assert f"example: {key}=" in message


@pytest.mark.parametrize("peak", [-1.0, 0, float("nan"), "guess", {"bf17": 1e12}, {"bf16": -1}, [], 10**400])
def test_a_wrong_peak_is_refused(peak: Any) -> None:
    with pytest.raises(ConfigurationError, match="peak"):
        MonitorConfig(peak=peak)


@pytest.mark.parametrize("peak", ["auto", "measure", 989.4e12, {"bf16": 989.4e12}])
def test_every_kind_of_peak_is_taken(peak: Any) -> None:
    assert MonitorConfig(peak=peak).peak == peak


@pytest.mark.parametrize("flops", [600, 6e2, np.int64(600), np.float32(600)])
def test_the_users_flops_may_be_of_any_numeric_type(flops: Any) -> None:
    given = MonitorConfig(flops_per_batch=flops).flops_per_batch
    assert RunFacts(None, torch.device("cpu"), flops_per_batch=given).flops_per_batch == 600.0
    model = torch.nn.Module()
    model.flops_per_batch = flops
    assert RunFacts(model, torch.device("cpu")).flops_per_batch == 600.0


def test_a_wrong_tokens_path_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"tokens='no\.such' is not allowed"):
        MonitorConfig(tokens="no.such")


def test_a_path_in_a_folder_that_does_not_exist_yet_is_taken(tmp_path: Path) -> None:
    MonitorConfig(jsonl=tmp_path / "new" / "run.jsonl")


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="a path that can be written"):
        MonitorConfig(jsonl=tmp_path / "file" / "run.jsonl")


def test_devices_are_taken_by_name_or_value() -> None:
    assert MonitorConfig(device="cuda:1").device == "cuda:1"
    assert MonitorConfig(device=torch.device("cpu")).device == torch.device("cpu")


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigurationError, match="unknown option 'log_every_n_step'; did you mean 'log_every_n_steps'"):
        MonitorConfig.from_mapping({"log_every_n_step": 5})


def test_positional_options_are_not_taken() -> None:
    with pytest.raises(TypeError):
        MonitorConfig(5)  # type: ignore[call-arg]


def test_a_toml_table_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mfu.toml"
    file.write_text('[mfu_monitor]\nlog_every_n_steps = 7\npeak = "measure"\n[other]\nx = 1\n')
    config = MonitorConfig.from_toml(file)
    assert (config.log_every_n_steps, config.peak) == (7, "measure")


@pytest.mark.parametrize("content", [None, "not = [toml", "\udce9"])
def test_a_toml_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "mfu.toml"
    if content is not None:
        file.write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigurationError, match=r"cannot read the configuration file .*mfu\.toml"):
        MonitorConfig.from_toml(file)


def test_changed_options_are_checked_again() -> None:
    config = MonitorConfig(log_every_n_steps=5)
    assert config.with_options({"count": "every_step"}).log_every_n_steps == 5
    with pytest.raises(ConfigurationError):
        config.with_options({"count": "never"})


def test_no_listing_of_the_options_shows_the_address_of_a_webhook() -> None:
    config = MonitorConfig(webhook="https://example.org/SECRET")
    assert config.webhook == "https://example.org/SECRET"
    for text in (repr(config), str(vars(config)), str(dataclasses.asdict(config))):
        assert "SECRET" not in text
