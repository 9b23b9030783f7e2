"""What a batch's time is spent on: the rules on made-up stacks, calls into C, and real batches."""

from __future__ import annotations

import concurrent.futures
import functools
import io
import itertools
import os
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainfit.loader.measure.batch_profile import (
    LEAST_LOOKS,
    PARTS,
    StackSample,
    StackSamples,
    Watcher,
    parts_of,
    split,
)
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import CostPart
from trainfit.scripts.call_sites import NOTHING, Callee, callee, calls_of, is_mapped, named
from trainfit.scripts.cost_rules import RULES, Classification, StackFrame, judge, rule_of, shown

USER = StackFrame("__main__", "MyData.__getitem__", "self.transform")


# --- The rules, on stacks -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [
        ("PIL.Image", "open", "decode"),
        ("PIL.Image", "open.<locals>._open_core", "decode"),
        ("PIL.Image", "Image.convert", "decode"),
        ("PIL.Image", "Image.resize", "transform"),
        ("PIL.ImageFile", "ImageFile.load", "decode"),
        ("PIL.JpegImagePlugin", "JpegImageFile._open", "decode"),
        ("PIL.ImageOps", "fit", "transform"),
        ("PIL.Image", "Image.save", "transform"),
        ("cv2", "imdecode", "decode"),
        ("cv2", "VideoCapture.read", "decode"),
        ("cv2", "resize", "transform"),
        ("av.container.core", "open", "read"),
        ("av.container.input", "InputContainer.decode", "decode"),
        ("av.container.input", "InputContainer.demux", "read"),
        ("av.video.frame", "VideoFrame.to_ndarray", "decode"),
        ("av.video.frame", "VideoFrame.reformat", "transform"),
        ("decord.video_reader", "VideoReader.get_batch", "decode"),
        ("torchcodec.decoders._video_decoder", "VideoDecoder.get_frame_at", "decode"),
        ("torchvision.transforms.functional", "resize", "transform"),
        ("torchvision.io.image", "decode_jpeg", "decode"),
        ("torchvision.io.image", "read_file", "read"),
        ("albumentations.core.composition", "Compose.__call__", "transform"),
        ("kornia.augmentation.base", "AugmentationBase.forward", "transform"),
        ("torchaudio", "load", "decode"),
        ("torchaudio.transforms._transforms", "MelSpectrogram.forward", "transform"),
        ("soundfile", "SoundFile.read", "decode"),
        ("h5py._hl.dataset", "Dataset.__getitem__", "read"),
        ("zarr.core.array", "Array.__getitem__", "read"),
        ("numcodecs.blosc", "decompress", "decode"),
        ("lmdb.cpython", "Transaction.get", "read"),
        ("pyarrow.parquet.core", "read_table", "read"),
        ("pyarrow.lib", "Array.to_pylist", "decode"),
        ("pandas.io.parsers.readers", "read_csv", "decode"),
        ("datasets.features.image", "Image.decode_example", "decode"),
        ("numpy", "fromfile", "read"),
        ("numpy.memmap", "memmap.__getitem__", "read"),
        ("_io", "BufferedReader.read", "read"),
        ("_io", "FileIO.readinto", "read"),
        ("pathlib", "Path.read_bytes", "read"),
        ("posix", "pread", "read"),
        ("fsspec.spec", "AbstractBufferedFile.read", "read"),
        ("tarfile", "TarFile.extractfile", "read"),
        ("zlib", "decompress", "decode"),
        ("json.decoder", "JSONDecoder.decode", "decode"),
        ("torch.utils.data._utils.collate", "default_collate", "collate"),
        ("transformers.tokenization_utils_base", "BatchEncoding.__init__", "transform"),
        ("_thread", "lock.acquire", "wait"),
        ("concurrent.futures._base", "Future.result", "wait"),
        ("time", "sleep", "wait"),
    ],
)
def test_a_library_function_is_of_its_kind(module: str, name: str, kind: str) -> None:
    rule = rule_of(module, name)
    assert rule is not None
    assert rule.kind == kind


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("_io", "BytesIO.read"),  # in memory: whoever decodes it reads it
        ("torch.utils.data.dataset", "Subset.__getitem__"),
        ("torchvision.datasets.folder", "DatasetFolder.__getitem__"),
    ],
)
def test_what_only_passes_on_is_of_no_kind(module: str, name: str) -> None:
    rule = rule_of(module, name)
    assert rule is not None
    assert rule.kind is None


