"""A reason for each setting of a launch, true of what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import helpers_machines
from helpers_loader import probe, result
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey
from trainfit.loader import local_tuning
from trainfit.loader.local_tuning import VariableValue, setting_reasons, with_present
from trainfit.loader.threads import cores, variables, why_none
from trainfit.report.sections.loader import reason_text
from trainfit.results.dataloader import Candidate, Confirmed, LoaderSettings
from trainfit.results.files.errors import ResultFileError
from trainfit.results.findings import Finding
from trainfit.results.loader import CoreAdvice, LoaderResult, SettingReason, VariableAdvice

TWO, FOUR = LoaderSettings(2), LoaderSettings(4)
HELD = LoaderSettings(2, library_threads=1)
OPENBLAS = VariableAdvice(
    "OPENBLAS_NUM_THREADS", "1", "environment", "export OPENBLAS_NUM_THREADS=1", "many", "2 on 2"
)


def ran(settings: LoaderSettings, rate: float, **more: Any) -> Confirmed:
    return Confirmed(settings, rate, rate, 0.1, 90, 4.0, **more)


def seen(settings: LoaderSettings, rate: float, **more: Any) -> Candidate:
    return Candidate(settings, rate, 0.1, 2.0, **more)


def reasons(
    found: LoaderResult, present: dict[str, VariableValue] | None = None
) -> dict[str, SettingReason]:
    made = setting_reasons(found, present or {}, "all alike")
    names = [each.name for each in made]
    assert len(set(names)) == len(names)
    assert all(each.reason and "\n" not in each.reason for each in made)
    return {each.name: each for each in made}


# --- The DataLoader's own ---------------------------------------------------------------------


def test_more_workers_were_measured_to_be_faster() -> None:
    found = reasons(
        result(
            present=TWO, recommended=FOUR, candidates=(seen(TWO, 5.0), seen(FOUR, 10.0)),
            confirmed=(ran(TWO, 5.1), ran(FOUR, 9.8)),
        )
    )["num_workers"]  # fmt: skip
    assert (found.value, found.present, found.evidence) == ("4", "2", "measured")
    assert found.reason == "2 → 4: 5.10 → 9.80 batches/s"


def test_what_else_changed_with_the_workers_is_named() -> None:
    then = LoaderSettings(4, 8, pin_memory=True, library_threads=1)
    found = reasons(
        result(present=TWO, recommended=then, candidates=(seen(TWO, 5.0), seen(then, 10.0)),
               confirmed=())
    )["num_workers"]  # fmt: skip
    assert found.reason == (
        "2 → 4: 5.00 → 10.0 batches/s, together with prefetch_factor, pin_memory, "
        "one thread per library"
    )
    assert found.evidence == "predicted"


def test_fewer_workers_that_do() -> None:
    found = reasons(
        result(
            present=FOUR,
            recommended=TWO,
            candidates=(),
            confirmed=(ran(TWO, 9.8), ran(FOUR, 9.8)),
        )
    )["num_workers"]
    assert found.reason == "2 give 9.80 batches/s, 4 9.80: fewer cores, less memory"


def test_workers_that_stay() -> None:
    candidates = (
        seen(TWO, 9.8),
        seen(LoaderSettings(3), 9.81),
        seen(FOUR, 9.9, oversubscribed="x"),
    )
    kept = result(present=TWO, recommended=TWO, verdict="keep", candidates=candidates, confirmed=())
    found = reasons(kept)["num_workers"]
    assert found.reason == "3 give no more (9.81 against 9.80 batches/s predicted)"
    gpu = dataclasses.replace(kept, verdict="nothing_to_gain", reason="the GPU is the limit")
    assert reasons(gpu)["num_workers"].reason == "the GPU is the limit"


def test_prefetching_and_pinning() -> None:
    pinned = dataclasses.replace(TWO, pin_memory=True)
    candidates = (
        seen(TWO, 9.0), seen(pinned, 9.8),
        seen(dataclasses.replace(pinned, prefetch_factor=4), 9.8),
        seen(dataclasses.replace(pinned, prefetch_factor=1), 5.0),
    )  # fmt: skip
    found = reasons(result(present=TWO, recommended=pinned, candidates=candidates, confirmed=()))
    assert found["prefetch_factor"].reason == (
        "4 give no more (9.80 against 9.80 batches/s predicted)"
    )
    assert found["pin_memory"].value == "True" and found["pin_memory"].present == "False"
    assert "asynchronous only from pinned memory" in found["pin_memory"].reason
    assert "not pinned: 9.00 against 9.80 batches/s predicted" in found["pin_memory"].reason
    found = reasons(result(present=TWO, recommended=TWO, candidates=candidates, step_s=0.0))
    assert "is unknown" in found["pin_memory"].reason and not found["pin_memory"].evidence
    even = (seen(TWO, 9.8), seen(pinned, 9.8))
    found = reasons(result(present=TWO, recommended=TWO, candidates=even, confirmed=()))
    assert (
        found["pin_memory"].reason == "pinned gives no more (9.80 against 9.80 batches/s predicted)"
    )


def test_keeping_workers_from_epoch_to_epoch() -> None:
    kept = dataclasses.replace(FOUR, persistent_workers=True)
    found = reasons(
        result(recommended=kept, probe=probe(samples=80, start_s={"fork": 0.1}),
               candidates=(seen(FOUR, 10.0),))
    )["persistent_workers"]  # fmt: skip
    assert found.reason == "starting 4 workers needs 400 ms, an epoch 1 s (40%)"
    assert (found.value, found.present) == ("True", "False")
    unknown = reasons(result(recommended=kept, probe=probe(samples=None)))["persistent_workers"]
    assert "is unknown" in unknown.reason


def test_without_workers() -> None:
    found = reasons(result(present=TWO, recommended=LoaderSettings(0)))
    assert (found["prefetch_factor"].value, found["prefetch_factor"].present) == (None, "2")
    assert "PyTorch rejects the option" in found["prefetch_factor"].reason
    assert "no workers" in found["persistent_workers"].reason
    assert "no workers" in found["OMP_NUM_THREADS"].reason


def test_what_cannot_be_told_stays() -> None:
    doubt = Finding("busy_machine", "critical", "others", cause="open")
    found = reasons(
        result(
            verdict="cannot_tell",
            present=FOUR,
            recommended=FOUR,
            reason="others",
            doubts=(doubt,),
        ),
        {"OMP_NUM_THREADS": VariableValue("2", "shell")},
    )
    for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers"):
        assert found[name].value == found[name].present and not found[name].evidence
        assert found[name].reason == "the best value is unknown: others" and found[name].is_kept
    assert found["OMP_NUM_THREADS"].value == "2" and not found["OMP_NUM_THREADS"].evidence


# --- Variables of threads ---------------------------------------------------------------------


def threaded(**changes: Any) -> LoaderResult:
    """OpenBLAS has two threads in each of two workers, and one is faster."""
    busy = probe(threads=1.7, started_threads=1, thread_pools={"openblas": 2})
    values: dict[str, Any] = {
        "present": TWO,
        "recommended": HELD,
        "probe": busy,
        "held": busy,
        "candidates": (seen(TWO, 5.0), seen(HELD, 17.0)),
        "confirmed": (ran(TWO, 5.8), ran(HELD, 17.3)),
        "variables": (OPENBLAS,),
    }
    return result(**values | changes)


def test_a_variable_of_the_command_that_was_measured_to_lose() -> None:
    present = {"OPENBLAS_NUM_THREADS": VariableValue("8", "command")}
    found = threaded()
    (advice,) = with_present(found, present)
    assert (advice.present, advice.set_by) == ("8", "command")
    assert advice.gain == pytest.approx(17.3 / 5.8)
    told = reasons(dataclasses.replace(found, variables=(advice,)), present)
    blas = told["OPENBLAS_NUM_THREADS"]
    assert (blas.value, blas.present, blas.set_by, blas.evidence) == (
        "1",
        "8",
        "command",
        "measured",
    )
    assert blas.reason == "one thread per library of a worker (8 now): 5.80 → 17.3 batches/s"
    assert told["OMP_NUM_THREADS"].value is None
    assert told["OMP_NUM_THREADS"].reason == (
        "the other variables limit the libraries that have threads"
    )
    assert told["MKL_NUM_THREADS"].reason == (
        "no library of a worker reads its thread count from it (pools: openblas 2)"
    )


def test_without_both_runs_there_is_no_measured_gain() -> None:
    found = threaded(confirmed=(ran(HELD, 17.3),))
    (advice,) = with_present(found, {})
    assert (advice.present, advice.set_by, advice.gain) == (None, "", None)
    told = reasons(dataclasses.replace(found, variables=(advice,)))["OPENBLAS_NUM_THREADS"]
    assert (told.evidence, told.present) == ("predicted", None)
    assert "5.00 → 17.0 batches/s" in told.reason
    beside = threaded(confirmed=(ran(TWO, 5.8, others_cores=1.0), ran(HELD, 17.3)))
    assert with_present(beside, {})[0].gain is None


def test_held_down_without_a_gain() -> None:
    found = threaded(
        recommended=TWO, variables=(), candidates=(seen(TWO, 5.0), seen(HELD, 4.9)),
        confirmed=(ran(TWO, 4.9), ran(HELD, 4.8)),
    )  # fmt: skip
    told = reasons(found, {"OMP_NUM_THREADS": VariableValue("2", "shell")})
    assert told["OPENBLAS_NUM_THREADS"] == SettingReason(
        "OPENBLAS_NUM_THREADS", None, None,
        "threads limited to 1: 4.80 batches/s, now 4.90: no gain", "measured", where="environment",
    )  # fmt: skip
    omp = told["OMP_NUM_THREADS"]
    assert (omp.value, omp.present, omp.set_by) == ("2", "2", "shell")
    assert omp.is_kept and omp.reason.startswith("threads limited to 1")


def test_each_reason_says_where_its_setting_belongs() -> None:
    found = reasons(result(cores=CoreAdvice("taskset -c 0-7", tuple(range(8)), "", "")))
    where = {name: each.where for name, each in found.items()}
    assert where.pop("CPU affinity") == "wrapper"
    arguments = {field.name for field in dataclasses.fields(LoaderSettings)}
    assert {"num_workers", "pin_memory"} <= set(where) & arguments
    for name, place in where.items():
        assert place == ("argument" if name in arguments else "environment"), name


def test_libraries_that_start_no_threads() -> None:
    found = reasons(result(probe=probe(started_threads=0)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        assert found[name].value is None and found[name].evidence == "measured"
        assert found[name].reason == (
            "no library of a worker starts threads (0 threads started in addition to its own, a "
            "batch keeps 1.0 threads busy)"
        )
    assert "NUMEXPR_NUM_THREADS" not in found and "cv2.setNumThreads" not in found
    loaded = probe(started_threads=0, thread_pools={"opencv": 8, "numexpr": 8})
    assert {"NUMEXPR_NUM_THREADS", "cv2.setNumThreads"} <= set(reasons(result(probe=loaded)))
    unknown = reasons(result(probe=probe(started_threads=None)))["OMP_NUM_THREADS"]
    assert "were not measured" in unknown.reason and not unknown.evidence


@pytest.mark.parametrize("value", ["0", "abc", "-1", ""])
def test_a_value_that_is_ignored_is_not_carried_on(value: str) -> None:
    present = {"OMP_NUM_THREADS": VariableValue(value, "command")}
    found = reasons(result(probe=probe(started_threads=0)), present)["OMP_NUM_THREADS"]
    assert (found.value, found.present, found.set_by) == (None, value, "command")
    assert found.misread.startswith("is ignored (OpenMP expects a positive integer)")
    assert reason_text(found).startswith(f"{value!r} is ignored (OpenMP expects a positive")


def test_what_was_measured_to_win_goes_before_a_rule() -> None:
    """A quota of 4 of 16 cores: by the rule 2 are left to the main process."""
    from helpers_loader import machine

    small = machine(usable_cores=4.0, quota_cores=4.0, physical_cores=16)
    seen_pools = probe(threads=3.0, started_threads=8, thread_pools={"openmp": 16})
    rule = {each.name: each.value for each in variables(seen_pools, small, TWO, {}, was_held=True)}
    won = {each.name: each.value for each in variables(seen_pools, small, HELD, {}, was_held=True)}
    assert (rule["OMP_NUM_THREADS"], won["OMP_NUM_THREADS"]) == ("2", "1")


@given(
    st.sampled_from([TWO, HELD, LoaderSettings(0)]),
    st.dictionaries(
        st.sampled_from(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]),
        st.builds(
            VariableValue, st.text(max_size=4), st.sampled_from(["command", "script", "shell"])
        ),
    ),
    st.booleans(),
)
def test_whatever_is_set_each_has_one_reason(
    recommended: LoaderSettings, present: dict[str, VariableValue], tried: bool
) -> None:
    found = threaded(recommended=recommended, **({} if tried else {"held": None, "variables": ()}))
    told = reasons(dataclasses.replace(found, variables=with_present(found, present)), present)
    for name, each in present.items():
        assert (told[name].present, told[name].set_by) == (each.value, each.set_by)


# --- Cores, and where they are made -----------------------------------------------------------


def test_affinity() -> None:
    assert reasons(result())["CPU affinity"].reason == "all alike"
    advice = CoreAdvice("taskset -c 0-7", tuple(range(8)), "better cores", "two kinds")
    found = reasons(result(cores=advice))["CPU affinity"]
    assert (found.value, found.evidence) == ("taskset -c 0-7", "assumed")
    assert found.reason == "better cores: two kinds"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "of one kind and on one NUMA node"),
        ({"affinity": "1"}, "only CPU 1 may be used"),
    ],
)
def test_why_no_cores_are_chosen(changes: dict[str, str], words: str) -> None:
    document = helpers_machines.document("container-quota")
    document["calls"].update(changes)
    machine = survey(RecordedSystem(document))
    assert cores(machine, FOUR) is None
    assert words in why_none(machine, FOUR)


def test_who_set_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BY_COMMAND", "1")
    monkeypatch.setenv("BY_SCRIPT", "2")
    monkeypatch.setenv("BY_SHELL", "3")
    found = local_tuning._present(
        {"BY_COMMAND": "1", "BY_SCRIPT": "1"},
        {"BY_COMMAND": "1", "BY_SCRIPT": "1", "BY_SHELL": "3"},
    )
    assert {name: found[name] for name in ("BY_COMMAND", "BY_SCRIPT", "BY_SHELL")} == {
        "BY_COMMAND": VariableValue("1", "command"),
        "BY_SCRIPT": VariableValue("2", "script"),
        "BY_SHELL": VariableValue("3", "shell"),
    }


def test_reasons_and_doubts_are_kept_and_older_files_read() -> None:
    doubt = Finding("slowed_cores", "warning", "slow", cause="so")
    whole = result(doubts=(doubt,), without_others=TWO)
    whole = dataclasses.replace(whole, reasons=tuple(reasons(whole).values()))
    assert LoaderResult.from_json(whole.to_json(), Path("x")) == whole
    older = result().to_json()
    for name in ("doubts", "reasons"):
        older = older.replace(f',\n  "{name}": []', "")
    older = older.replace(',\n  "without_others": null', "")
    assert '"doubts"' not in older and LoaderResult.from_json(older, Path("x")) == result()
    newer = older.replace('"version": 1', '"version": 2')
    with pytest.raises(ResultFileError, match="newer"):
        LoaderResult.from_json(newer, Path("x"))
