"""Faults of a loader: tried for real where that is cheap, else by the words of PyTorch."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainfit.findings import tracebacks
from trainfit.findings.facts import Failure, FailureContext
from trainfit.findings.tracebacks import parse
from trainfit.hardware.machine.cgroup import OomKills, between, oom_kills
from trainfit.hardware.machine.files import RecordedFiles
from trainfit.hardware.machine.system import System
from trainfit.loader.diagnose import context_of, diagnose, diagnose_run
from trainfit.loader.measure import processes
from trainfit.loader.measure.loop import PacedLoop, failure_of
from trainfit.loader.measure.records import Run
from trainfit.loader.measure.running import run_loader
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Finding
from trainfit.results.runs.measurement import Consumer

FORK2 = LoaderSettings(2, 2, start_method="fork")


class Calls(Dataset[Any]):
    """Samples that a function makes."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def real(
    function: Callable[[int], Any],
    met: LoaderSettings = FORK2,
    limit_s: float = 20.0,
    give_workload: bool = True,
    **known: Any,
) -> Finding:
    """The fault of a real run."""
    workload = Workload(DataLoader(Calls(function), 2))
    run = run_loader(workload, met, seconds=5.0, limit_s=limit_s, most_batches=12)
    seen = context_of(run, limit_s=limit_s, **known)
    return diagnose_run(run, workload if give_workload else None, seen)


def dies_of(number: signal.Signals) -> Callable[[int], Any]:
    def sample(index: int) -> Any:
        if index >= 4 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), number)
        return torch.zeros(3)

    return sample


# --- Workers that die -------------------------------------------------------------------------


def test_a_killed_worker_without_the_kernels_count_was_killed_by_somebody() -> None:
    fault = real(dies_of(signal.SIGKILL))
    assert fault.kind == "worker_killed"
    assert fault.title == "A worker was killed by another process (SIGKILL)"
    assert "-9" in fault.cause and "is unknown" in fault.cause
    fault = real(dies_of(signal.SIGKILL), oom_kills=OomKills(0, 0))
    assert "the kernel counted no OOM kill" in fault.cause
    assert fault.loader == FORK2


class Waits:
    """A sampler of batches that is asked for the second one until a worker is dead: PyTorch's
    handler of SIGCHLD raises out of the wait."""

    def __iter__(self) -> Iterator[list[int]]:
        yield [4]
        time.sleep(20)


def test_a_worker_that_dies_while_its_iterator_is_made_has_an_exit_code() -> None:
    loader = DataLoader(Calls(dies_of(signal.SIGKILL)), batch_sampler=Waits(), num_workers=1)
    loop = PacedLoop(loader, FORK2, Consumer(0.0), 5.0, 12, False, os.getpid())
    failure = processes.call(loop.run, 20.0).value
    assert failure is not None and "killed by signal: Killed" in failure.message
    assert failure.worker_exits == (-9,)


