"""Every bench is named in the docs and prints its goal lines through the harness."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from helpers_cases import some_of

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
BENCHES: Final = sorted(
    path.stem
    for path in BENCH.glob("*.py")
    if "__main__" in path.read_text() and not path.stem.startswith("_")
)
DOCS: Final = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
#: A doc may name what is gone where it says in which commit it was.
STUDY: Final = "959106b7"
#: A part of another one, under a name of its own.
PART: Final = "distributed_memory"
#: Those that have no goals of their own.
OWN: Final = frozenset({"docs_walk", PART})
#: golden prints what it stores; watch_overhead writes to the training that it times.
PRINTING: Final = frozenset({"golden", "watch_overhead"})
GOAL: Final = re.compile(r"^.+: \S+.* \(goal at (?:most|least) .+\) (?:holds|short)$")


def named() -> dict[str, set[str]]:
    """By bench the docs that name it."""
    found: dict[str, set[str]] = {}
    for page in DOCS:
        for name in re.findall(r"(?<!tests/)\bbench/(\w+)\.py", page.read_text("utf-8")):
            found.setdefault(name, set()).add(page.name)
    return found


def test_every_bench_is_in_the_docs_and_every_bench_of_the_docs_is_there() -> None:
    there = {path.stem for path in BENCH.glob("*.py")}
    missing = {name: pages for name, pages in named().items() if name not in there}
    for name, pages in missing.items():
        texts = [page.read_text("utf-8") for page in DOCS if page.name in pages]
        assert all(STUDY in text for text in texts), f"bench/{name}.py of {pages} is gone"
    assert set(BENCHES) <= set(named()), set(BENCHES) - set(named())


def test_make_bench_runs_what_is_there() -> None:
    run = set(re.findall(r"bench/(\w+)\.py", (ROOT / "Makefile").read_text()))
    assert run <= set(BENCHES)
    assert set(BENCHES) - {PART} <= run, set(BENCHES) - run


@pytest.mark.parametrize("name", sorted(set(BENCHES) - OWN))
def test_options_and_exit_codes_are_the_harness(name: str) -> None:
    tree = ast.parse((BENCH / f"{name}.py").read_text())
    called = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    assert "argparse.ArgumentParser" not in called
    assert called & {"parser", "quick_options", "truth_options", "options"}
    assert "finish" in called
    if name not in PRINTING:
        assert "print" not in called


def test_lines_of_a_figure(bench_scripts: None, capsys: pytest.CaptureFixture[str]) -> None:
    harness = importlib.import_module("_bench")
    good = harness.BenchFigure("a", 1.0, 2.0, True, "%")
    bad = harness.BenchFigure("b", float("nan"), 2.0, False)
    assert harness.finish([good], False, {}, [harness.table(("x", "y"), [("one", 2.0)])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["x    y", "one  2"]
    assert "PyTorch" in lines[-2] and lines[-1] == "a: 1% (goal at most 2%) holds"
    assert harness.finish([good, bad], True, {"k": 1}) == 1
    document = json.loads(capsys.readouterr().out)
    assert [each["holds"] for each in document["figures"]] == [True, False]
    assert document["details"] == {"k": 1} and "PyTorch" in document["machine"]


def test_bad_input_and_what_is_absent_are_one_line(
    bench_scripts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = importlib.import_module("_bench")
    for status, call in (
        (2, lambda: harness.leave("no such file")),
        (3, lambda: harness.needs("json", "no_such_package")),
    ):
        with pytest.raises(SystemExit) as stopped:
            call()
        assert stopped.value.code == status
        assert len(capsys.readouterr().err.splitlines()) == 1


# -- measurements that are not made ---------------------------------------------------------------

MEMORY: Final = {"allocated_bytes": 5 << 30, "reserved_bytes": 5 << 30, "device_bytes": 6 << 30}
PLAN: Final[dict[str, Any]] = {
    "now": {"by_kind_bytes": {"parameter": 1, "gradient": 1, "optimizer_state": 1},
            "by_module_bytes": {}, "memory": MEMORY},
    "other_amp": {"memory": {"allocated_bytes": 6 << 30}},
    "seconds": 1.0,
    "speed": {"now": {"seconds": 0.01},
              "paced": {"slowed": [{"seconds": 0.012}, {"seconds": 0.02}]}},
    "remedies": {"before": MEMORY, "largest_batch": 8, "items": [
        {"name": "a", "status": "tried", "memory": MEMORY, "extra": None, "largest_batch": 9}]},
}  # fmt: skip
ENCODER: Final = {"path": "ACTPolicy.encoder", "by_hand_bytes": 1, "simulated_bytes": 1}
HAND: Final = {"by_hand_bytes": 1 << 30, "buffer_bytes": [1, 2], "parts": [ENCODER]}
COST: Final = dict.fromkeys(
    ("ms", "cpu_ms", "step_ms", "recorder_percent_by_itself", "sampler_percent_of_cores",
     "noise_ms", "cpu_noise_ms"), 0.1,
) | dict.fromkeys(("interval", "cpu_interval", "noise_interval"), (0.0, 0.2))  # fmt: skip
ROW: Final = {"script": "x", "own": 1.0, "launch": 1.0, "best": 1.0, "best_is": "2 × 2",
              "regret": 0.0, "slower": 0.0, "same_line": True}  # fmt: skip
LINE: Final = {"gpu": "A100", "kind": "GEMM m <= 64", "rows": 9, "median": 1.0, "p90": 2.0,
               "bias": 0.0}  # fmt: skip
SAID: Final = {"allocated": 35 << 30, "reserved": 22 << 30, "accelerate": 1, "deepspeed": 1}


def page_of(_recording: Path, page: Path, _cache: str) -> float:
    page.write_text("page")
    return 1.0


#: By bench: its options, and what stands in the place of its measurements.
STUBS: Final[dict[str, tuple[list[str], dict[str, Any]]]] = {
    "doctor": ([], {"seconds": lambda _: 0.5, "mutations": list}),
    "trace": ([], {"measure": lambda *_: dict.fromkeys(
        ("trainfit", "FakeTensorMode", "MemTracker"), SimpleNamespace(warm_s=1.0, cold_s=2.0)),
        "asdict": vars}),
    "watch_overhead": ([], {"overhead": lambda *_: COST, "growth": lambda _: {"mib": 0.1}}),
    "noise_scale": ([], {"quadratic": lambda *_: (0.01, 0.9), "cost": lambda _: 0.01}),
    "loader_model": ([], {"overheads": lambda: MADE.Overheads(0, 0, 0, 0),
                          "predict": lambda *_: 10.0, "measure": lambda *_: 10.1}),
    "pace": ([], {
        "pacing": lambda _: {"sleep_s": 1.0, "hybrid_s": 0.01, "spin_s": 0.01},
        "overhead": lambda: 1e-6,
        "rehearsal": lambda _: {"back_to_back": 1.0, "sleep": 2.0, "rehearse": 1.1, "made": 0.9},
        "attribution": lambda _: {name: (1.0, "") for name, *_ in MADE.CASES},
        "the_seeds_case": lambda: {"offline_s": 0.0144, "fast_s": 0.0144, "slow_s": 0.022,
                                   "cured_s": 0.0144}}),
    "report_page": ([], {"large_recording": lambda _: SimpleNamespace(save=lambda _: None),
                         "seconds_of": page_of, "drawn_after": lambda _: 1.0}),
    "act": ([], {"make_dataset": lambda _: None, "run_plan": lambda _: PLAN,
                 "plan_policy": lambda: PLAN, "by_hand": lambda _: HAND,
                 "search_seconds": lambda _: 0.2}),
    "remedies": ([], {"make_dataset": lambda _: None, "run_plan": lambda *_: PLAN}),
    "launch": (["--only", "blas"], {"studied": lambda *_: ROW}),
    "seeds": (["--only", "gpus-t4"], {"answers": lambda named: [(n, "", 1.0) for n in named]}),
    "watch_rules": (["--quick"], {
        "samples": lambda *_: [MADE.make((cause,), 1000 * n) for n, cause in
                               enumerate(MADE.CAUSES)] + [MADE.make((), 500_000)],
        "ours": lambda _: set(), "busy_silent": lambda: 100.0}),
    "kernel_accuracy": (["--data", "."], {
        "FILES": (), "compared": lambda *_: [None],
        "ClassErrors": SimpleNamespace(of=lambda _: MADE_LINE(**LINE)), "read_accepted": dict}),
    "speed_accuracy": (["--data", "."], {
        "TABLES": (), "simulated": lambda _: ({}, {"a": "no such model"}),
        "zero_shot": lambda *_: {"trainfit": MADE.np.array([5.0, -5.0])}}),
    "memory_truth": ([], {"read_all": lambda _: [1], "in_processes": lambda *_: [
        MEASURED.ComparedMemory("a", "T4", None, 9, (100, 100), (100, 101))]}),
    "speed_truth": ([], {"read_all": lambda *_: [1], "in_processes": lambda *_: [
        MEASURED.ComparedStep("T4", "a", 8, 1.0, 1.1, None)]}),
    "golden": (["--only", "no such case"], {}),
}  # fmt: skip
MADE: Any = SimpleNamespace()
MEASURED: Any = SimpleNamespace()
MADE_LINE: Callable[..., Any] = dict


@pytest.mark.parametrize("name", some_of(sorted(STUBS), 6))
def test_it_prints_its_goal_lines_last(
    name: str,
    bench_scripts: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, stubs = STUBS[name]
    module = importlib.import_module(name)
    monkeypatch.setattr(sys.modules[__name__], "MADE", module)
    monkeypatch.setattr(sys.modules[__name__], "MEASURED", module)
    monkeypatch.setattr(sys.modules[__name__], "MADE_LINE", getattr(module, "ClassErrors", dict))
    for attribute, stub in stubs.items():
        monkeypatch.setattr(module, attribute, stub)
    for as_json in (False, True):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words, *(["--json"] if as_json else [])])
        assert module.main() in (0, 1)
        text = capsys.readouterr().out
        if as_json:
            found = json.loads(text)
            assert found["figures"] and "PyTorch" in found["machine"]
        else:
            lines = text.splitlines()
            goals = [line for line in lines if GOAL.match(line)]
            assert goals and lines[-len(goals) :] == goals, text
            assert "PyTorch" in lines[-len(goals) - 1]


def test_published_fine_tuning_is_compared_row_by_row(
    bench_scripts: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "fms_a100_80gb.csv").write_text(
        "model,framework,r,gpus,batch_size,peak_allocated_bytes\n"
        f"ibm/PowerLM-3b,none,,1,4,{35 << 30}\n"
        f"ibm/PowerLM-3b,none,16.0,2,2,{34 << 30}\n"
        "ibm/PowerLM-3b,baseline-peft-bnb,16.0,1,4,1\n"
    )
    (tmp_path / "peft_l40s.csv").write_text(
        "task,experiment,model,batch_size,reserved_max_bytes\n"
        f"MetaMathQA,lora--x,meta-llama/Llama-3.2-3B,4,{22 << 30}\n"
        "image-gen,full,x,2,1\n"
    )
    module = importlib.import_module("llm_memory")
    monkeypatch.setattr(module, "needs", lambda *_: None)
    monkeypatch.setattr(module, "simulated", lambda row, _: SAID)
    words = ["--data", str(tmp_path)]
    assert module.main(words) == 1
    text = capsys.readouterr().out
    assert "full, 1 GPU, batch 4" in text and "LoRA r=16, 2 GPU" in text
    # The row of two GPUs is off by 2.9%; those of one are not.
    short = [line for line in text.splitlines() if line.endswith("short")]
    assert [line.partition(":")[0] for line in short] == ["fsdp_median_error"]
    assert "fms_worst_error: 0% (goal at most 4%) holds" in text
    monkeypatch.setattr(module, "simulated", lambda row, _: "OutOfMemoryError")
    assert module.main(words) == 1
    assert "not simulated: OutOfMemoryError" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        module.main(["--data", str(tmp_path / "none")])
