"""Device names taken apart into words and the suffixes that matter."""

from __future__ import annotations

import pytest

from mfu_monitor.hardware.lookup import ParsedName, parse_name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVIDIA A100-SXM4-80GB", ("80GB", "A100", "SXM4")),
        ("Tesla V100-SXM2-16GB", ("16GB", "SXM2", "V100")),
        ("Intel(R) Arc(TM) B580 Graphics", ("ARC", "B580")),
        ("AMD Instinct MI250X / MI250", ("MI250", "MI250X")),
        ("AMD Instinct MI300X VF", ("MI300X", "VF")),
    ],
)
def test_vendor_words_and_separators_fall_away(name: str, words: tuple[str, ...]) -> None:
    assert parse_name(name) == ParsedName(words=words)


@pytest.mark.parametrize(
    ("suffix", "profile"),
    [("MIG 1g.10gb", "1G.10GB"), ("MIG 1c.2g.20gb", "1C.2G.20GB"), ("MIG", ""), ("MIG 1g.10gb+me", "1G.10GB")],
)
def test_a_mig_suffix_is_cut_and_remembered(suffix: str, profile: str) -> None:
    parsed = parse_name(f"NVIDIA A100-SXM4-80GB {suffix}")
    assert parsed.words == ("80GB", "A100", "SXM4")
    assert parsed.mig_profile == profile


def test_vgpu_and_mobile_parts_are_marked_and_others_are_not() -> None:
    assert parse_name("NVIDIA A10-24Q").is_vgpu
    assert parse_name("GRID A100-40C").is_vgpu
    assert not parse_name("NVIDIA A100-PCIE-40GB").is_vgpu
    assert parse_name("NVIDIA GeForce RTX 4090 Laptop GPU").is_mobile
    assert parse_name("Quadro RTX 6000 with Max-Q Design").is_mobile
    assert not parse_name("NVIDIA GeForce RTX 4090").is_mobile


def test_amd_form_factors_can_be_left_out() -> None:
    assert parse_name("AMD Instinct MI300X OAM").without_amd_suffixes() == ("MI300X",)
