"""Faults that are found before a loader is tuned, and the settings that faults leave."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainfit.loader.measure.probe_runs import (
    HARMLESS,
    UNSAFE,
    SettingConstraints,
    bounds,
    bounds_of,
)
from trainfit.loader.measure.processes import captured_stderr
from trainfit.loader.measure.workload import Workload
from trainfit.loader.pickling import (
    LARGE_BYTES,
    find_culprits,
    guard_problem,
    pickled,
    session_problem,
)
from trainfit.loader.preflight import (
    check,
    check_sampler,
    check_start,
    check_workers,
    judge_sampler,
)
from trainfit.loader.sharding import WorkerSamples, check_sharding, digest, judge
from trainfit.results.dataloader import LoaderSettings, StartMethod
from trainfit.results.findings import Finding, failure_finding

SPAWN = LoaderSettings(2, start_method="spawn")
FORK = LoaderSettings(2, start_method="fork")


class Samples(Dataset[Any]):
    """A data set that holds what it is given."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index)


def workload(dataset: Any, **arguments: Any) -> Workload:
    return Workload(DataLoader(dataset, **{"batch_size": 2} | arguments))


# --- Pickling ---------------------------------------------------------------------------------


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)


def test_what_cannot_be_pickled_is_named_with_its_path() -> None:
    transform = Compose(abs, lambda x: x)
    data = Samples(root="/data", transform=transform, lock=threading.Lock())
    found = pickled(workload(data))
    assert found.nbytes is None
    paths = [each.path for each in found.culprits]
    assert paths == ["dataset.transform.transforms[1]", "dataset.lock"]
    assert "<lambda>" in found.culprits[0].what and "test_preflight.py" in found.culprits[0].what
    assert found.fault is not None and found.fault.kind == "not_picklable"
    assert "and 1 more" in found.fault.title


def test_an_open_file_and_a_generator_are_named_by_their_types(tmp_path: Path) -> None:
    with open(tmp_path / "f", "w") as stream:
        culprits = find_culprits(Samples(file=stream, rows={"a": iter(lambda: 1, 2)}), "dataset")
    assert str(culprits[0]).startswith("dataset.file (_io.TextIOWrapper): TypeError")
    assert len(culprits) == 1 or culprits[1].path == "dataset.rows['a']"


class Environment:
    """As lmdb's: its type does not say which module it is of, and it refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Environment' object")


Environment.__module__ = "builtins"


class Reopens(Samples):
    """Leaves its handle out of the pickle."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"env": None}


def test_a_handle_that_is_open_before_the_workers_is_opened_in_them(tmp_path: Path) -> None:
    """Under fork, too: "use fork" would share it."""
    (tmp_path / "f").write_text("text")
    with open(tmp_path / "f") as stream, zipfile.ZipFile(tmp_path / "z", "w") as archive:
        for held in (Environment(), stream, archive):
            data = workload(Samples(env=held))
            for start in ("fork", "spawn"):
                (fault,) = check_start(data, LoaderSettings(2, start_method=start))
                assert fault.kind == "shared_handle" and "dataset.env" in fault.title
                assert (
                    fault.fix.action.startswith("open it in the worker")
                    and "fork" not in fault.fix.action
                )
                # It can only be measured as it is.
                assert bounds_of(fault).start_methods == ("fork",)
    fork, spawn = LoaderSettings(2), LoaderSettings(2, start_method="spawn")
    assert [each.kind for each in check_start(workload(Reopens(env=Environment())), fork)] == [
        "shared_handle"
    ]
    assert check_start(workload(Reopens(env=Environment())), spawn) == ()


def test_what_the_first_sample_opened_was_not_open_before_the_workers() -> None:
    """The script took a batch without workers; with workers each of them opens it."""
    late = DataLoader(Reopens(env=Environment()), 2)
    assert check_start(Workload(late, handles={}), FORK) == ()
    both = DataLoader(Reopens(env=Environment(), db=Environment()), 2)
    fault = check_start(Workload(both, handles={"dataset.db": "lmdb.Environment"}), FORK)[0]
    assert fault.kind == "shared_handle" and "dataset.db (lmdb.Environment) is" in fault.title


def test_a_handle_and_a_lambda_are_two_faults() -> None:
    found = check_start(workload(Samples(env=Environment(), f=lambda: 1)), LoaderSettings(2))
    assert [each.kind for each in found] == ["shared_handle", "not_picklable"]
    assert "dataset.f" in found[1].title and "env" not in found[1].cause