def test_names_that_only_begin_like_a_library_are_not_it() -> None:
    assert rule_of("avocado", "open") is None
    assert rule_of("my.cv2", "imread") is None
    assert rule_of("tarfiles", "open") is None


def test_the_innermost_recognised_function_counts() -> None:
    load = StackFrame("PIL.ImageFile", "ImageFile.load")
    resize = StackFrame("PIL.Image", "Image.resize")
    read = StackFrame("_io", "BufferedReader.read")
    assert judge([resize, USER]).kind == "transform"
    # Pillow decodes when an image is first used: even where resizing is what uses it.
    assert judge([load, resize, USER]) == Classification("decode", "PIL.ImageFile.ImageFile.load")
    assert judge([read, load, resize, USER]) == Classification("read", "io.BufferedReader.read")


def test_arithmetic_belongs_to_whom_it_is_done_for() -> None:
    add = StackFrame("numpy", "ufunc")
    assert judge([add, USER]).kind == "transform"
    assert judge([add, StackFrame("h5py._hl.dataset", "Dataset.__getitem__"), USER]).kind == "read"
    assert judge([add, StackFrame("__main__", "decode_depth"), USER]) == Classification(
        "decode", "decode_depth"
    )


def test_the_users_names_say_it_where_no_library_does() -> None:
    inner = StackFrame("lab.ops", "RandomJitter.__call__")
    assert judge([inner, USER]) == Classification("transform", "lab.ops.RandomJitter.__call__")
    # Here only the caller's line says what it is called for.
    assert judge([StackFrame("lab.ops", "work"), USER]) == Classification(
        "transform", "self.transform"
    )
    assert judge([StackFrame("lab.ops", "decode_row"), USER]).kind == "decode"


def test_what_cannot_be_told_is_unknown_and_named() -> None:
    here = StackFrame("__main__", "MyData.__getitem__")
    assert judge([here]) == Classification(None, "MyData.__getitem__")
    assert judge([StackFrame("lab.ops", "load_one", "load"), here]) == Classification(
        None, "lab.ops.load_one"
    )
    assert judge([]) == Classification(None, "")


def test_waiting_names_who_waits_and_for_what() -> None:
    lock = StackFrame("_thread", "lock.acquire")
    stack = [lock, StackFrame("threading", "Condition.wait"), StackFrame("queue", "Queue.get")]
    judged = judge([*stack, StackFrame("lab.ops", "Prefetcher.next"), USER])
    assert judged == Classification("wait", "lab.ops.Prefetcher.next waits (queue.Queue.get)")


def test_in_collation_only_reading_and_decoding_are_not_collation() -> None:
    stack = StackFrame("torch._C", "_VariableFunctionsClass.stack")
    collate = StackFrame("lab.data", "pack", "torch.stack")
    assert judge([stack, collate], collating=True) == Classification("collate", "torch.stack")
    assert judge([collate], collating=True) == Classification("collate", "lab.data.pack")
    jpeg = StackFrame("PIL.ImageFile", "ImageFile.load")
    assert judge([jpeg, collate], collating=True).kind == "decode"


def test_copies_from_a_mapped_file_are_reading() -> None:
    copy = StackFrame("numpy", "array", mapped=True)
    assert judge([copy, USER]) == Classification("read", "numpy.array of a mapped file")


def test_names_are_those_that_users_know() -> None:
    assert shown("torch._C", "_VariableFunctionsClass.stack") == "torch.stack"
    assert shown("_io", "BytesIO.read") == "io.BytesIO.read"
    assert shown("builtins", "pow") == "pow"


def test_no_rule_is_hidden_by_an_earlier_one() -> None:
    for rule in RULES:
        for name in rule.names:
            module = rule.module.replace("*", "X")
            assert rule_of(module, name.replace("*", "x").replace("?", "x")) == rule


# --- Shares -------------------------------------------------------------------------------------
STACKS: dict[str, tuple[StackFrame, ...]] = {
    "read": (StackFrame("_io", "FileIO.read"),),
    "decode": (StackFrame("cv2", "imdecode"),),
    "transform": (StackFrame("cv2", "resize"),),
    "collate": (StackFrame("torch.utils.data._utils.collate", "collate"),),
    "unknown": (StackFrame("time", "sleep"),),
}


def looks(seconds: dict[str, float], count: int = LEAST_LOOKS) -> StackSamples:
    return StackSamples(
        tuple(StackSample(STACKS[each], s) for each, s in seconds.items()), count, 3
    )


