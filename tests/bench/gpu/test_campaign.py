"""The truth campaign's parts: its cases, its columns, its search, its options."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfit.results.files.errors import ResultFileError

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

import _truth_files as types_of_truth  # noqa: E402
from _truth_files import TruthCase, read_truth  # noqa: E402
from gpu import (  # noqa: E402
    campaign,
    cases,
    children,
    events,
    families,
    family_cases,
    machine,
    measure,
    models,
    reports,
)  # fmt: skip
from gpu.capped import CappedSearch  # noqa: E402

MIB = 1 << 20


# -- cases -----------------------------------------------------------------------------------------


def test_there_are_enough_cases_of_every_kind() -> None:
    every = cases.all_cases()
    plain = [case for case in every if case.cap_bytes is None]
    # Without those whose packages may be absent there are still more than 60.
    own = [case for case in plain if not models.MODELS[case.model].needs]
    assert len(own) >= 60
    assert {case.precision for case in own} == {"fp32", "bf16", "fp16"}
    assert {case.optimizer for case in own} == {"sgd", "momentum", "adam", "adamw"}
    assert {case.kind for case in own} == {"default", "foreach", "fused", "loop"}
    assert {case.tf32 for case in own} == {"default", "on", "off"}
    for name in ("checkpointing", "channels_last", "benchmark", "clip"):
        assert any(getattr(case, name) for case in own), name
    assert any(case.accumulation > 1 for case in own)
    assert len([case for case in every if case.cap_bytes]) >= 8
    wanted = {"act", "vgg16", "resnet18", "resnet50", "convnext_tiny", "vit_b16", "unet", "ssd",
              "bert_base", "gpt2", "lstm"}  # fmt: skip
    assert wanted <= {case.model for case in own}


def test_names_are_files_and_say_what_they_are() -> None:
    for case in cases.all_cases():
        assert case.model in models.MODELS
        assert all(letter.isalnum() or letter in "-." for letter in case.name), case.name
    timed = cases.timed_cases()
    assert set(cases.QUICK) <= {case.name for case in (*cases.all_cases(), *timed)}
    # What is asked of step times: five models, five batch sizes, two precisions, and more.
    assert len({each.name for each in timed}) == len(timed) >= 30
    assert {each.case.model for each in timed} <= models.MODELS.keys()
    assert all(len(set(each.batches)) == 5 for each in timed[:10])


def test_every_family_has_a_case_and_every_case_a_job() -> None:
    models = [case.model for case in family_cases.CASES]
    assert len(set(models)) == len(models)
    assert set(models) == families.FAMILIES.keys() > family_cases.LARGE
    assert {job.shape for _, job in family_cases.LANGUAGE.values()} == family_cases.SHAPES.keys()
    taken = {case.name for case in cases.all_cases()}
    assert not taken & {case.name for case in family_cases.CASES}


def test_large_cases_are_never_two_at_a_time() -> None:
    jobs = [campaign.job_of(case) for case in family_cases.CASES]
    for lanes in (1, 2, 3):
        shares = campaign.in_lanes(jobs, lanes)
        assert sorted(job.name for share in shares for job in share) == sorted(
            job.name for job in jobs
        )
        assert max(map(len, shares)) - min(map(len, shares)) <= lanes
        for share in shares[1:]:
            assert not family_cases.LARGE & {job.case.model for job in share}
        # Each goes on in the order given.
        assert all(share == [job for job in jobs if job in share] for share in shares)
    assert campaign.in_lanes([], 2) == []


def test_what_one_side_writes_the_other_reads() -> None:
    """bench/gpu needs no trainfit, so both say the same twice."""
    fields = {field.name: field.type for field in dataclasses.fields(cases.Case)}
    assert fields == {field.name: field.type for field in dataclasses.fields(TruthCase)}
    assert types_of_truth.FORMAT == measure.FORMAT
    assert types_of_truth.VERSION == measure.VERSION
    assert types_of_truth.SIZED == events.SIZED
    assert set(events.LETTERS.values()) | {"f"} == types_of_truth.LETTERS


def test_packages_are_those_that_the_models_need() -> None:
    def needed(model: str) -> str | None:
        prefixes = [p for p in campaign.NEEDS if model == p or model.startswith(f"{p}_")]
        return campaign.NEEDS[prefixes[0]] if prefixes else None

    for name, model in models.MODELS.items():
        assert (needed(name),) == (model.needs or (None,)), name


@pytest.mark.parametrize(
    ("patterns", "count"),
    [(["mlp-fp32-sgd-fused-b256"], 1), (["mlp-*-fused-*"], 4), (["no such"], 0), ([], None)],
)
def test_cases_are_chosen_by_pattern(patterns: list[str], count: int | None) -> None:
    found = cases.chosen(patterns)
    assert len(found) == (len(cases.all_cases()) if count is None else count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mlp", "convnext_tiny",
     *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet18", "lstm", "ssd", "unet"))],
)  # fmt: skip
def test_models_train_on_the_cpu(name: str) -> None:
    """A model of ours computes a loss whose gradient reaches every parameter."""
    model = models.MODELS[name]
    module = model.build()
    model.loss(module, model.batch(1 if name != "ssd" else 2)).backward()
    # SSD does not use ResNet's own head.
    unused = {"trunk.head.2.weight", "trunk.head.2.bias"} if name == "ssd" else set()
    missing = {n for n, p in module.named_parameters() if p.grad is None}
    assert missing == unused


# -- the profiler ----------------------------------------------------------------------------------


def test_every_block_is_reported() -> None:
    """On the CPU, whose allocator reports to the profiler in the same way."""
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    norm = torch.nn.BatchNorm2d(8)
    with reports.profiler() as profile:
        norm(x).sum().backward()
        kept = torch.empty(1000)
    block_bytes = reports.read(profile, "cpu")["block_bytes"]
    # native_batch_norm's temporaries, 8 channels of float32, come and go; what is kept stays.
    assert block_bytes.count(32) >= 2 and -32 in block_bytes
    assert block_bytes.count(kept.nbytes) == 1 and -kept.nbytes not in block_bytes


def test_a_profile_of_another_device_is_empty() -> None:
    with reports.profiler() as profile:
        torch.randn(5).sort()
    nothing = {"allocated_before_bytes": 0, "block_bytes": [], "sums_agree": True}
    assert reports.read(profile) == nothing


# -- the machine -----------------------------------------------------------------------------------


class FakeNvml(types.ModuleType):
    """The parts of pynvml that are used."""

    def __init__(self, processes: dict[int, int]) -> None:
        super().__init__("pynvml")
        self.processes = processes
        self.handles: list[Any] = []

    def nvmlInit(self) -> None:
        return None

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.handles.append(index)
        return "device"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.handles.append(uuid)
        return "device"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetMemoryInfo(self, device: str) -> Any:
        return types.SimpleNamespace(used=7 * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, device: str) -> list[Any]:
        return [
            types.SimpleNamespace(pid=pid, usedGpuMemory=used)
            for pid, used in self.processes.items()
        ]


@pytest.mark.parametrize(
    ("processes", "mine"),
    [({0: 5, 1: 9}, 5), ({1: 9}, 9), ({1: 9, 2: 8}, None), ({}, None)],
)
def test_nvml_knows_driver_and_used_memory(
    processes: dict[int, int], mine: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = {pid or os.getpid(): used for pid, used in processes.items()}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(running))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    nvml = machine.ManagementLibrary()
    assert nvml._nvml.handles == [2]
    assert nvml.driver() == "580.1"
    assert nvml.device_used() == 7 * MIB
    assert nvml.process_used() == mine


def test_without_nvml_nvidia_smi_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $1 in *driver*) echo 535.2;; *memory.used) echo 300;;"
        f" *apps*) echo '{os.getpid()}, 250'; echo '[N/A], [N/A]';; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nvml = machine.ManagementLibrary()
    assert nvml.driver() == "535.2"
    assert nvml.device_used() == 300 * MIB
    assert nvml.process_used() == 250 * MIB


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    nvml = machine.ManagementLibrary()
    assert (nvml.driver(), nvml.device_used(), nvml.process_used()) == (None, None, None)


# -- the search for a limit ------------------------------------------------------------------------


def search(limit: int, predicted: int, most: int = 10) -> CappedSearch:
    """A search on a GPU on which batches up to ``limit`` run."""
    found = CappedSearch(predicted, most)
    while (batch := found.next()) is not None:
        found.tell(batch, "ran" if batch <= limit else "out_of_memory")
    return found


def test_a_right_prediction_takes_two_runs() -> None:
    found = search(37, 37)
    assert found.tries == [(37, "ran"), (38, "out_of_memory")]
    assert found.complete and found.largest_ran == 37


@given(limit=st.integers(0, 500), predicted=st.integers(0, 500))
def test_the_limit_is_found_whatever_was_predicted(limit: int, predicted: int) -> None:
    found = search(limit, predicted, most=100)
    assert found.complete
    assert (found.largest_ran, found.smallest_full) == (limit, limit + 1)
    batches = [batch for batch, _ in found.tries]
    assert len(set(batches)) == len(batches) and min(batches) >= 1


def test_a_search_ends_after_so_many_runs() -> None:
    found = search(500, 1, most=4)
    assert len(found.tries) == 4 and not found.complete
    assert found.result()["smallest_full"] is None


def test_a_search_ends_where_a_run_fails() -> None:
    found = CappedSearch(5)
    found.tell(5, "failed")
    assert found.next() is None and not found.complete


# -- the command -----------------------------------------------------------------------------------


def run(*words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "gpu" / "campaign.py"), *map(str, words)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **more}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--time-limit", "0"], "--time-limit and --case-limit must be above 0"),
        (["--out", __file__], "not a folder"),
        (["--lanes", "0"], "--lanes and --events must be 1 or more"),
        (["--simulate", "T4"], "a rehearsal is no truth"),
        (["--simulate", "T5", "--out", "elsewhere"], "--simulate: unknown GPU: 'T5'"),
    ],
)
def test_bad_options_are_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        campaign.parse(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_pattern_that_nothing_matches_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert campaign.main(["--only", "zzz", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "--only zzz: no such result; --list shows all\n"


def _results() -> int:
    return len(cases.all_cases()) + len(cases.timed_cases())


def test_the_list_names_everything_once(tmp_path: Path) -> None:
    done = run("--list", "--out", tmp_path, cwd=tmp_path)
    names = done.stdout.split()
    assert done.returncode == 0
    assert len(names) == len(set(names)) == _results()
    assert list(tmp_path.iterdir()) == []


def test_families_are_listed_alone_and_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--families", "--list"]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(c.name for c in family_cases.CASES)
    assert campaign.main(["--families", "--only", "pyg-*", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["pyg-gat-b1"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "no NVIDIA GPU that torch can use: nothing was measured" in done.stderr


def test_a_failed_or_skipped_result_is_made_again(tmp_path: Path) -> None:
    one = campaign.Campaign(campaign.parse(["--out", str(tmp_path)]))
    for status, done in (("failed", False), ("skipped", False), ("ran", True)):
        measure.write(tmp_path / "x.json.gz", {"status": status})
        assert one.done("x") is done
    (tmp_path / "x.json.gz").write_bytes(b"\x1f\x8b cut short")
    assert not one.done("x")
    one.close()


def test_no_child_is_left_behind(tmp_path: Path) -> None:
    request = {"output": str(tmp_path / "x.json"), "simulate": None, "waits": True,
               "kind": "case", "profile": False,
               "case": dataclasses.asdict(cases.all_cases()[0])}  # fmt: skip
    child = children.MeasuringProcess(tmp_path, "x", request, "")
    process = child._process
    children.stop_all()
    assert process.poll() is not None


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    hanging = tmp_path / "hang.py"
    hanging.write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    before = children.MEASURE
    children.MEASURE = hanging
    try:
        child = children.MeasuringProcess(tmp_path, "x", {}, "")
    finally:
        children.MEASURE = before
    assert child.measure(0.2) == "it took longer than 0 s"
    assert child._process.poll() is not None


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "damaged"),
        (b"[]", "not a truth file"),
        (json.dumps({"format": "trainfit-gpu-truth", "version": 9}).encode(), "version 9"),
        (
            json.dumps({"format": "trainfit-gpu-truth", "version": 1, "trace": {}}).encode(),
            "Truth has no 'status'",
        ),
    ],
)
def test_files_that_are_no_truth_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ResultFileError, match=reason):
        read_truth(path)


def test_a_failure_holds_nothing_to_compare(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    result = {"format": measure.FORMAT, "version": measure.VERSION, "status": "failed"}
    measure.write(path, result)
    assert read_truth(path) is None
