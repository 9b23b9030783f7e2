"""How a diagnosis reads."""

from __future__ import annotations

from helpers_facts import machine
from trainfit.doctor.findings import bad, good, unsure
from trainfit.report.doctor import check_text, doctor_screen, doctor_text
from trainfit.report.layout import plain_text
from trainfit.results.doctor import Check, DoctorResult, ScriptReport
from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.text import WIDTH

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


def _screen(found: DoctorResult) -> str:
    return plain_text(doctor_screen(found))


def test_bad_comes_first_and_good_is_one_line() -> None:
    text = doctor_text(result(GOOD, UNSURE, BAD))
    assert text.index("BAD") < text.index("?     frequency") < text.index("ok    numa")
    assert text.startswith("1 bad, 1 unknown, 1 good (1.24 s)\n")
    assert check_text(GOOD) == "ok    numa              one NUMA node"


def test_a_bad_check_says_everything_needed_to_act() -> None:
    text = check_text(BAD)
    for part in ("shm_small", "64 MiB (statvfs(/dev/shm))", "leave it out", "RAM"):
        assert part in text
    # A command is copied from the screen: it stays whole, all else is wrapped.
    (command,) = [line for line in text.splitlines() if "docker run" in line]
    assert command.endswith(BAD.fixes[0].action)
    assert all(len(line) <= WIDTH for line in text.splitlines() if line != command)


def test_what_cannot_be_told_says_what_would_be_needed() -> None:
    assert "needed" in check_text(UNSURE) and "the host's /sys" in check_text(UNSURE)


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
        good("ecc", f"GPU {index} (NVIDIA A100): ECC is {state}")
        for index, state in enumerate(["on", "on", "off", "on"])
    ]
    lines = doctor_text(result(*checks)).splitlines()
    assert [line.split(None, 2)[2] for line in lines if line.startswith("ok ")] == [
        "GPUs 0, 1, 3: ECC is on",
        "GPU 2 (NVIDIA A100): ECC is off",
    ]


def test_the_screen_names_what_is_good_and_keeps_the_rest() -> None:
    """Twenty good checks are a paragraph; what is bad or unknown keeps its why and fix."""
    fine = [good(f"check{number}", "fine") for number in range(20)]
    seen = good("gpu", "PyTorch sees 1 GPU")
    text = _screen(result(*fine, seen, UNSURE))
    assert len(text.splitlines()) <= 25
    assert all(check.name in text for check in fine) and "fine" not in text
    assert "ok    gpu               PyTorch sees 1 GPU" in text
    assert check_text(UNSURE) in text and "--explain" in text
    lines = _screen(result(*fine, BAD)).splitlines()
    assert set(check_text(BAD).splitlines()) <= set(lines)
    assert "      fix " in lines[2] and lines[1].startswith("BAD   shm")


def test_unknown_checks_are_in_short_where_there_is_more_to_read() -> None:
    for text in (_screen(result(BAD, UNSURE)), _screen(result(*3 * [UNSURE]))):
        assert "no cpufreq here" in text and UNSURE.cause not in text
        assert "figures of good checks: --explain" in text
    whole = doctor_text(result(BAD, UNSURE))
    assert check_text(UNSURE) in whole and "--explain" not in whole