def test_a_worker_that_dies_while_its_end_is_awaited_has_an_exit_code() -> None:
    """Whoever waits for it is where PyTorch's handler of SIGCHLD raises, once for an iterator."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.close()
    words = "DataLoader worker (pid 7) is killed by signal: Killed. "
    worker = mock.Mock(sentinel=receiver, exitcode=-9)
    worker.join.side_effect = [RuntimeError(words), None]
    try:
        receiver.recv()
    except EOFError as error:
        failure = failure_of(error, mock.Mock(_workers=[worker]))
    assert (failure.error_type, failure.message) == ("RuntimeError", words)
    assert "multiprocessing/connection.py" in failure.traceback  # where it broke off
    assert failure.worker_exits == (-9,) and diagnose(failure, FORK2).kind == "worker_killed"


def test_a_killed_worker_with_the_kernels_count_is_the_oom_killers() -> None:
    fault = real(dies_of(signal.SIGKILL), oom_kills=OomKills(1, None))
    assert fault.kind == "worker_killed" and "OOM killer" in fault.title
    assert "this cgroup's count of OOM kills rose by 1" in fault.cause
    assert "fewer workers (1 instead of 2)" in fault.fix.action


@pytest.mark.parametrize("kind", ["ConnectionResetError", "EOFError", "FileNotFoundError"])
def test_a_worker_that_dies_while_its_batch_is_taken_over_is_a_dead_worker(kind: str) -> None:
    trace = (
        '  File "/lib/python3.11/multiprocessing/resource_sharer.py", line 86, in get_connection'
    )
    for exits, found in (((-9,), "worker_killed"), ((-11,), "worker_crashed"), ((), "exception")):
        failure = Failure(kind, "gone", f"{trace}\n{kind}: gone", worker_exits=exits)
        assert diagnose(failure, FORK2).kind == found
    # The same error of the data set's own code is an exception, whatever ended afterwards.
    failure = Failure(kind, "gone", f'  File "/home/me/data.py", line 3\n{kind}: gone', None, (-9,))
    assert diagnose(failure, FORK2).kind != "worker_killed"


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (signal.SIGSEGV, "worker_crashed", "segmentation fault"),
        (signal.SIGABRT, "worker_crashed", "aborted"),
        (signal.SIGILL, "worker_crashed", "instruction"),
        (signal.SIGTERM, "worker_killed", "SIGTERM"),
        (signal.SIGBUS, "shm_full", "/dev/shm"),
    ],
)
def test_the_signal_that_ends_a_worker_is_named(
    number: signal.Signals, kind: str, words: str
) -> None:
    fault = real(dies_of(number))
    assert fault.kind == kind
    assert words in fault.title


def test_a_worker_that_exits() -> None:
    fault = real(lambda index: os._exit(3))
    assert fault.kind == "worker_exited" and fault.title == "A worker ended with exit code 3"


@pytest.mark.parametrize(
    ("code", "kind"), [(-11, "process_crashed"), (-9, "process_killed"), (3, "process_exited")]
)
def test_the_process_that_iterates_may_die_too(code: int, kind: str) -> None:
    fault = diagnose(Failure(exit_code=code), FORK2)
    assert fault.kind == kind
    assert fault.title.startswith("The main process")


def test_workers_that_were_terminated_after_one_died_do_not_hide_it() -> None:
    message = "DataLoader worker (pid(s) 5, 6) exited unexpectedly"
    fault = diagnose(Failure("RuntimeError", message, "", worker_exits=(-15, -11)), FORK2)
    assert fault.kind == "worker_crashed" and "segmentation" in fault.title


# --- Shared memory, files, RAM ----------------------------------------------------------------

SHM = (
    "RuntimeError: DataLoader worker (pid 325) is killed by signal: Bus error. It is possible "
    "that dataloader's workers are out of shared memory. Please try to raise your shared memory "
    "limit.",
    "unable to write to file </torch_12_345_6>: No space left on device (28)",
    "unable to allocate shared memory(shm) for file </torch_12_345>: Resource temporarily "
    "unavailable (11)",
    "unable to resize file </torch_12_345> to the right size: No space left on device (28)",
    "[Errno 28] No space left on device: '/dev/shm/pym-5-xyz'",
)


@pytest.mark.parametrize("message", SHM)
def test_a_full_shm_is_named_by_its_messages(message: str) -> None:
    seen = FailureContext(batch_bytes=100 << 20, shm_free_bytes=64 << 20)
    fault = diagnose(Failure("RuntimeError", message, message), LoaderSettings(8, 4), None, seen)
    assert fault.kind == "shm_full"
    # 33 batches of 100 MiB are 3.22 GiB; a quarter more in whole GiB is 5.
    assert "3.22 GiB" in fault.cause and "64 MiB free" in fault.cause
    assert "--shm-size=5g" in fault.fix.action and "--ipc=host" in fault.fix.action
    assert 'set_sharing_strategy("file_system")' in fault.fix.action


def test_a_semaphore_that_finds_no_room_is_a_full_shm() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/usr/lib/python3.11/multiprocessing/'
        'synchronize.py", line 57, in __init__\n    sl = _multiprocessing.SemLock(\n'
        "OSError: [Errno 28] No space left on device\n"
    )
    fault = diagnose(Failure("OSError", "[Errno 28] No space left on device", text), FORK2)
    assert fault.kind == "shm_full"


def test_a_full_disk_is_not_a_full_shm() -> None:
    message = "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent "
    message += (
        'call last):\n  File "/home/me/data.py", line 7, in __getitem__\n    cache.write(x)\n'
    )
    message += "OSError: [Errno 28] No space left on device\n"
    fault = diagnose(Failure("OSError", message, message), FORK2)
    assert fault.kind == "worker_exception"
    assert "/home/me/data.py:7" in fault.cause and "`cache.write(x)`" in fault.cause


@pytest.mark.parametrize(
    "failure", [Failure("RuntimeError", SHM[0], SHM[0]), Failure(exit_code=-7)]
)
def test_a_bus_error_with_room_in_shm_names_ram_as_well(failure: Failure) -> None:
    seen = FailureContext(batch_bytes=1 << 20, shm_free_bytes=1 << 34, ram_free_bytes=3 << 20)
    fault = diagnose(failure, FORK2, None, seen)
    assert fault.kind == "shm_full" and "is full" not in fault.title
    assert "RAM" in fault.title and "/dev/shm" in fault.title
    assert "that is enough" in fault.cause and "3 MiB of RAM were available" in fault.cause
    assert "fewer workers (1 instead of 2)" in fault.fix.action
    # Nothing is known of either, as in a run whose machine was not looked at.
    assert "RAM" in diagnose(failure, FORK2).title


FILES = (
    "received 0 items of ancdata",
    "[Errno 24] Too many open files",
    "Too many open files. Communication with the workers is no longer possible. Please increase "
    "the limit using `ulimit -n` in the shell",
    "unable to open shared memory object </torch_17933_42> in read-write mode: Too many open "
    "files (24)",
    "unable to open shared memory object </torch_5566_0> in read-write mode",
)


@pytest.mark.parametrize("message", FILES)
def test_too_many_open_files_by_their_messages(message: str) -> None:
    seen = FailureContext(batch_tensors=114, open_files=1024)
    fault = diagnose(Failure("RuntimeError", message, ""), LoaderSettings(4, 2), None, seen)
    assert fault.kind == "open_files"
    assert "114 tensors a batch need 1026 open files" in fault.cause
    assert "ulimit -n" in fault.fix.action and "file_system" in fault.fix.action


@pytest.fixture
def few_files() -> Iterator[None]:
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, former[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_too_many_open_files_for_real(few_files: None) -> None:
    fault = real(lambda index: [torch.zeros(3) for _ in range(200)], limit_s=10.0)
    assert fault.kind == "open_files"


def test_memory_that_runs_out_in_python() -> None:
    def sample(index: int) -> Any:
        raise MemoryError("too large")

    fault = real(sample)
    assert fault.kind == "out_of_memory" and "test_diagnose.py" in fault.cause


# --- Exceptions -------------------------------------------------------------------------------


def test_an_exception_in_a_worker_is_named_with_the_users_line() -> None:
    def sample(index: int) -> Any:
        raise KeyError("frames")

    fault = real(sample)
    assert fault.kind == "worker_exception"
    assert fault.title.endswith("raises KeyError: 'frames'")
    assert "test_diagnose.py" in fault.cause and "in sample" in fault.cause
    assert '`raise KeyError("frames")`' in fault.cause
    assert fault.place is not None and fault.place.file == "tests/loader/faults/test_diagnose.py"


class Awkward(Exception):
    """Cannot be made from a message: PyTorch raises a RuntimeError in its place."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}\n{reason}")


