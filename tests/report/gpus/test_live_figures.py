"""What live figures of a GPU say: space against time, and what they say together."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_report import of_sections, on_one_line
from trainfit.report.sections.doctor import gpus_now_sections, meaning, situation
from trainfit.results.machine import Fact, Gpu, absent, cannot_tell, known
from trainfit.results.text import WIDTH, laid_out_for

FIGURES = ["GPU-Util", "memory used", "memory traffic", "SM clock", "power", "temperature"]
GIB = 1 << 30


def gpus_now_text(gpus: tuple[Gpu, ...]) -> str:
    with laid_out_for(WIDTH):
        return of_sections(gpus_now_sections(gpus))


#: A GPU at work; each figure's digits are its own, so that a test can tell where they are from.
AT_WORK: dict[str, Any] = {
    "name": "NVIDIA Example",
    "memory_bytes": 40 * GIB,
    "used_bytes": 13 * GIB,
    "utilisation": 0.97,
    "memory_utilisation": 0.41,
    "sm_hz": 1111e6,
    "sm_max_hz": 2222e6,
    "clock_reasons": ("sw_power_cap",),
    "temperature_c": 71.0,
    "slowdown_c": 93.0,
    "power_w": 288.0,
    "power_limit_w": 320.0,
    "power_limit_default_w": 356.0,
}


def gpu(index: int = 0, missing: Fact[Any] | None = None, **changes: Any) -> Gpu:
    """`AT_WORK` with changes; a `Fact` among them is taken as it is, `None` is not known."""
    unknown: Fact[Any] = missing if missing is not None else cannot_tell("NVML", "not supported")
    facts: dict[str, Any] = {}
    for field in dataclasses.fields(Gpu):
        value = {**AT_WORK, **changes}.get(field.name)
        if isinstance(value, Fact):
            facts[field.name] = value
        else:
            facts[field.name] = unknown if value is None else known(value, "NVML")
    facts["index"] = index
    return Gpu(**facts)


def line(of: Gpu, figure: str) -> str:
    (found,) = [each for each in meaning(of) if each.figure == figure]
    return f"{found.value}|{found.says}|{found.does_not_say}"


# --- Lines ------------------------------------------------------------------------------------


def test_each_figure_says_and_does_not_say() -> None:
    lines = meaning(gpu())
    assert [each.figure for each in lines] == FIGURES
    for each in lines:
        assert each.value and each.says and each.does_not_say and each.source == "NVML"


def test_space_and_time_are_told_apart() -> None:
    of = gpu()
    assert line(of, "GPU-Util").startswith("97%|time:")
    assert line(of, "memory used").startswith("13.0 of 40.0 GiB (32%)|space:")
    assert line(of, "memory traffic").startswith("41%|time:")
    assert line(of, "power").startswith("288 of 320 W (90%); as sold 356 W|load:")
    assert line(of, "SM clock").startswith("1111 of 2222 MHz (power limit)|speed:")
    assert line(of, "temperature").startswith("71 of 93 °C|")


def test_what_belongs_to_a_figure_may_be_missing() -> None:
    assert line(gpu(memory_bytes=None), "memory used").startswith("13.0 GiB|")
    assert line(gpu(memory_bytes=0), "memory used").startswith("13.0 GiB|")
    assert line(gpu(sm_max_hz=None, clock_reasons=None), "SM clock").startswith("1111 MHz|")
    assert line(gpu(clock_reasons=()), "SM clock").startswith("1111 of 2222 MHz|")
    assert line(gpu(power_limit_default_w=320.0), "power").startswith("288 of 320 W (90%)|")
    assert line(gpu(power_limit_w=None), "power").startswith("288 W|")
    assert line(gpu(slowdown_c=None), "temperature").startswith("71 °C|a hot GPU")


@pytest.mark.parametrize("fact", [absent("NVML", "none here"), cannot_tell("NVML", "no answer")])
def test_a_figure_without_a_value_has_the_reason(fact: Fact[Any]) -> None:
    (power,) = [each for each in meaning(gpu(power_w=fact)) if each.figure == "power"]
    assert power.value is None and power.says == fact.reason
    text = gpus_now_text((gpu(power_w=fact),))
    assert f"not known power ({fact.reason})" in on_one_line(text)


# --- Situations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"utilisation": 0.0, "used_bytes": GIB}, "It is idle, and hardly any memory"),
        ({"utilisation": 0.0}, "though 32% of its memory is used"),
        ({"utilisation": 0.0, "used_bytes": None}, "It is idle."),
        ({"utilisation": 0.03}, "It is almost idle, though 32%"),
        ({"utilisation": 0.3}, "there is also memory for a larger batch"),
        ({"utilisation": 0.3, "used_bytes": 39 * GIB}, "Memory is full but the GPU is not busy"),
        ({"utilisation": 0.7, "used_bytes": None}, "it waits for data, the CPU or launches."),
        ({"power_w": 96.0}, "draws 30% of its power limit: likely small kernels"),
        ({}, "Busy: a kernel nearly always runs, at 90% of its power limit"),
        ({"power_w": None}, "is not known without power"),
        ({"power_limit_w": None}, "is not known without power"),
        ({"memory_utilisation": 0.85, "power_w": 96.0}, "for 85% of the time: bandwidth is likely"),
        ({"utilisation": None, "power_w": 96.0}, "is not known: not supported. It draws 30%"),
        ({"utilisation": None, "power_w": None}, "Its utilization is not known: not supported."),
        ({"clock_reasons": ("hw_thermal_slowdown",)}, "lowered (too hot)"),
    ],
)
def test_situations(changes: dict[str, Any], words: str) -> None:
    assert words in situation(gpu(**changes))


def test_a_busy_gpu_at_low_power_is_not_called_fully_used() -> None:
    """100% GPU-Util is time: the same figure at low and at high power reads differently."""
    low, high = (situation(gpu(utilisation=1.0, power_w=watts)) for watts in (60.0, 310.0))
    assert "idle" in low and "Busy" not in low
    assert "idle" not in high and "Busy" in high


@pytest.mark.parametrize("reason", ["applications_clocks_setting", "hw_thermal_slowdown"])
def test_low_power_at_a_lowered_clock_is_not_laid_to_small_kernels(reason: str) -> None:
    text = situation(gpu(power_w=96.0, clock_reasons=(reason,)))
    assert "at 30% of its power limit" in text and "cannot be distinguished" in text
    assert "torch.compile" not in text


def test_torch_compile_is_offered_where_it_runs() -> None:
    assert "torch.compile" in situation(gpu(power_w=96.0, capability=None))
    assert "torch.compile" in situation(gpu(power_w=96.0, capability=(7, 5)))
    assert "batch or CUDA graphs help" in situation(gpu(power_w=96.0, capability=(6, 1)))


def test_a_power_limit_is_not_called_a_fault() -> None:
    assert "held down" not in situation(gpu(clock_reasons=("sw_power_cap", "gpu_idle")))


# --- The block --------------------------------------------------------------------------------


def test_meanings_stand_beside_the_first_gpu_alone() -> None:
    text = gpus_now_text((gpu(0), gpu(1, utilisation=0.2)))
    assert text.count("time: the share of the last 1/6 to 1 s") == 1
    first, second = text.split("GPU 1, ")
    assert all(figure in first for figure in FIGURES)
    assert "GPU-Util 20% memory used 13.0 of 40.0 GiB (32%) memory traffic 41%" in on_one_line(
        second
    )


def test_a_figure_that_only_a_later_gpu_has_is_explained_there() -> None:
    _, second = gpus_now_text((gpu(0, power_w=None), gpu(1))).split("GPU 1, ")
    assert "load: the best indicator" in second


def test_no_gpu_has_no_text() -> None:
    assert gpus_now_text(()) == ""


def test_text_of_others_is_escaped() -> None:
    evil = "\x1b[31mred\x07\n"
    of = gpu(name=evil, clock_reasons=(evil,), power_w=cannot_tell("NVML", evil), utilisation=None)
    of = dataclasses.replace(of, utilisation=absent("NVML", evil))
    text = gpus_now_text((of,))
    assert "\x1b" not in text and "\x07" not in text
    assert "\\x1b[31mred" in text


# --- Any subset of facts ----------------------------------------------------------------------

#: How each fact that `AT_WORK` has may appear in the text.
_SHOWN: dict[str, set[str]] = {
    "name": set(),
    "memory_bytes": {"40.0", "32"},
    "used_bytes": {"13.0", "32"},
    "utilisation": {"97"},
    "memory_utilisation": {"41"},
    "sm_hz": {"1111"},
    "sm_max_hz": {"2222"},
    "clock_reasons": set(),
    "temperature_c": {"71"},
    "slowdown_c": {"93"},
    "power_w": {"288", "90"},
    "power_limit_w": {"320", "90"},
    "power_limit_default_w": {"356"},
}
#: Numbers of the texts themselves.
_CONSTANT = {"0", "1", "6", "16", "100"}


@given(st.sets(st.sampled_from(sorted(AT_WORK))), st.booleans())
def test_no_figure_is_shown_that_is_not_known(missing: set[str], gone: bool) -> None:
    reason = absent("NVML", "none") if gone else cannot_tell("NVML", "no answer")
    text = gpus_now_text((gpu(missing=reason, **dict.fromkeys(missing)),))
    possible = set(_CONSTANT)
    for name in AT_WORK.keys() - missing:
        possible |= _SHOWN[name]
    for name in missing:  # a share needs both its figures
        possible -= _SHOWN[name]
    shown = set(re.findall(r"\d+(?:\.\d+)?", text))
    assert shown <= possible, shown - possible
    expected = {"utilisation": "97", "used_bytes": "13.0", "sm_hz": "1111", "power_w": "288"}
    for name, digits in expected.items():
        assert (digits in shown) == (name not in missing)


#: Among them what a terminal obeys, what formats obey, and what turns text around.
_TEXT = st.text(alphabet="aZ09 é_-%{}\\\x00\x1b\t\n\r\x85\u2028\u202e", max_size=60)
_NUMBERS = st.floats(-10, 1e13) | st.sampled_from([0.0, 1.0])
_STATES: dict[str, st.SearchStrategy[Any]] = {
    "name": _TEXT,
    "memory_bytes": st.integers(-1, 1 << 50),
    "used_bytes": st.integers(-1, 1 << 50),
    "clock_reasons": st.lists(
        st.sampled_from(["gpu_idle", "hw_slowdown", "sw_power_cap", "new_reason"]) | _TEXT,
        max_size=9,
    ).map(tuple),
}


@st.composite
def any_gpu(draw: st.DrawFn) -> Gpu:
    facts: dict[str, Any] = {}
    for name in AT_WORK:
        state = draw(st.sampled_from(["known", "absent", "cannot_tell"]))
        if state == "known":
            facts[name] = known(draw(_STATES.get(name, _NUMBERS)), "NVML")
        else:
            reason = draw(_TEXT)
            facts[name] = absent("NVML", reason) if state == "absent" else cannot_tell("N", reason)
    return gpu(draw(st.integers(0, 15)), **facts)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(any_gpu(), max_size=3))
def test_any_facts_give_a_text(gpus: list[Gpu]) -> None:
    text = gpus_now_text(tuple(gpus))
    assert all(line.isprintable() for line in text.split("\n"))
    # Long words of others are not broken; lines of ordinary words keep to the width.
    for shown in text.split("\n"):
        assert len(shown) <= WIDTH or max(map(len, shown.split())) > 20
    for of in gpus:
        assert situation(of)
        for each in meaning(of):
            assert each.value != "" and "None" not in (each.value or "")
