"""Diagnosis of a run that failed: what it means, and the fix.

Each cause is recognised by what PyTorch (2.8 to 2.13), Python and the kernel say of it; the
address next to a text is where it is raised. What is not recognised is not explained.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path
from typing import Final

from trainfit.findings import (
    autograd_errors,
    exceptions,
    fixes,
    gpu_errors,
    hangs,
    operands,
    script_errors,
    tensor_errors,
    tracebacks,
    training_errors,
)
from trainfit.findings.environment import hub
from trainfit.findings.facts import Failure, FailureContext
from trainfit.findings.tracebacks import Frame, ParsedException
from trainfit.findings.worker_start import unguarded_line
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Finding, failure_finding
from trainfit.results.text import exception_text, short, signal_name, size

#: Kinds of what :func:`of_failure` gives.
KINDS: Final = (
    *("deadlock", "hung", "slow_dataset", "slow_sampler", "slow_start", "start_hangs"),
    *("batch_lost", "batch_not_picklable", "open_files", "shm_full", "out_of_memory"),
    *("not_picklable", "no_main_guard", "not_importable", "spawn_start", "timeout", "pin_memory"),
    *("worker_killed", "worker_crashed", "worker_exited", "process_killed", "process_crashed"),
    *("cuda_in_worker", "nested_processes", "collate", "handle_before_fork", "few_shards"),
    *("arguments", "index_beyond_data", "index_type_of_data", "not_rebuilt", "stops_epoch"),
    *("device_assert", "mixed_dtypes", "fp16_gradients", "port_in_use"),
    *("package_mismatch", "package_missing", "outdated", "gpu_not_seen", "no_terminal"),
    *("notebook_line", "script_error"),
    *("class_called", "saved_whole", "whole_in_place", "sizes_of_data", "iterator_at_end"),
    "no_nvidia_smi",
    *gpu_errors.KINDS,
    *hub.KINDS,
    *training_errors.KINDS,
    *autograd_errors.KINDS,
    *tensor_errors.KINDS,
    *script_errors.KINDS,
)
#: Of these, what a line is, not how many batches, samples or steps there were before it, is why.
WHATEVER_THE_LENGTH: Final = (
    *("package_mismatch", "package_missing", "outdated", "no_terminal", "notebook_line"),
    *("mixed_dtypes", "no_attention_kernel", "type_unsupported", "two_devices", "gpu_to_numpy"),
    *("numpy_of_graph", "generator_device", "pins_gpu_tensor", "lengths_on_gpu", "copied_graph"),
    *("inference_tensor", "not_deterministic", "bool_arithmetic", "flag_of_result"),
    *("attribute_of_wrapper", "no_forward", "checkpoint_whole", "checkpoint_types"),
    *("state_wanted", "state_of_optimizer", "method_not_called", "loader_indexed"),
    *("no_graph", "graph_used_twice", "changed_in_place", "leaf_in_place", "unsafe_autocast"),
    *("scaler_unused", "scaler_order", "no_parameters", "optimizer_groups", "state_dict_names"),
    *("state_dict_sizes", "unused_parameters", "ready_twice", "plateau_metric"),
    *("tied_across_groups", "custom_backward", "hook_on_in_place", "sparse_gradients"),
    *("recurrent_evaluated", "recurrent_twice", "second_derivative"),
    *("label_out_of_range", "index_out_of_range", "one_number_wanted", "expanded_written"),
    *("class_called", "saved_whole", "whole_in_place", "sizes_of_data"),
    *("loss_is_number", "lengths_unsorted", "length_of_none", "attention_shapes", "no_closure"),
    "no_numbers",
)
#: "… is killed by signal: Bus error. " (`torch/csrc/DataLoader.cpp`, strsignal's words).
_KILLED_BY: Final = re.compile(r"killed by signal: ([A-Z][A-Za-z -]*?)\.")
_SIGNAL_WORDS: Final = {signal.strsignal(each) or each.name: int(each) for each in signal.Signals}
#: "… exited unexpectedly with exit code 3." (`torch/csrc/DataLoader.cpp`).
_EXITED: Final = re.compile(
    r"DataLoader worker \(pid[^)]*\)[^\n]* exited unexpectedly(?: with exit code (\d+))?"
)
#: A worker that died while its batch was taken over, before PyTorch saw it dead: what reads the
#: queue or asks the worker for a descriptor (`multiprocessing/resource_sharer.py`) breaks off.
_BROKEN: Final = re.compile(
    r"multiprocessing/(?:connection|queues|reduction|resource_sharer)\.py|rebuild_storage_"
)
_BREAKS: Final = (
    *("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"),
    *("EOFError", "FileNotFoundError"),
)
#: A full /dev/shm: the bus error handler (`torch/csrc/DataLoader.cpp`), and
#: `aten/src/ATen/MapAllocator.cpp`: "unable to write to file </torch_1_2_3>: No space left …",
#: "unable to allocate shared memory(shm) for file <…>: Resource temporarily unavailable".
_SHM: Final = re.compile(
    r"insufficient shared memory|out of shared memory|unable to allocate shared memory"
    r"|unable to (?:resize|write to|stat the) file <[^>]*torch_"
    r"|torch_shm_manager[^\n]*(?:No space left|error)"
    r"|Couldn't allocate shared memory segment",
    re.IGNORECASE,
)
#: "out of shared memory" is also what a GPU kernel is (Triton: "out of resource: shared memory").
_SHM_OF_GPU: Final = re.compile(r"triton|out of resource: shared memory", re.IGNORECASE)
#: Characters of evidence that are kept.
_LONGEST: Final = 4000
#: … and of an exception's words in a title.
_LONGEST_TITLE: Final = 160
_NO_SPACE: Final = re.compile(r"No space left on device|\[Errno 28\]")
_SHM_PLACES: Final = re.compile(r"/dev/shm|</?torch_\d+|multiprocessing/synchronize\.py|SemLock")
#: "unable to open shared memory object </torch_1_2_3> in read-write mode[: Too many open …]"
#: (`aten/src/ATen/MapAllocator.cpp`; before 1.12 without the reason: files, most often).
_SHM_OPEN: Final = re.compile(r"unable to open (?:shared memory object|file) <[^>]*torch_")
#: Where it is a file of the script's that is named.
_OPENED: Final = re.compile(r"Too many open files: '(?!/dev/shm|/torch_)")
#: Where tensors are sent between processes, a file each.
_SENT: Final = re.compile(r"multiprocessing[/\\.](?:reductions?|resource_sharer|queues|connection)")
#: EMFILE; what is left of it where a descriptor was dropped (`multiprocessing/reduction.py`).
_FILES: Final = re.compile(r"Too many open files|received \d+ items of ancdata|\[Errno 24\]")
#: What a worker's own handler and the loader say of a bus error is a guess ("might be caused by
#: insufficient shared memory", "it is possible that"): pages of /dev/shm are RAM, too, and a file
#: that is mapped and was cut off since has the same effect.
_BUS_ERROR: Final = re.compile(r"[Bb]us error")
_TRIED: Final = re.compile(r"you tried to allocate (\d+) bytes")
#: NumPy's words.
_UNABLE: Final = re.compile(r"Unable to allocate ([\d.]+) ([KMGTP]iB|B)\b for an array.*")
#: One request of so many bytes is not a matter of how many workers there are.
_LARGE: Final = 16 << 30
_MEMORY_TYPES: Final = ("MemoryError", "_ArrayMemoryError")
#: "DataLoader timed out after 5 seconds", "Pin memory thread exited unexpectedly"
#: (`torch/utils/data/dataloader.py`).
_TIMEOUT: Final = re.compile(r"DataLoader timed out after ([\d.]+) seconds")
_PIN_THREAD: Final = "Pin memory thread exited unexpectedly"
_NOT_PICKLABLE: Final = re.compile(
    r"[Cc]an't pickle|[Cc]annot pickle|[Cc]an't get local object|cannot be pickled"
    r"|[Cc]an not pickle|not picklable|no default __reduce__ due to"
)
#: "Can't pickle local object 'main.<locals>.<lambda>'", "Can't pickle <function <lambda> at 0x7>".
#: "Can't pickle local object <function main.<locals>.init at 0x7>" (Python 3.14).
_OBJECT: Final = re.compile(r"<function (\S+) at 0x|local object '([\w.<>]+)'")
#: A process that is started otherwise than by a fork gets its target as a pickle
#: (`multiprocessing/popen_spawn_posix.py`, `popen_forkserver.py`).
_PICKLED: Final = re.compile(r"multiprocessing/popen_(?:spawn_posix|spawn_win32|forkserver)\.py")
_DUMPED: Final = re.compile(r"multiprocessing/reduction\.py\", line \d+, in dump")
_OF_LOADER: Final = "torch/utils/data/dataloader.py"
#: A process that is started by spawn or by the fork server reads what it is given.
_UNPICKLED: Final = "multiprocessing/spawn.py"
#: … there (`pickle.load`).
_LOADED: Final = "pickle.load(from_parent)"
_FORKING: Final = "multiprocessing/popen_fork.py"
#: `multiprocessing/spawn.py`.
_BOOTSTRAPPING: Final = "finished its bootstrapping phase"
_NOT_FOUND: Final = re.compile(r"Can't get attribute '?([\w.<>]+)'? on <module '([^']*)'")


def of_failure(
    failure: Failure,
    settings: LoaderSettings | None = None,
    seen: FailureContext | None = None,
) -> Finding | None:
    """What a failed run means; ``None`` where that is not known.

    Args:
        settings: of the DataLoader that the run used; ``None``: of none, or not known.
        seen: what else is known; evidence that is not given is said to be missing.
    """
    context = seen or FailureContext()
    raised = tracebacks.parse(failure.error_type, failure.message, failure.traceback)
    finding = (
        _hung(failure, settings, context)
        or _resources(failure, settings, raised, context)
        or _start(failure, settings, raised, context)
        or _ended(failure, settings, context)
        or _exception(failure, settings, raised, context)
    )
    return finding and dataclasses.replace(finding, cause=clipped(finding.cause))


def of_exception(
    traceback: str, settings: LoaderSettings | None = None, seen: FailureContext | None = None
) -> Finding | None:
    """What the exception means that a printed traceback ends with, as :func:`of_failure`."""
    name, message = tracebacks.exception_in(traceback)
    return of_failure(Failure(name, message, traceback), settings, seen) if name else None


def of_own_error(failure: Failure) -> Finding:
    """An exception that :func:`of_failure` does not explain: what was raised, and its line."""
    raised = tracebacks.parse(failure.error_type, failure.message, failure.traceback)
    fix = fixes.OWN_ERROR if raised.worker is None else fixes.OWN_ERROR_IN_WORKER
    title = short(exception_text(raised.type, raised.message), _LONGEST_TITLE)
    if raised.worker is not None:
        title += " (in a worker)"
    cause = clipped(raised_words(raised))
    return failure_finding("script_error", title, cause, fix, place=raised.place)


def clipped(text: str) -> str:
    """Text whose beginning and end are kept: of a traceback, and of what a process printed,
    the end says the most."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 4]} … {text[-_LONGEST * 3 // 4 :]}"