def test_an_exception_that_cannot_be_made_anew_keeps_its_type_and_all_of_its_message() -> None:
    def sample(index: int) -> Any:
        raise Awkward(7, "second line: " + "x" * 500)

    fault = real(sample)
    assert "raises Awkward: 7" in fault.title and len(fault.title) < 250
    assert "second line: " + "x" * 500 in fault.cause


def test_the_last_exception_of_a_chain_counts() -> None:
    def sample(index: int) -> Any:
        try:
            return {}["missing"]
        except KeyError as error:
            raise ValueError("no such clip") from error

    fault = real(sample)
    assert "ValueError: no such clip" in fault.title


def test_samples_that_differ_in_size() -> None:
    fault = real(lambda index: torch.zeros(index + 1))
    assert fault.kind == "collate" and "differ in size" in fault.title
    assert "stack expects each tensor to be equal size" in fault.cause
    assert "not in your code" in fault.cause


def test_an_exception_in_the_main_process() -> None:
    def sample(index: int) -> Any:
        raise ValueError("bad")

    fault = real(sample, LoaderSettings(0))
    assert fault.kind == "exception" and "ValueError: bad" in fault.title
    assert "in sample" in fault.cause


def caught(name: str, message: str) -> Failure:
    text = (
        f"Caught {name} in DataLoader worker process 1.\nOriginal Traceback (most recent call "
        f'last):\n  File "/home/me/train.py", line 12, in __getitem__\n    return self.h[i]\n'
        f"{name}: {message}\n"
    )
    return Failure(name, text, text)


