"""What a memory snapshot tells, on training code whose fault is known (simulated device)."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainfit
from tests.memory.snapshot import scenarios
from trainfit.memory.snapshot_report import explain_snapshot
from trainfit.results.memory import SnapshotReport

MIB = 1 << 20
Explain = Callable[..., SnapshotReport]


@pytest.fixture
def explained(tmp_path: Path) -> Explain:
    """Runs training code with the history on, and explains what PyTorch dumps afterwards."""

    def run(code: Callable[..., None], *words: object, gpu: str = "custom:8GiB") -> SnapshotReport:
        path = tmp_path / "snapshot.pickle"
        with trainfit.simulate(gpu):
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                code(*words)
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
        return explain_snapshot(path)

    return run


def kinds(report: SnapshotReport) -> list[str]:
    return [finding.kind for finding in report.findings]


def test_a_training_without_a_fault(explained: Explain) -> None:
    report = explained(scenarios.plain)
    assert report.why == "peak"
    assert report.fits
    assert kinds(report) == ["memory_mostly"]
    # 4 layers of 1024 x 1024 and 1024 numbers: the parameters once, Adam's state twice (and what
    # its step works in at the peak).
    weights = 4 * (1024 * 1024 + 1024) * 4
    assert report.by_kind_bytes["parameter"] == weights
    assert report.by_kind_bytes["optimizer_state"] >= 2 * weights
    assert report.allocated_bytes == sum(report.by_kind_bytes.values())


def test_the_replay_reserves_what_the_run_did(explained: Explain) -> None:
    report = explained(scenarios.plain)
    assert report.replayed
    assert report.settings[0].reserved_bytes == report.reserved_bytes


@pytest.mark.parametrize(
    ("code", "kind", "line"),
    [
        (scenarios.predictions_kept, "tensors_kept", "kept.append(net(x))"),
        (scenarios.losses_kept, "tensors_kept", "loss = (net(x)"),
        (scenarios.large_vocabulary, "logits_copied", "F.cross_entropy"),
    ],
)
def test_the_cause_and_its_line(
    explained: Explain, code: Callable[[], None], kind: str, line: str
) -> None:
    finding = explained(code).findings[0]
    assert finding.kind == kind
    assert finding.fix.action
    source = Path(scenarios.__file__).read_text().splitlines()
    assert line in source[finding.at.line - 1]


def test_a_kept_checkpoint(explained: Explain, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    torch.save(scenarios.model(layers=6).state_dict(), file)
    report = explained(scenarios.checkpoint_kept, file)
    assert kinds(report)[0] == "checkpoint_on_gpu"
    assert report.by_kind_bytes["loaded"] == report.by_kind_bytes["parameter"]


def test_one_checkpoint_around_everything(explained: Explain) -> None:
    assert "one_checkpoint" in kinds(explained(scenarios.one_checkpoint))
    assert "one_checkpoint" not in kinds(explained(scenarios.block_checkpoints))


@pytest.mark.parametrize(
    "code", [scenarios.many_layers, scenarios.layers_of_a_function, scenarios.block_checkpoints]
)
def test_layers_of_one_pass_are_not_kept(explained: Explain, code: Callable[[], None]) -> None:
    assert "tensors_kept" not in kinds(explained(code))


def test_a_failed_try_that_is_still_there(explained: Explain) -> None:
    report = explained(scenarios.failed_try_alive, gpu="custom:2GiB")
    assert report.why == "out_of_memory"
    assert report.failures == 2
    assert report.requested_bytes == 2 << 30
    assert kinds(report)[0] == "failed_try_alive"


def test_fragments(explained: Explain) -> None:
    report = explained(scenarios.fragmented, gpu="custom:1500MiB")
    finding = report.findings[0]
    assert finding.kind == "fragmented"
    assert report.requested_bytes == 500 * MIB
    assert report.reserved_bytes - report.allocated_bytes > 500 * MIB
    assert not report.settings[0].fits
    assert "expandable_segments:True" in finding.fix.action
    assert report.best_setting is not None
    assert report.best_setting.fits


def test_the_failed_request_is_the_moment(explained: Explain) -> None:
    """What happens after the failure does not change what is said of it."""

    def fails_then_frees() -> None:
        held = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        try:
            torch.empty(4000 * MIB, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            held.clear()
            torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")

    report = explained(fails_then_frees, gpu="custom:3GiB")
    assert report.why == "out_of_memory"
    assert report.allocated_bytes == 800 * MIB
    assert report.largest_free_bytes is None  # of the end, not of that moment


def test_a_history_that_begins_late(explained: Explain, tmp_path: Path) -> None:
    """Memory from before it is there, without its origin."""
    path = tmp_path / "late.pickle"
    with trainfit.simulate("custom:8GiB"):
        net = scenarios.model().to("cuda")
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        scenarios.train(net, steps=1)
        path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
    report = explain_snapshot(path)
    assert report.by_kind_bytes["before_history"] == report.begins_before_bytes
    assert report.begins_before_bytes == 4 * (1024 * 1024 + 1024) * 4
    assert any("before the history begins" in note for note in report.notes)


def test_the_ring_of_entries_overwrites_the_oldest(explained: Explain, tmp_path: Path) -> None:
    path = tmp_path / "ring.pickle"
    with trainfit.simulate("custom:8GiB"):
        torch.cuda.memory._record_memory_history(max_entries=50)
        scenarios.plain()
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        allocated = torch.cuda.memory_allocated()
        path.write_bytes(pickle.dumps(snapshot))
    report = explain_snapshot(path)
    assert report.events <= 50
    assert report.allocated_bytes >= allocated