# --- Hangs ------------------------------------------------------------------------------------


def _hung(
    failure: Failure, settings: LoaderSettings | None, context: FailureContext
) -> Finding | None:
    if not failure.hung or settings is None:
        return None
    hang = hangs.explain(failure.stacks, settings, context)
    match = _FILES.search(context.output) or _SHM.search(context.output)
    if hang.kind == "batch_lost" or match:
        return _lost(hang, settings, context)
    fix = fixes.HANGS.get(hang.kind, fixes.HANGS["hung"])
    if hang.kind in ("deadlock", "hung") and hang.library:
        fix = f"{hangs.FORK_UNSAFE[hang.library]}; {fix}"
    return failure_finding(hang.kind, hang.summary, hang.evidence, fix, settings, hang.place)


def _lost(hang: hangs.Hang, settings: LoaderSettings, context: FailureContext) -> Finding:
    """A batch was made and not sent: what holds it up?"""
    if _FILES.search(context.output) or _too_many_files(settings, context):
        return _open_files(settings, f"{hang.summary}; {hang.evidence}", context)
    if _SHM.search(context.output) or _NO_SPACE.search(context.output):
        return _shm_full(settings, f"{hang.summary}; {hang.evidence}", context)
    if _NOT_PICKLABLE.search(context.output):
        culprit = _line(context.output, _NOT_PICKLABLE)
        summary = f"A batch contains an object that workers cannot send: {short(culprit)}"
        evidence = f"{hang.evidence}; {culprit}"
        return failure_finding("batch_not_picklable", summary, evidence, fixes.BATCH, settings)
    return failure_finding(hang.kind, hang.summary, hang.evidence, fixes.LOST, settings)