def test_cuda_in_a_forked_worker() -> None:
    message = (
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
        "must use the 'spawn' start method"
    )
    fault = diagnose(caught("RuntimeError", message), FORK2)
    assert fault.kind == "cuda_in_worker" and "spawn" in fault.fix.action
    message = "torch.UntypedStorage(): Storage device not recognized: cuda"  # of a simulated run
    assert diagnose(caught("RuntimeError", message), FORK2).kind == "cuda_in_worker"
    assert "/home/me/train.py:12" in fault.cause


def test_a_handle_from_before_the_fork_is_claimed_only_if_the_data_set_has_one() -> None:
    import zipfile

    failure = caught("BadZipFile", "Bad magic number for file header")
    assert diagnose(failure, FORK2).kind == "worker_exception"
    data = Calls(lambda index: None)
    data.archives = {"a": zipfile.ZipFile(__import__("io").BytesIO(), "w")}  # type: ignore[attr-defined]
    fault = diagnose(failure, FORK2, Workload(DataLoader(data, 2)))
    assert fault.kind == "handle_before_fork"
    assert "dataset.archives['a'] (zipfile.ZipFile)" in fault.title


def test_lmdbs_own_words_are_enough() -> None:
    message = "mdb_txn_begin: MDB_BAD_RSLOT: Invalid reuse of reader locktable slot"
    fault = diagnose(caught("BadRslotError", message), FORK2)
    assert fault.kind == "handle_before_fork"


def test_processes_in_workers() -> None:
    def sample(index: int) -> Any:
        import multiprocessing

        multiprocessing.get_context("fork").Process(target=print).start()

    assert real(sample).kind == "nested_processes"


def test_a_timeout() -> None:
    fault = diagnose(Failure("RuntimeError", "DataLoader timed out after 5 seconds"), FORK2)
    assert fault.kind == "timeout"


