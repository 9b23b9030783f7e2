"""How a diagnosis reads."""

from __future__ import annotations

import dataclasses

from helpers_facts import machine
from helpers_report import screen, whole
from trainfit.doctor.findings import bad, good, unsure
from trainfit.report.blocks import Entry
from trainfit.report.page import page_of
from trainfit.report.sections.doctor import checks_subject, doctor_subject
from trainfit.report.writers.html import html
from trainfit.report.writers.markdown import markdown
from trainfit.results.doctor import Check, DoctorResult, ScriptReport
from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.text import WIDTH, laid_out_for

BAD = bad(
    "shm",
    "shm_small",
    "/dev/shm has 64 MiB",
    "Workers hand batches over through it. " * 5,
    [Evidence("size of /dev/shm", "64 MiB", source="statvfs(/dev/shm)")],
    [Fix("docker run --shm-size=8g " + "x" * 120, "leave it out", "RAM")],
)
GOOD = good("numa", "one NUMA node")
UNSURE = unsure("frequency", "no cpufreq here", "the host's /sys")


def result(*checks: Check, script: ScriptReport | None = None) -> DoctorResult:
    return DoctorResult(checks, machine(), script, 1.24, "0.1.0")


def doctor_screen(found: DoctorResult) -> str:
    with laid_out_for(WIDTH):
        return screen(doctor_subject(found))


def doctor_text(found: DoctorResult) -> str:
    with laid_out_for(WIDTH):
        return whole(doctor_subject(found))


def test_bad_comes_first_and_good_is_one_line() -> None:
    text = doctor_text(result(GOOD, UNSURE, BAD))
    assert text.index("- shm: ") < text.index("- frequency: ") < text.index("numa  ")
    assert text.startswith("1 bad, 1 unknown, 1 good (1.24 s)\n")
    assert "Good checks\n  numa        one NUMA node" in text


def test_a_bad_check_says_everything_needed_to_act() -> None:
    text = whole(checks_subject([BAD]))
    for part in ("shm_small", "64 MiB (statvfs(/dev/shm))", "leave it out", "RAM"):
        assert part in text
    # A command is copied from the screen: it stays whole, all else is wrapped.
    (command,) = [line for line in text.splitlines() if "docker run" in line]
    assert command.endswith(BAD.fixes[0].action)
    assert all(len(line) <= WIDTH for line in text.splitlines() if line != command)


def test_a_fix_is_nowhere_without_its_undo_and_its_cost() -> None:
    """On a screen, on all of it, on the page and in Markdown."""
    page = page_of([Entry("d.json", result(*[BAD] * 12))])
    found = doctor_screen(result(*[BAD] * 12))
    assert 1 <= found.count("docker run") == found.count("    undo        leave it out")
    assert found.count("docker run") == found.count("    cost        RAM")
    for text in (markdown(page), html(page)):
        assert text.count("docker run") == text.count("leave it out") >= 12


def test_what_cannot_be_told_says_what_would_be_needed() -> None:
    assert "needed      the host's /sys" in whole(checks_subject([UNSURE]))


def test_foreign_text_cannot_reach_the_terminal() -> None:
    nasty = "\x1b[31m\x07"
    fix, place = Fix(nasty, nasty, nasty), Place("a.py" + nasty, 1, 1, "x" + nasty)
    finding = Finding(
        "rule" + nasty,
        "warning",
        nasty,
        (),
        "r" + nasty,
        (fix,),
        place=place,
    )
    check = bad(nasty, nasty, nasty, nasty, [Evidence(nasty, nasty, source=nasty)], [fix])
    script = ScriptReport("s" + nasty, ("a.py",), (finding,), (nasty,))
    text = doctor_text(result(check, script=script))
    assert "\x1b" not in text and "\x07" not in text


def test_findings_are_bad_news() -> None:
    finding = Finding("r", "warning", "")
    assert result(BAD).is_bad
    assert not result(GOOD, UNSURE).is_bad
    assert not result(GOOD, script=ScriptReport("s", ("a.py",), ())).is_bad
    assert result(GOOD, script=ScriptReport("s", ("a.py",), (finding,))).is_bad


def test_gpus_of_which_the_same_is_said_share_a_line() -> None:
    checks = [
        dataclasses.replace(good("ecc", f"ECC is {state}"), subject=f"GPU {index}")
        for index, state in enumerate(["on", "on", "off", "on"])
    ]
    lines = [" ".join(line.split()) for line in doctor_text(result(*checks)).splitlines()]
    at = lines.index("Good checks") + 1
    assert lines[at : at + 2] == ["ecc GPU 0, GPU 1, GPU 3: ECC is on", "ecc GPU 2: ECC is off"]


def test_the_screen_counts_the_good_ones_that_have_no_room() -> None:
    """Whether there is a GPU stays the longest of them."""
    fine = [good(f"check{number}", "fine") for number in range(30)]
    text = doctor_screen(result(BAD, *fine, good("gpu", "PyTorch sees 1 GPU"), UNSURE))
    lines = text.splitlines()
    assert len(lines) <= 25
    assert "  gpu         PyTorch sees 1 GPU" in lines
    shown = sum(line.endswith("  fine") for line in lines)
    assert shown and lines[-1] == f"{30 - shown} more good checks, GPUs at this moment: --explain"
    # The fix goes before the reason.
    assert text.index("docker run") < text.index("Workers hand batches over")


def test_titles_stay_where_reasons_have_no_room() -> None:
    many = [bad(f"c{n}", "kind", f"title {n}", "why " * 60, [], BAD.fixes) for n in range(9)]
    text = doctor_screen(result(*many, UNSURE))
    assert all(f"title {number}" in text for number in range(9))
    assert len(text.splitlines()) <= 25 and "why why" not in text
    assert "no cpufreq here" in doctor_text(result(*many, UNSURE))