def _too_many_files(settings: LoaderSettings, context: FailureContext) -> bool:
    """One descriptor a tensor (`torch/multiprocessing/reductions.py`, ``reduce_storage``)."""
    if context.batch_tensors is None or context.open_files is None:
        return False
    return context.batch_tensors * (settings.tokens + 1) > context.open_files


# --- Memory, shared memory and files ----------------------------------------------------------


def _resources(
    failure: Failure,
    settings: LoaderSettings | None,
    raised: ParsedException,
    context: FailureContext,
) -> Finding | None:
    text = _text(failure, context)
    said = short(raised.message or failure.message) or spoken(failure, context)
    if _FILES.search(text):
        has_workers = settings is not None and settings.num_workers
        is_own = raised.place is not None and not _SENT.search(failure.traceback)
        if not has_workers and (_OPENED.search(raised.message) or is_own):
            summary = "Too many open files: what the script opened before is not closed"
            fix = fixes.CLOSE_FILES
            return failure_finding("open_files", summary, said, fix, settings, raised.place)
        return _open_files(settings, said, context)
    if (_SHM.search(text) and not _SHM_OF_GPU.search(text)) or (
        _NO_SPACE.search(text) and _SHM_PLACES.search(text)
    ):
        return _shm_full(settings, _line(text, _SHM) or _line(text, _NO_SPACE) or said, context)
    if _SHM_OPEN.search(text):
        return _open_files(settings, said, context)
    shares = failure.exit_code is None or (settings is not None and settings.num_workers > 0)
    if _signal(failure) == signal.SIGBUS and shares:
        return _shm_full(settings, f"bus error: {spoken(failure, context)}", context)
    if failure.error_type in _MEMORY_TYPES or tracebacks.NO_MEMORY.search(raised.message):
        where = f" at {raised.culprit}" if raised.culprit else ""
        asked = _TRIED.search(raised.message)
        words = _UNABLE.search(raised.message)
        what = f"{size(int(asked[1]))} were requested" if asked else words[0] if words else said
        summary = f"Out of memory (RAM): {what}"
        by_workers = raised.worker is not None or _FORKING in failure.traceback
        large = int(asked[1]) >= _LARGE if asked else words is not None and _bytes(words) >= _LARGE
        fix = fixes.memory(settings) if by_workers and not large else fixes.RAM
        cause = f"{raised.message}{where}"
        return failure_finding("out_of_memory", summary, cause, fix, settings, raised.place)
    return None