def test_the_pinning_thread() -> None:
    assert diagnose(
        Failure("RuntimeError", "Pin memory thread exited unexpectedly"), FORK2
    ).kind == ("pin_memory")
    text = (
        "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent "
        'call last):\n  File "/x/site-packages/torch/utils/data/_utils/pin_memory.py", line 41, in '
        "do_one_step\n    data = pin_memory(data, device)\nRuntimeError: cannot pin 'torch.x'\n"
    )
    fault = diagnose(Failure("RuntimeError", text, text), FORK2)
    assert fault.kind == "pin_memory" and "cannot pin 'torch.x'" in fault.title
    own = '  File "/home/me/train.py", line 9, in pin_memory\n    self.x.pin_memory()\nRuntimeError'
    text = text.replace("RuntimeError: cannot", f"{own}: cannot")
    fault = diagnose(Failure("RuntimeError", text, text), FORK2)
    assert fault.title.startswith("The pin_memory() of a batch raises RuntimeError: cannot pin")
    assert str(fault.place) == "/home/me/train.py:9" and "return self" in fault.fix.action


def test_stop_iteration_in_a_sample_ends_the_loop_without_a_word() -> None:
    def sample(index: int) -> Any:
        raise StopIteration

    for met in (FORK2, LoaderSettings(0)):
        fault = real(sample, met)
        assert fault.kind == "stops_epoch" and "StopIteration" in fault.title
        assert fault.place is not None and fault.place.file.endswith("test_diagnose.py")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_stream_without_a_sample_ends_as_streams_do() -> None:
    workload = Workload(DataLoader(Stream(), 2))
    for met in (FORK2, LoaderSettings(0)):
        assert diagnose_run(run_loader(workload, met, seconds=1.0)).kind == "no_batches"


def test_samples_with_a_history_are_not_sent() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    fault = real(lambda index: weight * index)
    assert fault.kind == "collate" and "detach()" in fault.fix.action


def test_nothing_known_is_said_to_be_nothing() -> None:
    fault = diagnose(Failure(), FORK2)
    assert fault.kind == "died" and "no exception" in fault.cause


# --- Hangs ------------------------------------------------------------------------------------

LOCK = threading.Lock()


def test_a_lock_held_while_forking_is_a_deadlock() -> None:
    def sample(index: int) -> Any:
        with LOCK:
            return torch.zeros(3)

    with LOCK:
        fault = real(sample, limit_s=1.5)
    assert fault.kind == "deadlock" and "wait for a lock" in fault.title
    assert "`with LOCK:`" in fault.cause and "2 of 2 workers in" in fault.cause
    assert "forkserver" in fault.fix.action


def test_a_slow_data_set_is_not_a_deadlock() -> None:
    import time

    def sample(index: int) -> Any:
        time.sleep(0.1)
        return torch.zeros(3)

    workload = Workload(DataLoader(Calls(sample), 2))
    run = run_loader(workload, LoaderSettings(1), seconds=60.0, limit_s=1.5)
    fault = diagnose_run(run, workload, context_of(run, limit_s=1.5))
    assert fault.kind == "slow_dataset"


def test_a_batch_that_cannot_be_sent_is_found() -> None:
    fault = real(lambda index: {"x": 1, "f": lambda: index})
    # Collation takes the lambda for an unknown type; with a collate_fn of one's own it passes.
    assert fault.kind == "collate"
    workload = Workload(DataLoader(Calls(lambda i: (x for x in ())), 2, collate_fn=list))
    run = run_loader(workload, FORK2, seconds=1.0, limit_s=1.5)
    seen = context_of(run, limit_s=1.5)
    assert diagnose_run(run, workload, seen).kind == "batch_lost"
    # What the worker's queue thread prints, where standard error is recorded.
    seen = dataclasses.replace(seen, output="TypeError: cannot pickle 'generator' object")
    fault = diagnose_run(run, workload, seen)
    assert fault.kind == "batch_not_picklable" and "generator" in fault.title