def test_shares_are_those_of_the_time_not_of_the_looks() -> None:
    parts = parts_of(looks({"collate": 0.1, "read": 0.3, "unknown": 0.6}))
    assert [part.name for part in parts] == ["read", "collate", "unknown"]
    assert parts[0].share == pytest.approx(0.3)
    assert parts[0].what == ("io.FileIO.read",)
    assert parts[2].what == ("time.sleep waits",)


@given(st.dictionaries(st.sampled_from(PARTS), st.floats(1e-6, 1e3), min_size=1))
def test_shares_add_up_to_one(seconds: dict[str, float]) -> None:
    parts = parts_of(looks(seconds))
    assert {part.name for part in parts} == set(seconds)
    assert sum(part.share for part in parts) == pytest.approx(1)


def test_too_few_looks_say_nothing() -> None:
    assert parts_of(looks({"read": 1.0}, LEAST_LOOKS - 1)) == ()
    assert parts_of(None) == ()


def test_the_longest_functions_are_named_and_the_rare_are_not() -> None:
    names = {"a": 0.5, "b": 3.0, "c": 1.0, "d": 2.0, "rare": 0.01}
    weighed = tuple(StackSample((StackFrame("lab", name),), s) for name, s in names.items())
    (part,) = parts_of(StackSamples(weighed, LEAST_LOOKS, 1))
    assert part.what == ("lab.b", "lab.d", "lab.c")