def _bytes(words: re.Match[str]) -> float:
    """The bytes of "Unable to allocate 37.3 GiB"."""
    power = ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(words[2])
    return float(words[1]) * float(1024**power)


def _shm_full(settings: LoaderSettings | None, text: str, context: FailureContext) -> Finding:
    need, free, evidence = None, context.shm_free_bytes, text
    if context.batch_bytes is not None and settings is not None:
        need = (settings.tokens + 1) * context.batch_bytes
        batches = f"{settings.tokens} prefetched batches and the one in use"
        evidence += f"; {batches} of {size(context.batch_bytes)} are {size(need)}"
    if free is not None:
        evidence += f"; /dev/shm has {size(free)} free"
    is_short = need is not None and free is not None and need > free
    if is_short or not _BUS_ERROR.search(text):
        summary = "Shared memory (/dev/shm) is full"
        return failure_finding("shm_full", summary, evidence, fixes.shm(settings, need), settings)
    if need is not None and free is not None and need < free / 2:
        evidence += (
            "; that is enough, so RAM is short, in which /dev/shm is, or "
            "a memory-mapped file was cut off"
        )
    if context.ram_free_bytes is not None:
        evidence += f"; {size(context.ram_free_bytes)} of RAM were available before the run"
    summary = "A bus error: RAM or shared memory (/dev/shm, which is in RAM) ran out"
    fix = f"{fixes.memory(settings)}; where /dev/shm is small: {fixes.shm(settings, need)}"
    return failure_finding("shm_full", summary, evidence, fix, settings)


