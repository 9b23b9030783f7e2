"""Figures are written in one way: the unit that suits them, no exponent, "-" for not measured."""

from __future__ import annotations

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.results.text import (
    GIB,
    KIB,
    MIB,
    byte_rate,
    core_count,
    cores,
    count,
    duration,
    ghz,
    percent,
    rate,
    share,
    size,
    three_digits,
    times,
    with_prefix,
)

_UNITS: Final = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
_SECONDS: Final = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (100, "100 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (12 * KIB, "12 KiB"),
        (1.5 * MIB, "1.5 MiB"),
        (9.96 * MIB, "10 MiB"),
        (507 * MIB, "507 MiB"),
        (1023.6 * KIB, "1 MiB"),
        (1023.6 * MIB, "1.00 GiB"),
        (5.5 * GIB, "5.50 GiB"),
        (1023.996 * GIB, "1.00 TiB"),
        (-5 * GIB, "-5.00 GiB"),
        (None, "-"),
    ],
)
def test_sizes(nbytes: float | None, text: str) -> None:
    assert size(nbytes) == text


@given(st.integers(-(1 << 50), 1 << 50))
def test_a_size_is_below_1024_of_its_unit_and_near_the_bytes(nbytes: int) -> None:
    number, unit = size(nbytes).split(" ")
    assert abs(float(number)) < 1024 or unit == "TiB"
    assert abs(float(number) * _UNITS[unit] - nbytes) <= 0.051 * max(abs(nbytes), 1)
    assert size(nbytes, signed=True).lstrip("+") == size(nbytes)
    assert (size(nbytes, signed=True)[0] in "+-") == (nbytes != 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1e-12, "0 s"),
        (25e-9, "0.025 µs"),
        (25e-6, "25 µs"),
        (0.9996e-3, "1 ms"),
        (0.0791, "79.1 ms"),
        (0.9996, "1 s"),
        (1.2, "1.2 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h"),
        (3725, "1 h 02 min"),
        (-0.5, "-500 ms"),
        (None, "-"),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(1e-6, 99.9))
def test_a_time_is_below_1000_of_its_unit_and_right_to_three_digits(seconds: float) -> None:
    number, unit = duration(seconds).split(" ")
    assert float(number) < 1000
    assert float(number) * _SECONDS[unit] == pytest.approx(seconds, rel=0.0051)
    assert duration(-seconds) == f"-{duration(seconds)}"


@given(st.integers(100, 10**7))
def test_longer_times_have_minutes_and_seconds_below_60(seconds: int) -> None:
    found = re.fullmatch(r"(\d+) (min|h)(?: (\d\d) (s|min))?", duration(seconds))
    assert found is not None
    large, small = int(found[1]), int(found[3] or 0)
    unit = 60 if found[2] == "min" else 3600
    assert small < 60 and found[3] != "00"
    assert abs(large * unit + small * unit // 60 - seconds) <= unit // 120


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.0500"),
        (8.5, "8.50"),
        (99.96, "100"),
        (101.4, "101"),
        (12345.6, "12346"),
        (-8.5, "-8.50"),
        (None, "-"),
        (float("inf"), "inf"),
    ],
)
def test_rates(value: float | None, text: str) -> None:
    assert rate(value) == text


@given(st.floats(-1e12, 1e12).filter(lambda value: abs(value) > 1e-12))
def test_three_digits_without_an_exponent(value: float) -> None:
    text = three_digits(value)
    assert re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text)
    assert float(text) == pytest.approx(value, rel=0.0051)


def test_bytes_and_operations_a_second_have_a_prefix() -> None:
    assert [byte_rate(value) for value in (540e6, 999.6e6, 3.35e12, 0, None)] == [
        *("540 MB/s", "1 GB/s", "3.35 TB/s", "0 B/s", "-")
    ]
    assert with_prefix(82.6e12, "FLOP/s") == "82.6 TFLOP/s"
    assert with_prefix(None, "FLOP") == "-"


@given(st.floats(0.001, 1e18))
def test_a_prefix_leaves_less_than_1000(value: float) -> None:
    number, unit = with_prefix(value, "B/s").split(" ")
    assert float(number) < 1000 or unit == "PB/s"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0, "0%"),
        (0.0001, "<0.1%"),
        (-0.0001, ">-0.1%"),
        (0.004, "0.4%"),
        (0.0097, "1%"),
        (0.46, "46%"),
        (1.3, "130%"),
        (-0.03, "-3%"),
        (None, "-"),
    ],
)
def test_shares(part: float | None, text: str) -> None:
    assert percent(part) == text


@given(st.floats(-10, 10))
def test_percent_is_near_the_share(part: float) -> None:
    assert abs(float(percent(part).strip("<>%")) - 100 * part) <= (
        0.501 if abs(part) > 0.01 else 0.11
    )
    assert float(percent(part, decimals=1).rstrip("%")) == pytest.approx(100 * part, abs=0.0501)


def test_changes_have_a_sign() -> None:
    assert [percent(part, signed=True) for part in (0.03, -0.12, 0.004, 0.0, 1e-5)] == [
        *("+3%", "-12%", "+0.4%", "±0%", "±0%")
    ]
    assert [percent(part, decimals=1) for part in (0.096, 0.1)] == ["9.6%", "10%"]


def test_a_part_of_nothing_has_no_share() -> None:
    assert (share(1, 4), share(1, 0)) == ("25%", "")


def test_factors() -> None:
    assert [times(value) for value in (0.95, 1.42, 9.999, 12.3, 123.4, None)] == [
        *("0.95×", "1.42×", "10.0×", "12.3×", "123×", "-")
    ]


def test_counts_cores_and_clocks() -> None:
    assert [count(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert count(2, "batch", "batches") == "2 batches"
    assert [cores(number) for number in (2.0, 1.5, 0.333)] == ["2", "1.5", "0.33"]
    assert [core_count(number) for number in (1.0, 1.5)] == ["1 core", "1.5 cores"]
    assert [ghz(hertz) for hertz in (3e9, 2.45e9, 3.001e9, None)] == [
        *("3 GHz", "2.45 GHz", "3 GHz", "-")
    ]
