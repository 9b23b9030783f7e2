"""What is best of a sweep's cells, and what is said of it."""

from __future__ import annotations

import dataclasses
import random

from helpers_report import whole
from trainfit.plan.sweep.sweeping import best_first, place_of_least
from trainfit.report.sections.sweep import sweep_subject
from trainfit.report.writers.terminal import screen
from trainfit.results.runs.sweep import SweepCell, SweepResult


def cell(gpu: str, rate: float | None, price: float | None, gib: int, **more: object) -> SweepCell:
    found = SweepCell(
        "python train.py",
        {},
        gpu,
        1,
        fits=True,
        device_bytes=gib << 30,
        step_s=0.1,
        samples_per_s=rate,
        price_per_hour=price,
        samples_per_unit=3600 * rate / price if rate and price else None,
    )
    return dataclasses.replace(found, **more)  # type: ignore[arg-type]


def result(*cells: SweepCell, **more: object) -> SweepResult:
    found = SweepResult("sweep.toml", "plan", "sweep-cells", best_first(cells), "USD")
    return dataclasses.replace(found, **more)  # type: ignore[arg-type]


def test_the_front_is_what_no_other_beats() -> None:
    cells = best_first(
        [
            cell("fast", 100, 4.0, 20),
            cell("cheap", 10, 0.1, 20),
            cell("small", 5, 4.0, 2),
            cell("beaten", 90, 4.0, 20),
            cell("equal", 100, 4.0, 20),
            cell("no price", 200, None, 1),
        ]
    )
    assert {each.gpu for each in cells if each.on_front} == {"fast", "cheap", "small", "equal"}


def test_the_front_of_many_is_that_of_the_definition() -> None:
    rng = random.Random(40)
    cells = [
        cell(str(n), rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)) for n in range(60)
    ]
    found = best_first(cells)

    def measures(each: SweepCell) -> tuple[float, float, float]:
        assert each.samples_per_s and each.samples_per_unit and each.device_bytes
        return -each.samples_per_s, -each.samples_per_unit, each.device_bytes

    for each in found:
        beaten = any(
            all(a <= b for a, b in zip(measures(other), measures(each), strict=True))
            and measures(other) != measures(each)
            for other in found
        )
        assert each.on_front is not beaten


def test_without_prices_the_front_is_of_time_and_memory() -> None:
    cells = best_first([cell("a", 10, None, 5), cell("b", 20, None, 5), cell("c", 5, None, 1)])
    assert [(each.gpu, each.on_front) for each in cells] == [("b", True), ("a", False), ("c", True)]


def test_what_fits_comes_first_and_what_failed_last() -> None:
    cells = best_first(
        [
            SweepCell("x", {}, "failed", 1, failure="why"),
            cell("too small", None, None, 30, fits=False),
            cell("slow", 1, None, 3),
            cell("fast", 2, None, 3),
            cell("priced", 1, 1.0, 3),
        ]
    )
    assert [each.gpu for each in cells] == ["priced", "fast", "slow", "too small", "failed"]
    assert not any(each.on_front for each in cells[3:])


def test_places_of_the_best_are_of_cells_that_fit() -> None:
    cells = [cell("a", None, 1.0, 3, fits=False), cell("b", 2, 3.0, 3), cell("c", 9, 4.0, 3)]
    assert place_of_least(cells, lambda each: each.price_per_hour) == 1
    assert place_of_least(cells, lambda each: each.cost) is None


def test_the_answer_comes_first_and_a_screen_is_short() -> None:
    cells = [cell(f"{n}x T4", 10.0 * n, 0.5 * n * n, 10, cost=float(n)) for n in range(1, 40)]
    bad = [SweepCell("python train.py", {}, f"{n}x K80", 1, failure="too old") for n in range(9)]
    found = result(*cells, *bad, cheapest=0, best_per_unit=0, fastest=38)
    lines = [line.text for line in screen(sweep_subject(found))]
    assert lines[0].startswith("Cheapest and best per USD: 1x T4, 10.0 samples/s")
    assert "fastest: 39x T4, 390 samples/s" in " ".join(lines[1:4])
    assert "39 of 48 cells fit; 9 without a result" in " ".join(" ".join(lines[1:5]).split())
    assert len(lines) <= 25
    assert "too old" in whole(sweep_subject(found))


def test_the_fastest_is_not_named_as_if_it_were_alone() -> None:
    rates = [100.0, 99.5, 99.1, 98.0]
    cells = [cell(f"{n}x T4", rate, 1.0, 10) for n, rate in enumerate(rates)]
    found = whole(sweep_subject(result(*cells, fastest=0)))
    assert found.startswith("Fastest (2 others within 1%): 0x T4")


def test_of_cells_that_fit_nowhere_the_answer_is_that() -> None:
    found = result(cell("T4", None, None, 30, fits=False))
    assert screen(sweep_subject(found))[0].text == "None of 1 cell fit"
