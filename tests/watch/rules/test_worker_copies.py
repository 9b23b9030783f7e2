"""What workers copy, as it is said of a run."""

from __future__ import annotations

import pytest

from helpers_watch import finding, kinds, loader, run
from trainfit.report.watch import answer
from trainfit.results.runs.watched import WorkerCopies
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge


def judged(copies: WorkerCopies, method: str = "fork") -> WatchResult:
    return judge(run(header={"copies": copies, "loaders": loader(start_method=method)}))


def test_each_is_said_with_its_fix() -> None:
    copies = WorkerCopies({"dataset.file": "h5py.File"}, ("dataset.rng",), (), False, 1, 4)
    result = judged(copies)
    assert set(kinds(result)) == {"shared_handle", "generator_copied", "empty_workers"}
    assert "dataset.file (h5py.File) is opened" in finding(result, "shared_handle").title
    assert "default_rng" in finding(result, "generator_copied").fix.action
    assert finding(result, "empty_workers").fix.settings == {"num_workers": "3"}


def test_workers_that_repeat_each_other_come_before_what_costs_time() -> None:
    result = judge(
        run(
            header={"copies": WorkerCopies(same_batches=True, workers=4)},
            fetches={"fetch_s": 0.8},
            input_s=0.1,
            queued=0,
        )
    )
    assert answer(result).startswith("Each worker yields all samples")
    assert "input_bound" in kinds(result)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_have_their_own_handles(method: str) -> None:
    assert kinds(judged(WorkerCopies({"dataset.file": "h5py.File"}, workers=2), method)) == []


def test_a_seed_that_worker_init_fn_sets() -> None:
    found = finding(judged(WorkerCopies(by_workers=("numpy.random",))), "generator_copied")
    assert "seeded alike by worker_init_fn" in found.title
    assert "torch.initial_seed()" in found.fix.action


def test_workers_that_have_all_ended_are_not_short_of_shards() -> None:
    assert kinds(judged(WorkerCopies(empty=2, workers=2))) == []


@pytest.mark.parametrize(("input_s", "first"), [(0.02, "generator_copied"), (0.5, "input_bound")])
def test_random_numbers_that_repeat_come_before_a_small_wait(input_s: float, first: str) -> None:
    copies = WorkerCopies(by_workers=("dataset.rng",), workers=2)
    result = judge(run(header={"copies": copies, "loaders": loader()}, input_s=input_s))
    assert kinds(result)[0] == first and {"generator_copied", "input_bound"} <= set(kinds(result))


def test_few_shards_are_why_batches_are_late_where_more_workers_would_help() -> None:
    """Of four workers two have no samples, and those that have wait for what they read."""
    words = {"fetches": {"fetch_s": 0.8, "cpu_s": 0.05}, "input_s": 0.1, "queued": 0}
    few = WorkerCopies(empty=2, workers=4)
    found = finding(judge(run(header={"copies": few}, **words)), "input_bound")
    assert found.title.endswith(": 2 of 4 workers get samples") and not found.fix.settings
    assert "more files" in found.fix.action
    all_fed = finding(
        judge(run(header={"copies": WorkerCopies(workers=4)}, **words)), "input_bound"
    )
    assert "get samples" not in all_fed.title and all_fed.fix.settings