def test_closed_files_and_logs_are_no_handles(tmp_path: Path) -> None:
    with open(tmp_path / "f", "w") as stream:
        log = workload(Samples(log=logging.StreamHandler(stream)))
        assert [each.kind for each in check_start(log, LoaderSettings(2))] == ["not_picklable"]
    assert not pickled(workload(Samples(env=stream))).handles
    assert not pickled(workload(Samples(stdin=sys.__stdin__))).handles


def test_the_collate_function_is_sent_too() -> None:
    found = pickled(workload(Samples(), collate_fn=lambda batch: batch))
    assert found.culprits[0].path == "collate_fn"


class Closes(Samples):
    """Leaves its lock out of the pickle, but not its lambda."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name != "lock"}


def test_a_data_set_that_says_itself_what_is_pickled() -> None:
    assert pickled(workload(Closes(lock=threading.Lock()))).culprits == ()
    found = pickled(workload(Closes(lock=threading.Lock(), f=lambda: 1)))
    assert [each.path for each in found.culprits] == ["dataset.f"]


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_slots_cycles_and_shared_objects_are_followed() -> None:
    lock = threading.Lock()
    first = Samples(inner=Slotted(lock))
    first.itself = first  # type: ignore[attr-defined]
    first.again = lock  # type: ignore[attr-defined]
    culprits = find_culprits(first, "dataset")
    assert len(culprits) == 1 and "_thread.lock" in culprits[0].what


def test_the_size_is_the_pickles_and_tensors_stay_where_they_are() -> None:
    tensor = torch.zeros(1 << 20)
    data = Samples(array=np.zeros(3 << 20), tensor=tensor)
    found = pickled(workload(data))
    assert found.nbytes is not None and found.shared_bytes == 4 << 20
    assert 24 << 20 <= found.nbytes < (24 << 20) + 10_000
    assert not tensor.is_shared()
    faults = check_start(workload(data), SPAWN)
    large = next(each for each in faults if each.kind == "large_pickle")
    assert "24 MiB" in large.title and large.cause.startswith("24 MiB (")
    assert "4 MiB of tensors" in large.cause
    assert check_start(workload(data), FORK) == ()
    assert pickled(workload(Samples())).nbytes is not None
    assert LARGE_BYTES == 16 << 20


def test_a_tensor_with_a_history_cannot_be_sent() -> None:
    made = torch.ones(2, requires_grad=True) * 2
    found = pickled(workload(Samples(weights=made)))
    assert (found.culprits[0].path, found.culprits[0].what) == ("dataset.weights", "torch.Tensor")


def test_a_pickle_that_takes_forever_is_no_verdict() -> None:
    class Endless(Samples):
        def __getstate__(self) -> Any:
            threading.Event().wait()

    found = pickled(workload(Endless()), limit_s=0.5)
    assert found.culprits == () and found.fault is None and "more than 500 ms" in found.reason


# --- The script -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch\ntorch.manual_seed(0)\nfor batch in loader:\n    pass\n", 3),
        ("def main():\n    for b in l: pass\n\nmain()\n", 4),
        ("with open('x') as f:\n    for line in f:\n        pass\n", 2),
        ("import sys\nif len(sys.argv) > 1:\n    train()\n", 3),
        ("def main():\n    pass\n\nif __name__ == '__main__':\n    main()\n", None),
        ("import torch\nprint(torch.__version__)\nx = 3\n", None),
    ],
)
def test_a_script_that_works_when_it_is_imported(
    tmp_path: Path, text: str, line: int | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    fault = guard_problem(main)
    assert (fault is None) == (line is None)
    if fault is not None:
        assert fault.kind == "no_main_guard" and f"{script}:{line} " in fault.cause


def test_what_a_session_without_a_file_defines_cannot_be_imported() -> None:
    kind = type("Mine", (Samples,), {"__module__": "__main__"})
    fault = session_problem(workload(kind()), types.ModuleType("__main__"))
    assert fault is not None and fault.kind == "not_importable" and "Mine" in fault.cause
    assert session_problem(workload(Samples()), types.ModuleType("__main__")) is None


# --- Iterable data sets -----------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int, sharded: bool, noise: bool = False) -> None:
        self.samples, self.sharded, self.noise = samples, sharded, noise

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info and self.sharded else (0, 1)
        for index in range(first, self.samples, step):
            yield torch.full((4,), float(index)) + (torch.rand(4) if self.noise else 0)


def test_an_iterable_data_set_that_is_not_sharded_is_found() -> None:
    (fault,) = check_sharding(workload(Stream(200, False)))
    assert fault.kind == "iterable_not_sharded"
    assert "64 of the second worker's 64 samples are also the first worker's" in fault.cause
    assert "get_worker_info()" in fault.fix.action


@pytest.mark.slow
def test_a_sharded_one_is_left_alone() -> None:
    assert check_sharding(workload(Stream(200, True))) == ()
    assert check_sharding(workload(Stream(30, True, noise=True))) == ()
    assert check_sharding(workload(Samples())) == ()


@pytest.mark.slow
def test_samples_with_noise_are_told_by_their_number_or_by_equal_seeds() -> None:
    (fault,) = check_sharding(workload(Stream(20, False, noise=True)))
    assert fault.kind == "iterable_not_sharded"
    assert fault.cause == "one worker yields 20 samples, two yield 40"
    (fault,) = check_sharding(workload(Stream(1000, False, noise=True)))
    assert fault.kind == "iterable_perhaps_not_sharded"
    assert fault.kind in UNSAFE  # a script without workers is advised none until then


def shard_in_init(worker: int) -> None:
    """As PyTorch's documentation has it."""
    info = get_worker_info()
    assert info is not None
    info.dataset.samples = list(info.dataset.samples)[info.id :: info.num_workers]