def _open_files(settings: LoaderSettings | None, text: str, context: FailureContext) -> Finding:
    evidence = text
    if context.batch_tensors is not None and settings is not None:
        need = context.batch_tensors * (settings.tokens + 1)
        evidence += f"; {context.batch_tensors} tensors a batch need {need} open files at once"
    if context.open_files is not None:
        evidence += f"; the limit is {context.open_files} (ulimit -n)"
    return failure_finding(
        "open_files", "Too many open files", evidence, fixes.OPEN_FILES, settings
    )


# --- Starting workers -------------------------------------------------------------------------


def _start(
    failure: Failure,
    settings: LoaderSettings | None,
    raised: ParsedException,
    context: FailureContext,
) -> Finding | None:
    """What only happens to processes that are not forked."""
    if _is_pickled(failure, raised):
        return _not_picklable(failure, settings, raised)
    is_spawned = settings is not None and settings.num_workers and settings.start_method != "fork"
    text = _text(failure, context)
    if _BOOTSTRAPPING in text:
        said = _line(text, re.compile(_BOOTSTRAPPING))
        return failure_finding("no_main_guard", fixes.UNGUARDED, said, fixes.MAIN_GUARD, settings)
    missing = _NOT_FOUND.search(text)
    # A checkpoint with a class that is gone says the same.
    if missing and (is_spawned or _UNPICKLED in text):
        summary = f"Spawned workers do not find {missing[1]} in {missing[2]}"
        return failure_finding(
            "not_importable", summary, missing[0], fixes.NOT_IMPORTABLE, settings
        )
    if (rebuilt := _not_rebuilt(context.output, settings)) is not None and _exit_code(failure) == 1:
        return rebuilt
    if settings is None or not is_spawned:
        return None
    script = _outermost(failure.traceback)
    if _exit_code(failure) == 1 and script is not None and unguarded_line(Path(script.path)):
        phrase = f"{spoken(failure, context)}; {script} runs when the script is imported"
        return failure_finding("no_main_guard", fixes.UNGUARDED, phrase, fixes.MAIN_GUARD, settings)
    if context.started == 0 and _exit_code(failure) not in (None, 0) and not _signal(failure):
        summary = f"Workers exit before they start under {settings.start_method}"
        return failure_finding(
            "spawn_start", summary, spoken(failure, context), fixes.SPAWN_START, settings
        )
    return None


def _not_rebuilt(output: str, settings: LoaderSettings | None) -> Finding | None:
    """What a process printed that could not read the pickle that it was given."""
    printed = tracebacks.printed_traceback(output)
    if _UNPICKLED not in printed or _LOADED not in printed:
        return None
    raised = tracebacks.parse(*tracebacks.exception_in(printed), printed)
    culprit = raised.culprit
    if not raised.type or culprit is None or not culprit.is_user:
        return None
    if any(frame.is_user and frame.function == "<module>" for frame in raised.frames):
        return None  # a module that cannot be imported
    words = exception_text(raised.type, short(raised.message))
    return failure_finding(
        "not_rebuilt",
        f"A process that is not forked cannot make what it is given of its pickle: {words}",
        raised_words(raised),
        fixes.GETATTR if culprit.function == "__getattr__" else fixes.REBUILT,
        settings,
        culprit.place,
    )


def _outermost(text: str) -> Frame | None:
    """The line of the script that led to it, at its top level; ``None`` without one."""
    frame = next((each for each in tracebacks.frames(text) if each.is_user), None)
    return frame if frame is not None and frame.function == "<module>" else None