def test_lost_batches_with_too_many_tensors_are_too_many_files() -> None:
    text = idle_stacks()
    seen = FailureContext(fetched=(4, 4), started=2, batch_tensors=200, open_files=300)
    assert diagnose(Failure(hung=True, stacks=text), FORK2, None, seen).kind == "open_files"
    seen = FailureContext(
        fetched=(4, 4), started=2, output="OSError: [Errno 24] Too many open files"
    )
    assert diagnose(Failure(hung=True, stacks=text), FORK2, None, seen).kind == "open_files"
    seen = FailureContext(fetched=(4, 4), started=2)
    assert diagnose(Failure(hung=True, stacks=text), FORK2, None, seen).kind == "batch_lost"


TORCH = "/v/lib/python3.11/site-packages/torch/utils/data"


def thread(*frames: tuple[str, int, str]) -> str:
    lines = [f'  File "{path}", line {line} in {function}' for path, line, function in frames]
    return "\n".join(["Current thread 0x00007f2fda627b80 (most recent call first):", *lines, ""])


def main_waits() -> str:
    return thread(
        ("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get"),
        (f"{TORCH}/dataloader.py", 1291, "_try_get_data"),
        (f"{TORCH}/dataloader.py", 725, "__next__"),
    )


def worker(*frames: tuple[str, int, str]) -> str:
    return thread(
        *frames,
        (f"{TORCH}/_utils/fetch.py", 54, "fetch"),
        (f"{TORCH}/_utils/worker.py", 374, "_worker_loop"),
        (f"{TORCH}/dataloader.py", 1176, "__init__"),
    )


def idle_stacks() -> str:
    idle = thread(
        ("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get"),
        (f"{TORCH}/_utils/worker.py", 334, "_worker_loop"),
        (f"{TORCH}/dataloader.py", 1176, "__init__"),
    )
    return main_waits() + "\n" + idle + "\n" + idle


def in_library(path: str, function: str) -> Finding:
    text = main_waits() + "\n" + worker((path, 10, function), ("/home/me/data.py", 5, "load"))
    seen = FailureContext(fetched=(0, 0), started=2, limit_s=20.0, alone_s=0.1)
    return diagnose(Failure(hung=True, stacks=text), FORK2, None, seen)


@pytest.mark.parametrize(
    ("path", "library", "cure"),
    [
        ("/v/site-packages/h5py/_hl/dataset.py", "h5py", "open it in the worker"),
        ("/v/site-packages/numba/np/ufunc/parallel.py", "numba", "NUMBA_THREADING_LAYER"),
        ("/v/site-packages/torch/nn/functional.py", "torch", "OMP_NUM_THREADS"),
        ("/v/site-packages/grpc/_channel.py", "grpc", "channel"),
        ("/usr/lib/python3.11/logging/__init__.py", "logging", "QueueHandler"),
    ],
)
def test_the_library_that_workers_wait_in(path: str, library: str, cure: str) -> None:
    fault = in_library(path, "f")
    assert fault.kind == "deadlock" and f"wait inside {library}" in fault.title
    assert "/home/me/data.py:5" in fault.cause
    assert "without workers a batch needs 100 ms" in fault.cause
    assert cure in fault.fix.action


def test_native_code_is_named_by_the_users_line_and_imports(tmp_path: Any) -> None:
    script = tmp_path / "data.py"
    script.write_text("import cv2 as cv\n\ndef load(path):\n    return cv.resize(path, (2, 2))\n")
    text = main_waits() + "\n" + worker((str(script), 4, "load"))
    seen = FailureContext(fetched=(0, 0), started=2, limit_s=20.0, alone_s=0.1)
    fault = diagnose(Failure(hung=True, stacks=text), FORK2, None, seen)
    assert "inside cv2" in fault.title and "cv2.setNumThreads(0)" in fault.fix.action