class Listed(IterableDataset[Any]):
    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


@pytest.mark.slow
def test_sharding_in_worker_init_fn_counts() -> None:
    data = Listed(list(range(100)))
    assert check_sharding(workload(data, worker_init_fn=shard_in_init)) == ()
    (fault,) = check_sharding(workload(data))
    assert fault.kind == "iterable_not_sharded"


class Files(IterableDataset[Any]):
    """Shares out its files."""

    def __init__(self, files: int) -> None:
        self.files = range(files)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = self.files[info.id :: info.num_workers] if info else self.files
        return (torch.full((4,), 1000.0 * file + number) for file in mine for number in range(99))


def test_fewer_shards_than_workers_bound_their_number() -> None:
    """Six of eight workers had nothing to do, and more were advised."""
    (fault,) = check_sharding(workload(Files(1), num_workers=3))
    assert fault.kind == "few_shards" and fault.title.startswith("1 of ")
    assert bounds_of(fault).workers == 1
    assert check_sharding(workload(Files(64))) == ()


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.source = iter(range(10))

    def __iter__(self) -> Iterator[Any]:
        return self.source


def test_an_iterable_data_set_that_is_used_up_after_one_pass() -> None:
    kinds = [fault.kind for fault in check_sharding(workload(Once()))]
    assert "not_restartable" in kinds


def test_samples_that_are_all_alike_tell_nothing() -> None:
    alike = WorkerSamples((("a",) * 64,), False)
    assert judge(alike, WorkerSamples((("a",) * 64, ("a",) * 64), False), None) is None


class Breaks(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("no")


def test_a_data_set_that_fails_is_no_business_of_the_sharding_check() -> None:
    assert check_sharding(workload(Breaks())) == ()


@dataclasses.dataclass
class Point:
    x: int
    image: Any


def test_digests_tell_contents_apart() -> None:
    samples: list[Any] = [
        torch.zeros(3),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(1, 3),
        torch.zeros(0),
        torch.tensor(1.0),
        np.zeros(3),
        np.array(["a", None], dtype=object),
        b"ab",
        "ab",
        1,
        1.0,
        None,
        [1, 2],
        (1, 2),
        [[1], 2],
        {"a": 1},
        Point(1, np.zeros(2)),
        torch.zeros(3, dtype=torch.bfloat16),
    ]
    digests = [digest(each) for each in samples]
    assert None not in digests and len(set(digests)) == len(samples)
    assert [digest(each) for each in samples] == digests
    assert digest([object()]) is None


# --- Samplers ---------------------------------------------------------------------------------


def test_a_slow_sampler_by_its_numbers() -> None:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 10, 10)
    quick = [0.001] * 5
    assert judge_sampler(sampler, quick, FORK, 0.1, None) == ()
    (fault,) = judge_sampler(sampler, [0.001, 0.02, 0.03, 0.02], FORK, 0.1, None)
    # Two workers at 0.1 s give 20 batches/s: 20 ms for each are 40% of the main thread.
    assert "20 ms" in fault.cause and "40%" in fault.cause
    assert "at most 50.0 batches/s" in fault.cause
    assert "WeightedRandomSampler over 10 samples" in fault.title
    (fault,) = judge_sampler(sampler, [3.0, *quick], FORK, 0.1, None)
    assert "3 s before an epoch's first batch" in fault.cause
    assert judge_sampler(sampler, [0.0, 0.02, 0.02], FORK, None, None) == ()
    assert len(judge_sampler(sampler, [0.0, 0.02, 0.02], FORK, None, 100.0)) == 1
    assert judge_sampler(sampler, [], FORK, 0.1, None) == ()