def _text(failure: Failure, context: FailureContext) -> str:
    """What says why: an exception by itself; where it only tells that another process is gone or
    silent, also what the processes printed."""
    text = f"{failure.message}\n{failure.traceback}"
    is_answer = (
        failure.error_type
        and not _EXITED.search(text)
        and not _KILLED_BY.search(text)
        and not _broke_off(failure)
        and not _TIMEOUT.search(failure.message)
        and not failure.message.startswith(_PIN_THREAD)
    )
    return text if is_answer else f"{text}\n{context.output}"


def _is_pickled(failure: Failure, raised: ParsedException) -> bool:
    """Did what a new process gets refuse to be pickled? Whatever the object raises: its own
    ``__reduce__`` may say anything. A process that is gone by then breaks the pipe."""
    if raised.where or not _PICKLED.search(failure.traceback):
        return False
    if failure.error_type in _BREAKS:
        return False
    return _DUMPED.search(failure.traceback) is not None


def _not_picklable(
    failure: Failure, settings: LoaderSettings | None, raised: ParsedException
) -> Finding:
    text = f"{raised.type}: {raised.message}" if raised.type else raised.message
    if _OF_LOADER in failure.traceback:
        what = "The data set, collate_fn or worker_init_fn"
        summary = f"{what} cannot be pickled for workers that are not forked"
    else:
        summary = "What a new process is given cannot be pickled"
    summary += f": {short(raised.message)}"
    fix = fixes.not_picklable(text)
    named = _OBJECT.search(text)
    place = tracebacks.defined_at(failure.traceback, named[1] or named[2]) if named else None
    return failure_finding("not_picklable", summary, text, fix, settings, place)


# --- Processes that ended ---------------------------------------------------------------------


def _ended(
    failure: Failure, settings: LoaderSettings | None, context: FailureContext
) -> Finding | None:
    number, said = _signal(failure), spoken(failure, context)
    is_worker = failure.exit_code is None
    who = "A worker" if is_worker else "The main process"
    kind = "worker" if is_worker else "process"
    if number == signal.SIGINT:
        return None  # the user's Ctrl-C
    if number in (signal.SIGKILL, signal.SIGTERM):
        return _killed(kind, who, number, settings, said, context)
    if number:
        words = fixes.CRASHES.get(number, f"crashed ({signal_name(number)})")
        return failure_finding(f"{kind}_crashed", f"{who} {words}", said, fixes.CRASHED, settings)
    if _TIMEOUT.search(failure.message):
        return failure_finding("timeout", short(failure.message), said, fixes.TIMEOUT, settings)
    if failure.message.startswith(_PIN_THREAD):
        return failure_finding("pin_memory", _PIN_THREAD, said, fixes.PIN_THREAD, settings)
    code = _exit_code(failure)
    if is_worker and (code is not None or _EXITED.search(failure.message)):
        summary = f"{who} ended" + (f" with exit code {code}" if code is not None else "")
        return failure_finding(f"{kind}_exited", summary, said, fixes.EXITED, settings)
    return None


def _killed(
    kind: str,
    who: str,
    number: int,
    settings: LoaderSettings | None,
    text: str,
    context: FailureContext,
) -> Finding:
    """SIGKILL is what the kernel's OOM killer sends, but not it alone."""
    name, kills = signal_name(number), context.oom_kills
    if number == signal.SIGKILL and kills is not None and (kills.cgroup or kills.machine):
        source = "this cgroup's" if kills.cgroup else "the kernel's"
        evidence = f"{text}; {source} count of OOM kills rose by {kills.cgroup or kills.machine}"
        summary = f"{who} was killed by the OOM killer: memory ran out"
        return failure_finding(
            f"{kind}_killed", summary, evidence, fixes.memory(settings), settings
        )
    if number != signal.SIGKILL:
        known = ""
    elif kills is None or (kills.cgroup is None and kills.machine is None):
        known = "; whether by the OOM killer is unknown: its count could not be read"
    else:
        known = "; the kernel counted no OOM kill in this time"
    summary = f"{who} was killed by another process ({name})"
    return failure_finding(f"{kind}_killed", summary, f"{text}{known}", fixes.KILLED, settings)