def test_what_cannot_be_told_is_said() -> None:
    text = main_waits() + "\n" + worker(("/home/me/data.py", 5, "load"))
    fault = diagnose(
        Failure(hung=True, stacks=text),
        FORK2,
        None,
        FailureContext(fetched=(0, 0), started=2, limit_s=20.0),
    )
    assert fault.kind == "hung" and "undetermined" in fault.title
    slow = FailureContext(fetched=(0, 0), started=2, limit_s=20.0, alone_s=15.0)
    assert diagnose(Failure(hung=True, stacks=text), FORK2, None, slow).kind == "slow_dataset"


def test_a_sample_that_lasts_long_is_no_deadlock() -> None:
    text = main_waits() + "\n" + worker(("/home/me/data.py", 5, "load"))
    failure, seen = (
        Failure(hung=True, stacks=text),
        FailureContext(fetched=(3, 3), started=2, limit_s=20.0, silent_s=19.0, longest_s=0.1),
    )
    fault = diagnose(failure, FORK2, None, seen)
    assert fault.kind == "hung" and str(fault.place) == "/home/me/data.py:5"
    for timeout, kind in ((3.0, "timeout"), (60.0, "hung"), (0.0, "hung")):
        loader = DataLoader(Calls(lambda index: index), 2, num_workers=1, timeout=timeout)
        assert diagnose(failure, FORK2, Workload(loader), seen).kind == kind


def test_the_sampler_may_be_what_hangs() -> None:
    text = thread(
        ("/home/me/sampler.py", 9, "__iter__"),
        (f"{TORCH}/dataloader.py", 715, "_next_index"),
        (f"{TORCH}/dataloader.py", 1539, "_try_put_index"),
        (f"{TORCH}/dataloader.py", 725, "__next__"),
    )
    seen = FailureContext(fetched=(3, 3), started=2)
    fault = diagnose(Failure(hung=True, stacks=text), FORK2, None, seen)
    assert fault.kind == "slow_sampler" and "/home/me/sampler.py:9" in fault.cause


def test_workers_that_do_not_start() -> None:
    text = main_waits()
    seen = FailureContext(fetched=(0, 0), started=0)
    assert diagnose(Failure(hung=True, stacks=text), FORK2, None, seen).kind == "start_hangs"
    pickling = thread(
        ("/usr/lib/python3.11/multiprocessing/reduction.py", 60, "dump"),
        ("/usr/lib/python3.11/multiprocessing/popen_spawn_posix.py", 47, "_launch"),
        (f"{TORCH}/dataloader.py", 1176, "__init__"),
    )
    spawn = LoaderSettings(2, start_method="spawn")
    assert diagnose(Failure(hung=True, stacks=pickling), spawn, None, seen).kind == "slow_start"


def test_a_hang_without_workers() -> None:
    fault = diagnose(Failure(hung=True), LoaderSettings(0))
    assert fault.kind == "hung" and "main process" in fault.title


def test_stacks_of_a_forked_worker_end_where_the_fork_begins() -> None:
    (stack,) = tracebacks.parse_stacks(worker(("/home/me/data.py", 5, "load")))
    assert stack.role == "worker"
    assert [frame.function for frame in stack.own] == ["load", "fetch"]
    assert stack.where is not None and str(stack.where) == "/home/me/data.py:5 in load"


# --- Start methods ----------------------------------------------------------------------------


def test_a_lambda_under_spawn_is_named_with_its_path() -> None:
    spawn = LoaderSettings(1, start_method="spawn")
    fault = real(lambda index: torch.zeros(3), spawn)
    assert fault.kind == "not_picklable"
    assert "dataset.function" in fault.title and "<lambda>" in fault.title