class Sleepy(torch.utils.data.Sampler[int]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[int]:
        for index in range(64):
            threading.Event().wait(self.seconds)
            yield index


def test_a_sampler_is_timed_for_real() -> None:
    slow = workload(Samples(), sampler=Sleepy(0.02))
    (fault,) = check_sampler(slow, FORK, batch_s=0.01)
    assert fault.kind == "slow_sampler" and "Sleepy" in fault.title
    (fault,) = check_sampler(workload(Samples(), sampler=Sleepy(60.0)), FORK, 0.01, limit_s=0.5)
    assert "no batch of indices in 500 ms" in fault.cause


def test_times_that_were_noted_are_used() -> None:
    slow = workload(Samples())
    slow.sampler_seconds += [0.0, 0.5, 0.5]
    (fault,) = check_sampler(slow, FORK, batch_s=0.1)
    assert "500 ms" in fault.cause


def test_a_sampler_that_is_a_generator_ends_with_its_first_epoch() -> None:
    data = Samples()
    (fault,) = check_sampler(workload(data, sampler=(i for i in range(64))), FORK)
    assert fault.kind == "not_restartable"
    batches = DataLoader(data, batch_sampler=iter([[1, 2]]))
    assert check_sampler(Workload(batches), FORK)[0].kind == "not_restartable"
    unbatched = workload(data, batch_size=None, sampler=map(int, range(3)))
    assert [each.kind for each in check_sampler(unbatched, FORK)] == ["not_restartable"]


# --- Workers as such --------------------------------------------------------------------------


class MainOnly(Samples):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            raise RuntimeError("not in a worker")
        return super().__getitem__(index)


def test_a_data_set_that_works_in_the_main_process_only() -> None:
    first, only = check_workers(workload(MainOnly()), FORK, start_methods=("fork",))
    assert first.kind == "worker_exception" and "not in a worker" in first.title
    assert only.kind == "main_process_only" and "not in a worker" in only.cause
    assert bounds((first, only)).nearest(LoaderSettings(8)) == LoaderSettings(0)


class Broken(Samples):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("broken")


def test_a_data_set_that_works_nowhere() -> None:
    faults = check_workers(workload(Broken()), FORK, start_methods=("fork",))
    assert [each.kind for each in faults] == ["worker_exception", "exception"]
    assert bounds(faults).nearest(FORK) is None


class BrokenLater(Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise RuntimeError("broken")
        return super().__getitem__(index)


def test_a_later_sample_that_cannot_be_made_anywhere() -> None:
    faults = check_workers(workload(BrokenLater()), FORK, start_methods=("fork",))
    assert [each.kind for each in faults] == ["worker_exception", "exception"]


class AfterFork(Samples):
    """Hangs in a worker that was forked from a process that holds its lock."""

    def __init__(self) -> None:
        super().__init__(lock=threading.RLock())

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __getitem__(self, index: int) -> Any:
        if "lock" in self.__dict__ and get_worker_info() is not None:
            threading.Event().wait()
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_deadlock_under_fork_is_tried_with_forkserver() -> None:
    (fault,) = check_workers(workload(AfterFork()), FORK, limit_s=20.0)
    assert fault.kind == "deadlock" and "it works with forkserver here" in fault.cause
    assert bounds((fault,)).nearest(LoaderSettings(4)) == LoaderSettings(
        4, start_method="forkserver"
    )


class SlowerInWorkers(Samples):
    def __getitem__(self, index: int) -> Any:
        time.sleep(30.0 if get_worker_info() is not None else 0.6)
        return super().__getitem__(index)


@pytest.mark.slow
def test_no_batch_in_time_is_compared_with_the_main_process() -> None:
    (fault,) = check_workers(workload(SlowerInWorkers()), FORK, limit_s=2.0)
    assert fault.kind == "slow_dataset" and "without workers a batch needs 1." in fault.cause


UNGUARDED = """
import multiprocessing, sys, torch
from torch.utils.data import DataLoader, Dataset
from trainfit.loader.preflight import check, check_workers
from trainfit.loader.measure.workload import Workload

class Mine(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.zeros(2)

loader = DataLoader(Mine(), 2, num_workers=1, multiprocessing_context="spawn")
if multiprocessing.current_process().name == "MainProcess":  # as a tuner would
    workload = Workload(loader)
    found = [*check(workload), *check_workers(workload, workload.present, start_methods=("spawn",))]
    print(*(f"{each.kind}: {each.cause!r}" for each in found), sep="\\n")
    sys.exit()
for batch in loader:
    pass
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_for_real(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    first = done.stdout.splitlines()[0]
    assert first.startswith("no_main_guard: ") and "bootstrapping phase" in first, done


def test_a_good_loader_has_no_faults() -> None:
    good = workload(Samples())
    assert check(good, FORK, batch_s=1.0) == ()
    assert check_workers(good, FORK) == ()


def test_what_is_written_to_stderr_is_kept_and_stderr_comes_back(capfd: Any) -> None:
    with captured_stderr() as output:
        os.write(2, b"from a worker: Too many open files\n")
        subprocess.run(["sh", "-c", "echo child >&2"], check=True)
    os.write(2, b"after")
    assert output.text == "from a worker: Too many open files\nchild\n"
    assert capfd.readouterr().err == "after"


# --- Constraints -------------------------------------------------------------------------------


def fault(kind: str, settings: LoaderSettings | None = None) -> Finding:
    return failure_finding(kind, "", "", "", settings)


EIGHT = LoaderSettings(8, 4)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([fault("worker_killed", EIGHT)], LoaderSettings(4, 4)),
        ([fault("worker_killed", EIGHT), fault("worker_killed", LoaderSettings(4))],
         LoaderSettings(2, 4)),
        ([fault("shm_full", EIGHT)], LoaderSettings(8, 2)),
        ([fault("shm_full", LoaderSettings(4, 2))], LoaderSettings(4, 1)),
        ([fault("open_files", LoaderSettings(1, 1))], LoaderSettings(0)),
        ([fault("deadlock", EIGHT)], LoaderSettings(8, 4, start_method="forkserver")),
        ([fault("deadlock", EIGHT), fault("not_picklable")], LoaderSettings(0)),
        ([fault("not_picklable")], EIGHT),
        ([fault("iterable_not_sharded")], LoaderSettings(1, 4)),
        ([fault("main_process_only")], LoaderSettings(0)),
        ([fault("worker_exception", EIGHT)], LoaderSettings(0)),
        ([fault("exception", LoaderSettings(0))], EIGHT),  # workers are left
        ([fault("exception", LoaderSettings(0)), fault("worker_exception", EIGHT)], None),
        ([fault("collate", EIGHT)], None),
        ([fault(kind) for kind in HARMLESS], EIGHT),
        ([fault("something new", EIGHT)], LoaderSettings(0)),
        ([], EIGHT),
    ],
)  # fmt: skip
def test_the_settings_that_faults_leave(
    faults: list[Finding], expected: LoaderSettings | None
) -> None:
    assert bounds(faults).nearest(EIGHT) == expected


def test_pinning_may_be_what_fails() -> None:
    pinned = LoaderSettings(4, pin_memory=True)
    assert bounds([fault("pin_memory", pinned)]).nearest(pinned) == LoaderSettings(4)
    assert bounds([fault("pin_memory")]).nearest(
        LoaderSettings(0, pin_memory=True)
    ) == LoaderSettings(0)


METHODS: tuple[StartMethod, ...] = ("fork", "spawn", "forkserver")
WANTED = st.builds(
    LoaderSettings,
    st.integers(0, 16),
    st.integers(1, 8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(METHODS),
)
SOME = st.builds(
    SettingConstraints,
    st.none() | st.integers(0, 16),
    st.integers(0, 1),
    st.none() | st.integers(0, 64),
    st.lists(st.sampled_from(METHODS), unique=True).map(tuple),
    st.booleans(),
)


@given(SOME, SOME, WANTED)
def test_what_both_leave_is_what_each_leaves(
    first: SettingConstraints, second: SettingConstraints, wanted: LoaderSettings
) -> None:
    both = first.merge(second)
    found = both.nearest(wanted)
    if found is None:  # workers are needed, and none is left
        assert both.least_workers and both.workers == 0
        return
    assert both.allows(found)
    assert first.allows(found) and second.allows(found)
    assert found.num_workers <= max(wanted.num_workers, both.least_workers)
    assert both.allows(wanted) == (first.allows(wanted) and second.allows(wanted))


@given(WANTED, st.sampled_from(("shm_full", "open_files", "worker_killed", "deadlock", "died")))
def test_falling_back_comes_to_an_end(wanted: LoaderSettings, kind: str) -> None:
    faults: list[Finding] = []
    now: LoaderSettings | None = wanted
    for _ in range(16):
        if now is None:
            break
        faults.append(fault(kind, now))
        following = bounds(faults).nearest(wanted)
        assert following is None or following != now, "the same settings once more"
        now = following
    assert now is None
    assert not bounds(faults).works
