"""Quantities as people write them are read to the digit, and nonsense is refused by name."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.cli.units import (
    count_parser,
    format_quantity,
    fraction_parser,
    parse_fraction,
    parse_quantity,
    quantity_parser,
)
from mfu_monitor.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("70B", 70e9),
        ("70b", 70e9),
        ("15T", 15e12),
        ("3k", 3e3),
        ("3K", 3e3),
        ("405G", 405e9),
        ("2M", 2e6),
        ("989T", 989e12),
        ("1.979P", 1979e12),
        ("1E", 1e18),
        ("1.5e15", 1.5e15),
        ("1e3", 1e3),
        (".5M", 5e5),
        (" 8 k ", 8e3),
        ("16,777,216", 16_777_216.0),
        ("6_000", 6e3),
        ("0.29k", 290.0),
    ],
)
def test_suffixes_exponents_and_separators_are_read(text: str, value: float) -> None:
    assert parse_quantity(text, name="--tokens") == value


@pytest.mark.parametrize(
    "text", ["", "seventy", "70X", "-3k", "0", "0B", "1e400", "nan", "inf", "1,5", "70BB", "B", "1.2.3", "12e"]
)
def test_nonsense_is_refused_with_the_option_and_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_quantity(text, name="--tokens")
    message = str(caught.value)
    assert message.startswith("--tokens is ")
    assert repr(text) in message
    assert "expected a number above zero" in message
    assert "70B" in message


def test_the_option_parser_keeps_the_words_through_click() -> None:
    with pytest.raises(typer.BadParameter, match=r"--price is 'cheap'; expected a number above zero"):
        quantity_parser("--price")("cheap")


@given(st.integers(min_value=1, max_value=999), st.sampled_from("kMGTPE"))
def test_formatting_is_the_inverse_of_parsing(digits: int, suffix: str) -> None:
    value = parse_quantity(f"{digits}{suffix}", name="x")
    assert parse_quantity(format_quantity(value), name="x") == value


def test_formatting_rounds_into_the_next_suffix() -> None:
    assert format_quantity(999_999.0) == "1M"
    assert format_quantity(989.4e12) == "989T"
    assert format_quantity(0.5) == "0.5"


@pytest.mark.parametrize(("text", "value"), [("0.4", 0.4), ("40%", 0.4), ("1", 1.0), (" 38.5 % ", 0.385)])
def test_fractions_are_read_as_numbers_and_as_percentages(text: str, value: float) -> None:
    assert parse_fraction(text, name="--mfu") == pytest.approx(value)
    assert fraction_parser("--mfu")(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["40", "0", "-0.1", "101%", "half", "nan", "", "%"])
def test_a_fraction_outside_its_range_is_refused_with_both_spellings(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--mfu is .* such as 0.40 or 40%"):
        parse_fraction(text, name="--mfu")


def test_counts_are_whole_numbers() -> None:
    assert count_parser("--devices")("8k") == 8000
    for text in ("1.5", "1e308", "1e19"):
        with pytest.raises(typer.BadParameter, match=rf"--devices is '{text}'; expected a whole number up to 1e\+18"):
            count_parser("--devices")(text)