def test_a_script_without_a_main_guard() -> None:
    spawn = LoaderSettings(2, start_method="spawn")
    message = "DataLoader worker (pid(s) 17520) exited unexpectedly"
    said = (
        "RuntimeError:\n        An attempt has been made to start a new process before the\n"
        "        current process has finished its bootstrapping phase.\n"
    )
    failure = Failure("RuntimeError", message, message, worker_exits=(1,))
    fault = diagnose(failure, spawn, None, FailureContext(started=0, output=said))
    assert fault.kind == "no_main_guard" and "__main__" in fault.fix.action
    output = "AttributeError: Can't get attribute 'D' on <module '__main__' (built-in)>"
    fault = diagnose(failure, spawn, None, FailureContext(started=0, output=output))
    assert fault.kind == "not_importable" and "D in __main__" in fault.title
    # Nothing was kept of stderr: the script's text may tell (pytest's has its guard).
    fault = diagnose(failure, spawn, None, FailureContext(started=0))
    assert fault.kind in ("spawn_start", "no_main_guard") and "exit codes of workers: 1" in (
        fault.cause
    )
    # Workers of an earlier fork that exit with 1 are another matter.
    assert diagnose(failure, FORK2, None, FailureContext(started=0)).kind == "worker_exited"


# --- The kernel's counters, texts -------------------------------------------------------------


def test_oom_kills_are_read_from_cgroups_and_the_machine() -> None:
    version_2 = {
        "/proc/self/cgroup": "0::/job\n",
        "/proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "/sys/fs/cgroup/job/memory.events": "low 0\noom 2\noom_kill 2\noom_group_kill 0\n",
        "/proc/vmstat": "nr_free_pages 5\noom_kill 7\n",
    }
    system = System(files=RecordedFiles(version_2))
    assert oom_kills(system) == OomKills(2, 7)
    version_1 = {
        "/proc/self/cgroup": "4:memory:/job\n",
        "/proc/self/mountinfo": "30 1 0:26 / /cg/memory rw - cgroup cgroup rw,memory\n",
        "/cg/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }
    assert oom_kills(System(files=RecordedFiles(version_1))) == OomKills(3, None)
    assert oom_kills(System(files=RecordedFiles({}))) == OomKills(None, None)
    assert between(OomKills(2, None), OomKills(3, 7)) == OomKills(1, None)


def test_a_message_that_looks_like_a_traceback_stays_whole() -> None:
    message = 'x\nTraceback (most recent call last):\n  File "a.py", line 1, in f\nZ: y'
    failure = caught("ValueError", message)
    raised = parse(failure.error_type, failure.message, failure.traceback)
    assert raised.type == "ValueError" and raised.message == message
    assert raised.worker == 1


def test_seen_counts_what_a_run_noted() -> None:
    import numpy as np

    records = np.array([[100.0, 2.0, 1.0, 0.0], [102.0, 3.0, 1.0, 1.0]])
    run = Run(FORK2, 0.0, fetches=(records, records[:1]), started=(99.0, 98.0))
    seen = context_of(run, limit_s=20.0)
    assert seen.fetched == (2, 1) and seen.longest_s == 3.0 and seen.started == 2
    assert seen.silent_s == pytest.approx(98.0 + 20.0 - 105.0)


TEXTS = st.text(max_size=80) | st.sampled_from([*SHM, *FILES, idle_stacks(), "Caught X in Y.\n"])


@settings(max_examples=50)
@given(
    st.builds(
        Failure,
        st.sampled_from(["", "RuntimeError", "KeyError"]),
        TEXTS,
        TEXTS,
        st.none() | st.integers(-70, 255),
        st.lists(st.integers(-70, 255), max_size=3).map(tuple),
        st.booleans(),
        TEXTS,
    ),
    st.sampled_from([FORK2, LoaderSettings(0)]),
    st.builds(FailureContext, started=st.none() | st.integers(0, 2), output=TEXTS),
)
def test_whatever_is_said_there_is_a_fault_with_a_fix(
    failure: Failure, met: LoaderSettings, seen: FailureContext
) -> None:
    fault = diagnose(failure, met, None, seen)
    assert fault.kind and fault.title and fault.cause and fault.fix.action
    assert len(fault.title) < 300 and "\n" not in fault.title
    if failure.hung:
        assert not fault.kind.startswith(("worker", "process"))
