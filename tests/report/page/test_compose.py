"""What is on the page of each kind of result, in which order, and what is not repeated."""

from __future__ import annotations

import dataclasses

import pytest

from helpers_page import FILES, entries, entry, made
from trainfit.report.blocks import Chart, Entry, Items, Page, Snippet, Table
from trainfit.report.page import page_of
from trainfit.results.changes import LaunchPart
from trainfit.results.real_runs import REHEARSED, ComparedQuantity
from trainfit.results.real_runs import Verification as Verification
from trainfit.results.text import duration


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def test_the_page_of_a_plan_has_the_sections_that_its_data_is_for() -> None:
    page = page_of([entry("plan-v1.json")])
    assert titles(page)[0].startswith("Memory on T4")
    wanted = {
        *("Memory over the step", "Memory by module", "Memory by batch size", "Time of a step"),
        *("Roofline", "Throughput by batch size", "Machine and versions", "Why these settings"),
    }
    assert wanted <= set(titles(page))
    assert "Findings in the watched run" not in titles(page)
    head = page.headlines[0]
    assert head.text.startswith("Fits: ") and head.limit.startswith("What limits: ")
    assert head.commands == (Snippet(entry("plan-v1.json").result.launch, "Run"),)


@pytest.mark.parametrize("name", FILES)
def test_each_kind_has_a_headline_and_a_section_of_its_own(name: str) -> None:
    page = page_of([entry(name)])
    assert len(page.headlines) == 1
    assert page.headlines[0].text.strip() and page.headlines[0].kind
    assert any(title not in ("Machine and versions", "Assumptions and warnings")
               for title in titles(page))  # fmt: skip
    assert len(titles(page)) == len(set(titles(page)))


def test_two_results_of_a_kind_are_told_apart_by_their_files() -> None:
    one = entry("watch-v1.json")
    page = page_of([one, Entry("other.json", one.result)])
    assert "The watched run over time · watch-v1.json" in titles(page)
    assert "The watched run over time · other.json" in titles(page)


def test_a_loaders_own_result_replaces_the_plans_part() -> None:
    plan, loader = entry("plan-v1.json"), entry("loader-v1.json")
    loading = plan.result.loading
    if loading is None:
        from trainfit.results.speed import DataLoading

        loading = DataLoading(loader.result)
    both = dataclasses.replace(plan.result, loading=loading)
    alone = titles(page_of([Entry("p", both, plan.detail)]))
    assert alone.count("DataLoader throughput") == 1
    together = titles(page_of([Entry("p", both, plan.detail), loader]))
    assert together.count("DataLoader throughput") == 1


def test_the_order_of_the_page_is_not_that_of_the_files() -> None:
    one, other = page_of(entries()), page_of(entries()[::-1])
    assert [head.kind for head in one.headlines] == [head.kind for head in other.headlines]
    assert one.headlines[0].kind == "Plan"
    assert titles(one)[-2:] == ["Machine and versions", "Assumptions and warnings"]


def test_parts_that_are_left_out_for_one_reason_are_one_row() -> None:
    plan = entry("plan-v1.json").result
    parts = tuple(
        LaunchPart(name, "cannot tell", "environment", "it was not measured")
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    )
    kept = LaunchPart("batch_size", "kept", "argument", "as it is", value="8")
    page = page_of([Entry("p", dataclasses.replace(plan, launch_parts=(*parts, kept)))])
    (why,) = (part for part in page.sections if part.title == "Why these settings")
    table = why.blocks[0]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["batch_size", "OMP_NUM_THREADS, MKL_NUM_THREADS"]


def test_a_plan_without_recordings_has_tables_in_the_place_of_pictures() -> None:
    page = page_of([Entry("p", entry("plan-v1.json").result)])
    by_title = {section.title: section for section in page.sections}
    assert not any(isinstance(b, Chart) for b in by_title["Memory over the step"].blocks)
    assert any(isinstance(b, Table) for b in by_title["Memory by module"].blocks)
    assert "Roofline" not in by_title