def _signal(failure: Failure) -> int | None:
    """The signal that ended the first process to end; terminated ones are the aftermath."""
    if failure.exit_code is not None:
        return -failure.exit_code if failure.exit_code < 0 else None
    words = _KILLED_BY.search(failure.traceback) or _KILLED_BY.search(failure.message)
    if words is not None and words[1] in _SIGNAL_WORDS:
        return _SIGNAL_WORDS[words[1]]
    if failure.error_type and not _EXITED.search(failure.message) and not _broke_off(failure):
        return None  # an exception; the workers were ended after it
    numbers = [-code for code in failure.worker_exits if code < 0]
    return next(
        (number for number in numbers if number != signal.SIGTERM), next(iter(numbers), None)
    )


def _broke_off(failure: Failure) -> bool:
    """Whether a worker seems to have gone while its batch was taken over."""
    broke = failure.error_type in _BREAKS
    return broke and _BROKEN.search(failure.traceback) is not None


def _exit_code(failure: Failure) -> int | None:
    """The exit code of the process that ended first, if it was not a signal."""
    if failure.exit_code is not None:
        return failure.exit_code if failure.exit_code >= 0 else None
    match = _EXITED.search(failure.traceback)
    if match is not None and match[1]:
        return int(match[1])
    if not _EXITED.search(failure.message) and not _broke_off(failure):
        return None
    return next((code for code in failure.worker_exits if code > 0), None)


# --- Exceptions -------------------------------------------------------------------------------


def _exception(
    failure: Failure,
    settings: LoaderSettings | None,
    raised: ParsedException,
    context: FailureContext,
) -> Finding | None:
    if not failure.error_type:
        return None
    evidence = raised_words(raised)
    causes = [tracebacks.parse(*each) for each in tracebacks.raised_from(failure.traceback)]
    # What lacks a module says nothing else for certain: such a cause comes first.
    order = sorted(
        (raised, *causes),
        key=lambda each: each is raised or each.type != "ModuleNotFoundError",
    )
    known = next(filter(None, (exceptions.known(cause, context) for cause in order)), None)
    if known is not None:
        known = dataclasses.replace(known, cause=evidence, loader=settings, place=raised.place)
        return operands.explained(known, context.call)
    if "pin memory thread" in raised.where:
        words = exception_text(raised.type, short(raised.message))
        own = raised.culprit is not None and raised.culprit.is_user
        return failure_finding(
            "pin_memory",
            f"{'The pin_memory() of a batch' if own else 'Pinning'} raises {words}",
            evidence,
            fixes.OWN_PINNING if own else fixes.PINNING,
            settings,
            raised.place,
        )
    return None


def raised_words(raised: ParsedException) -> str:
    """An exception, where it was caught, and the user's line that it came from."""
    culprit = raised.culprit
    text = f" at {culprit}" if culprit is not None else ", not in your code"
    if culprit is not None and culprit.code:
        text += f": `{culprit.code}`"
    where = f"{raised.where}: " if raised.where else ""
    return f"{where}{raised.type}: {raised.message}{text}"


def spoken(failure: Failure, seen: FailureContext) -> str:
    """What was seen of processes that ended, in words."""
    parts = []
    if failure.error_type:
        parts.append(f"{failure.error_type}: {short(failure.message, 300)}")
    if failure.exit_code is not None:
        parts.append(f"exit code of the process that iterates: {failure.exit_code}")
    if failure.worker_exits:
        codes = ", ".join(str(code) for code in failure.worker_exits)
        parts.append(f"exit codes of workers: {codes}")
    match = _KILLED_BY.search(failure.traceback)
    if match is not None:
        parts.append(f"PyTorch: {match[0]}")
    if seen.output:
        parts.append(f"stderr: {seen.output.strip()}")
    return "; ".join(parts) or "no exception, no exit code, no output"


def _line(text: str, pattern: re.Pattern[str]) -> str:
    """The line of a text that a pattern is found in."""
    return next((line.strip() for line in text.split("\n") if pattern.search(line)), "")