# --- Calls into C -------------------------------------------------------------------------------
def calls(function: Callable[[], Any]) -> list[Callee]:
    """What the frame of ``function`` called of C, as it is seen while that runs."""
    seen: list[Callee] = []

    def profile(frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and frame.f_code is function.__code__:  # type: ignore[attr-defined]
            seen.append(callee(frame))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def found(function: Callable[[], Any]) -> list[tuple[str, str]]:
    return [(each.module, each.name) for each in calls(function)]


def test_a_method_is_named_by_what_its_object_is() -> None:
    raw = io.BytesIO(b"abc")
    file = io.BufferedReader(raw)  # type: ignore[arg-type]
    holder = types.SimpleNamespace(file=file)
    assert found(lambda: holder.file.read(1)) == [("_io", "BufferedReader.read")]
    read = file.read
    assert found(lambda: read(1)) == [("_io", "BufferedReader.read")]
    assert found(lambda: raw.read(1)) == [("_io", "BytesIO.read")]


def test_functions_of_libraries_are_named_by_their_library() -> None:
    tensors = [torch.zeros(2)]
    assert found(lambda: torch.stack(tensors)) == [("torch", "stack")]
    tensor = tensors[0]
    ((module, name),) = found(lambda: tensor.add(1))
    assert rule_of(module, name) == rule_of("torch", "add")
    sleep = time.sleep
    assert found(lambda: sleep(0)) == [("time", "sleep")]


def test_what_an_opened_file_is_asked_is_reading(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    opened = found(lambda: open(path, "rb").read())  # noqa: SIM115
    assert [rule_of(*each).kind for each in opened] == ["read", "read"]  # type: ignore[union-attr]


def test_driving_an_iterator_is_what_the_iterator_does() -> None:
    av = pytest.importorskip("av")
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        for packet in stream.encode(av.VideoFrame(32, 32, "yuv420p")):
            out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    data.seek(0)
    container = av.open(data)
    names = found(lambda: next(container.decode(video=0)))
    assert names[-1] == ("av.container.input", "InputContainer.decode")
    frames = container.decode(video=0)
    (made,) = found(lambda: next(frames, None))
    rule = rule_of(*made)
    assert rule is not None
    assert rule.kind == "decode"


def test_copies_of_mapped_files_are_seen(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m", np.uint8, "w+", shape=(4, 8))
    holder = types.SimpleNamespace(rows=mapped)
    array = np.array
    assert [each.mapped for each in calls(lambda: array(holder.rows))] == [True]
    row = np.asarray(mapped[1])
    assert [each.mapped for each in calls(lambda: row.copy())] == [True]
    loose = np.zeros(3)
    assert [each.mapped for each in calls(lambda: array(loose))] == [False]
    assert is_mapped(mapped[2:])
    assert not is_mapped(mapped + 1)


def test_looking_runs_none_of_the_users_code() -> None:
    class Trap:
        @property
        def stream(self) -> Any:
            raise AssertionError("it was asked")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError("it was asked")

    trap = Trap()
    seen: list[Callee] = []

    def ask() -> None:
        try:
            trap.stream.read()
        except AssertionError as error:
            assert error.__traceback__ is not None
            seen.append(callee(error.__traceback__.tb_frame))

    ask()
    assert len(seen) == 1


def test_callables_have_names() -> None:
    assert named(functools.partial(np.load, "x")) == named(np.load)
    assert named(np.add) == ("numpy", "add")
    assert named(str.upper) == ("builtins", "str.upper")
    drawn = named(np.random.default_rng(0).standard_normal)  # Cython's own type, as PyAV's
    assert drawn == ("numpy.random._generator", "Generator.standard_normal")


def test_code_without_a_source_is_nothing() -> None:
    frames: list[types.FrameType] = []
    exec("sorted([1], key=keep)", {"keep": lambda _: frames.append(sys._getframe(1)) or 0})
    assert callee(frames[0]) == NOTHING


# --- Real batches -------------------------------------------------------------------------------
class _Data(Dataset[Any]):
    def __len__(self) -> int:
        return 64


def looked_at(
    dataset: Any, seconds: float, batch_size: int = 2, **words: Any
) -> tuple[CostPart, ...]:
    """For so long, or longer: a busy machine leaves too few looks."""
    workload = Workload(DataLoader(dataset, batch_size, **words))
    made = (split(workload, factor * seconds) for factor in (1, 10, 100))
    return next(filter(None, made), ())


def parts(dataset: Any, batch_size: int = 4, **words: Any) -> dict[str, tuple[float, str]]:
    made = looked_at(dataset, 0.4, batch_size, **words)
    assert sum(part.share for part in made) == pytest.approx(1)
    return {part.name: (part.share, " ".join(part.what)) for part in made}


class _Jpegs(_Data):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        noise = np.random.default_rng(0).integers(0, 255, (400, 600, 3), dtype=np.uint8)
        for index in range(4):
            Image.fromarray(noise).save(folder / f"{index}.jpg", quality=95)

    def __getitem__(self, index: int) -> Any:
        with Image.open(self.folder / f"{index % 4}.jpg") as image:
            # Decoding happens here, though it is resizing that is asked for.
            small = image.resize((300, 200), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(small))


def test_jpegs_are_decoded_and_resized(tmp_path: Path) -> None:
    found = parts(_Jpegs(tmp_path))
    assert "ImageFile.load" in found["decode"][1]
    assert "Image.resize" in found["transform"][1]
    assert found["decode"][0] > 0.1
    assert found.get("unknown", (0.0, ""))[0] < 0.2


class _Mapped(_Data):
    def __init__(self, path: Path) -> None:
        np.save(path, np.ones((64, 1 << 18), np.uint8))
        self.rows = np.load(path, mmap_mode="r")

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.array(self.rows[index]))


def test_a_memory_mapped_array_is_read_and_collated(tmp_path: Path) -> None:
    found = parts(_Mapped(tmp_path / "rows.npy"))
    assert "mapped file" in found["read"][1]
    assert set(found) == {"read", "collate"} or found.get("unknown", (0, ""))[0] < 0.2


class _Python(_Data):
    """Python keeps the interpreter's lock, hashing a long text gives it up."""

    def __init__(self, augment: int, read: int) -> None:
        self.augmented, self.read = augment, read

    def augment(self) -> int:
        total = 0
        for each in range(self.augmented):
            total += each * each % 7
        return total

    def download(self) -> int:
        return sum(random.Random(0).randbytes(self.read))

    def __getitem__(self, index: int) -> int:
        return self.augment() + self.download()


def test_python_code_that_keeps_the_lock_is_told_from_other_such_code() -> None:
    found = parts(_Python(20_000, 100))
    assert found["transform"][1].endswith("_Python.augment")
    assert found["transform"][0] > 0.7
    found = parts(_Python(10, 50_000))
    assert found["read"][0] > 0.7


class _Power(_Data):
    """One C call that keeps the lock, and before it a file that is opened."""

    def __getitem__(self, index: int) -> int:
        with open(__file__, "rb") as file:
            file.read(10)
        return self.normalize()

    def normalize(self) -> int:
        return pow(3, 60_000) % 7


def test_a_c_call_that_keeps_the_lock_is_not_put_on_the_next_file_that_is_opened() -> None:
    found = parts(_Power())
    # The share falls where the machine is busy: 0.58 was seen.
    assert found["transform"][0] > 0.4


class _Elsewhere(_Data):
    pool: Any = None

    def __getitem__(self, index: int) -> int:
        if self.pool is None:
            self.pool = concurrent.futures.ThreadPoolExecutor(1)
        return int(self.pool.submit(self.work).result())

    def work(self) -> int:
        time.sleep(2e-3)
        return 1


def test_work_of_other_threads_is_unknown_and_the_wait_is_named() -> None:
    found = parts(_Elsewhere())
    assert found["unknown"][0] > 0.7
    assert "_Elsewhere.__getitem__ waits (concurrent.futures" in found["unknown"][1]


class _Many(_Data):
    def __init__(self) -> None:
        self.sample = {f"k{index}": torch.zeros(8) for index in range(40)}

    def __getitem__(self, index: int) -> Any:
        return self.sample


def _own_collate(samples: list[Any]) -> Any:
    return torch.stack([torch.stack(list(sample.values())) for sample in samples])


@pytest.mark.parametrize("collate", [None, _own_collate])
def test_many_tensors_are_collated(collate: Any) -> None:
    found = parts(_Many(), collate_fn=collate)
    assert found["collate"][0] > 0.7
    assert ("_own_collate" in found["collate"][1] or "torch.stack" in found["collate"][1]) == bool(
        collate
    )


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for _ in range(50):
            time.sleep(1e-3)
            yield 1


def test_iterable_data_sets_are_looked_at() -> None:
    assert "_Stream.__iter__ waits (time.sleep)" in parts(_Stream())["unknown"][1]


class _Deep(_Data):
    def __getitem__(self, index: int) -> int:
        return self.resize_step(600)

    def resize_step(self, depth: int) -> int:
        return self.resize_step(depth - 1) if depth else pow(3, 30_000) % 7


def test_deep_recursion_is_followed_to_its_end() -> None:
    assert "_Deep.resize_step" in parts(_Deep())["transform"][1]


def test_a_plain_list_is_a_data_set() -> None:
    found = parts([torch.zeros(8)] * 64)
    assert found["collate"][0] > 0.5


class _Raises(_Data):
    def __getitem__(self, index: int) -> int:
        raise OSError("no such sample")


class _Dies(_Data):
    def __getitem__(self, index: int) -> int:
        os._exit(3)


def test_a_data_set_that_fails_has_no_parts() -> None:
    assert split(Workload(DataLoader(_Raises(), 2)), 0.1) == ()
    # What kills a process is not tried again in this one.
    assert split(Workload(DataLoader(_Dies(), 2)), 0.1) == ()


def test_a_data_set_that_bears_no_fork_is_looked_at_here() -> None:
    home = os.getpid()

    class Here(_Data):
        def __getitem__(self, index: int) -> int:
            if os.getpid() != home:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            time.sleep(1e-3)
            return 0

    interval, threads = sys.getswitchinterval(), threading.active_count()
    assert "waits (time.sleep)" in parts(Here())["unknown"][1]
    assert (sys.getswitchinterval(), threading.active_count()) == (interval, threads)


def test_only_what_the_fetcher_calls_is_looked_at() -> None:
    with Watcher() as watcher:
        time.sleep(0.02)
    watcher.batch_made()
    assert watcher.looks().weighed == ()


class _Slow(_Data):
    def __getitem__(self, index: int) -> int:
        time.sleep(30)
        return 0


def test_a_batch_that_does_not_end_is_seen_all_the_same() -> None:
    # How much of the time is another question: on a busy machine the fetch's own first lines, too,
    # are met by a look.
    assert "_Slow.__getitem__ waits (time.sleep)" in parts(_Slow())["unknown"][1]


def test_a_stack_is_of_one_moment() -> None:
    """Of two calls in turn, each caller's place is that of the very call that is inside of it."""
    stop = threading.Event()

    def climb(depth: int) -> None:
        if depth:
            left(depth - 1)
            right(depth - 1)

    def left(depth: int) -> None:
        climb(depth)

    def right(depth: int) -> None:
        climb(depth)

    def run() -> None:
        while not stop.is_set():
            climb(8)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        stacks = [calls_of(thread.ident or 0) for _ in range(2_000)]
    finally:
        stop.set()
        thread.join()
    calls = set()
    for stack in stacks:
        for (inner, _, _), (outer, lasti, _) in itertools.pairwise(stack):
            if outer is climb.__code__:
                calls.add((inner, list(outer.co_positions())[lasti // 2][0]))
    assert {inner for inner, _ in calls} == {left.__code__, right.__code__}
    assert len(calls) == 2  # each from its own line
    assert calls_of(thread.ident or 0) == []