def test_every_note_is_there_with_its_file_where_there_are_several() -> None:
    page = page_of(entries())
    (notes,) = (s for s in page.sections if s.title == "Assumptions and warnings")
    (items,) = notes.blocks
    assert isinstance(items, Items)
    sources = {item.tag.partition(" · ")[2] for item in items.items}
    assert {"plan-v1.json", "loader-v1.json", "pace-v1.json"} <= sources
    tones = [("bad", "warn", "plain").index(item.tone) for item in items.items]
    assert tones == sorted(tones)


def test_a_result_that_does_not_fit_says_so_and_has_no_command() -> None:
    plan = entry("plan-v1.json").result
    now = dataclasses.replace(plan.now, fits=False, largest_batch=0, recommended_batch=None)
    broken = dataclasses.replace(plan, now=now, amp_choice=None, recommended=None)
    head = page_of([Entry("p", broken)]).headlines[0]
    assert head.tone == "bad" and head.commands == ()
    assert head.limit.startswith("What limits: memory of ")


def test_a_fix_is_drawn_from_the_calls_that_its_summary_is_of() -> None:
    """The search for the shortest busy-wait that helps is no part of it."""
    paced, _ = made()
    trial = paced.result.fix_trial
    page = page_of([paced])
    (chart,) = (chart for chart in page.charts if "before and after" in chart.title)
    rows = {row[0]: row for row in chart.table.rows}
    assert rows["before"][1] == str(trial.before.calls.count)
    assert rows["after: spin"][1] == str(trial.after.calls.count)
    assert rows["after: spin"][-1] == duration(trial.after.calls.most)
    assert "Why paced calls are slower" in titles(page)


def test_a_watched_run_on_a_gpu_has_its_memory_and_its_findings_marked() -> None:
    _, watched = made()
    assert watched.result.findings
    page = page_of([watched])
    assert "GPU memory of the watched run" in titles(page)
    course = next(each for each in page.charts if each.title.startswith("Time of steps"))
    assert watched.result.findings[0].title in course.says
    marks = [value["title"] for layer in course.spec["layer"] for value in layer["data"]["values"]
             if "title" in value]  # fmt: skip
    assert watched.result.findings[0].title in {mark.partition(",")[0] for mark in marks} | set(
        marks
    )


def test_results_of_a_kind_stand_side_by_side() -> None:
    plan = entry("plan-v1.json")
    page = page_of([plan, dataclasses.replace(plan, name="other.json"), entry("pace-v1.json")])
    first = page.sections[0]
    assert first.title == "Side by side"
    (table,) = first.blocks
    assert isinstance(table, Table) and table.columns == ("Plan", "plan-v1.json", "other.json")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["command"][0].startswith(plan.result.command)
    assert rows["GPU memory"][0] == rows["GPU memory"][1] != "-"
    assert page_of([plan]).sections[0].title != "Side by side"


def test_a_run_without_a_command_has_a_subject() -> None:
    watched = entry("watch-v1.json")
    header = dataclasses.replace(watched.result.header, command="")
    result = dataclasses.replace(watched.result, header=header)
    assert page_of([Entry("w.json", result)]).title == "a notebook, or an interactive session"


def test_a_verification_shows_each_quantity_with_its_range() -> None:
    result = Verification(
        file="plan.json",
        command="python train.py",
        gpu_predicted="T4",
        gpu_measured="Tesla T4",
        steps=10,
        range_basis="that of the result",
        compared={
            "allocated": ComparedQuantity(100 << 20, 100 << 20, 100 << 20, 100 << 20),
            "device": ComparedQuantity(300 << 20, 250 << 20, 330 << 20, 340 << 20),
        },
        fits_predicted=True,
        fits_measured=True,
        step_seconds=(0.1, 0.2, 0.3),
        notes=(),
        environment={},
    )
    page = page_of([Entry("v.json", result)])
    (head,) = page.headlines
    assert head.tone == "bad" and head.text.startswith("NOT as predicted")
    assert head.limit == "Device memory +13.3% against the prediction."
    (chart,) = page.charts
    assert chart.table.rows[1][-1] == "outside" and chart.table.rows[0][-1] == "within"
    rehearsed = dataclasses.replace(result, notes=(REHEARSED,))
    (head,) = page_of([Entry("v.json", rehearsed)]).headlines
    assert head.tone == "plain" and "nothing was measured" in head.limit
