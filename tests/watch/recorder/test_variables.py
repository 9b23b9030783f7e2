"""Variables that grow with the steps: which are found, and that looking leaves no trace."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import inspect
import itertools
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainfit.results.runs.watched import FIGURES, GrowingVariable
from trainfit.watch.recorder.first_batches import growing, told_by_workers
from trainfit.watch.recorder.looks import variables
from trainfit.watch.recorder.looks.variables import VariableLooks, parts_of
from trainfit.watch.recorder.worker_hooks import FetchCode

pytestmark = pytest.mark.skipif(
    sys.gettrace() is not None, reason="functions that a debugger or coverage traces are left alone"
)


@pytest.fixture(autouse=True)
def only_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the tests are a script's, too; here the functions count."""
    monkeypatch.setattr(variables, "_modules", lambda: iter(()))


Loop = Iterator[FrameType]


def looked(loop: Callable[[], Loop], looks: int = 8) -> dict[str, GrowingVariable]:
    """What is found in a loop, a step each time that it is resumed, 20 steps between two looks."""
    found, running = VariableLooks(), loop()
    for number in range(looks):
        frame = next(running)
        for _ in range(19):
            next(running)
        found.look(20 * (number + 1), frame, frozenset((frame.f_code,)))
    return {each.name: each for each in found.found()}


@pytest.mark.parametrize("whole", [True, False])
def test_copies_of_the_model_are_tensors_that_are_kept(whole: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def steps() -> Loop:
        best = []
        while True:
            best.append(copy.deepcopy(model if whole else model.state_dict()))
            yield inspect.currentframe()  # type: ignore[misc]

    found = looked(steps)["best"]
    assert (found.holds, found.item_bytes) == ("tensors", 2 * (8 * 8 + 8) * 4)


@pytest.mark.parametrize("new", [True, False])
def test_a_list_of_each_episode_is_no_growth_though_it_is_longer_at_each_look(new: bool) -> None:
    """Of REINFORCE: episodes become longer, and each has a list of its own."""

    def steps() -> Loop:
        logps, step = [], 0
        while True:
            step += 1
            if new and step % 20 == 1:
                logps = [torch.zeros(1, requires_grad=True).exp() for _ in range(step)]
            logps.append(torch.zeros(1, requires_grad=True).exp())
            yield inspect.currentframe()  # type: ignore[misc]

    assert ("logps" in looked(steps)) is not new


def test_a_list_that_is_added_to_at_its_beginning_grows() -> None:
    def steps() -> Loop:
        seen: list[torch.Tensor] = []
        while True:
            seen.insert(0, torch.zeros(4))
            yield inspect.currentframe()  # type: ignore[misc]

    assert looked(steps)["seen"].holds == "tensors"


def test_a_table_that_is_made_again_with_a_row_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """pd.concat([table, row]): pandas itself is not asked for anything but its length."""

    class DataFrame:
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return self.rows

    def steps() -> Loop:
        table = DataFrame(0)
        while True:
            table = DataFrame(len(table) + 1)
            yield inspect.currentframe()  # type: ignore[misc]

    assert not looked(steps)  # of anybody
    monkeypatch.setattr(DataFrame, "__module__", "pandas.core.frame")
    found = looked(steps)["table"]
    assert (found.kind, found.last_size) == ("DataFrame", 160)
    assert found.place.startswith("tests/watch/recorder/test_variables.py:")


def test_figures_that_are_never_closed_are_pyplots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import matplotlib.pyplot as plt\n# plt.figure()\nfig, ax = plt.subplots(1)\n"
    )
    kept: collections.OrderedDict[int, object] = collections.OrderedDict()
    pyplot = SimpleNamespace(Gcf=SimpleNamespace(figs=kept))
    monkeypatch.setitem(sys.modules, "matplotlib._pylab_helpers", pyplot)  # type: ignore[arg-type]
    monkeypatch.setattr(variables, "_modules", lambda: iter([(str(script), {}, None)]))

    def steps(closes: bool) -> Loop:
        while True:
            kept[len(kept)] = object()
            if closes:
                kept.clear()
            yield inspect.currentframe()  # type: ignore[misc]

    assert not looked(lambda: steps(closes=True))
    kept.clear()
    found = looked(lambda: steps(closes=False))["pyplot"]
    assert (found.kind, found.last_size) == (FIGURES, 160) and found.place.endswith("train.py:3")


class Buffer:
    def __init__(self) -> None:
        self.memory: list[Any] = []

    def push(self, *transition: Any) -> None:
        self.memory.append(transition)


class Agent:
    def __init__(self) -> None:
        self.buffer = Buffer()


def test_what_an_object_within_an_object_keeps() -> None:
    """A replay buffer without an end: three names deep."""

    def loop() -> Loop:
        agent = Agent()
        while True:
            agent.buffer.push(torch.ones(3), 1)
            yield sys._getframe()

    found = looked(loop)
    assert found["agent.buffer.memory"].holds == "tensors"
    _, first = inspect.getsourcelines(Buffer.push)
    assert found["agent.buffer.memory"].place.endswith(f"test_variables.py:{first + 1}")


def test_a_memory_stays_one_when_it_is_full() -> None:
    """What a training has filled with samples is no history of its losses, and no data set."""
    learned = torch.ones(3, requires_grad=True)

    def loop() -> Loop:
        agent, full = Agent(), collections.deque[Any](maxlen=90)
        states, losses, graphs = list[Any](), list[Any](), list[Any]()
        steps = list[Any]()
        rows = [(torch.ones(3), n) for n in range(500)]
        while True:
            agent.buffer.push([0.5, 1.0], 1)
            full.append((np.ones(4), 0, -1.0, np.ones(4)))
            states.append(torch.ones(2))
            losses.append(torch.ones(()))
            steps.append((len(steps), 0.5))
            graphs.append((learned * 2, 1))
            random.shuffle(rows)
            batch = [each[0] for each in random.sample(rows, 64)]
            assert batch
            yield sys._getframe()

    kept, running = VariableLooks(), loop()
    for number in range(8):
        frame = next(running)
        for _ in range(19):
            next(running)
        kept.look(20 * (number + 1), frame, frozenset((frame.f_code,)))
    assert "full" not in {each.name for each in kept.found()}
    assert sorted(kept.memories()) == ["agent.buffer.memory", "full", "states"]


def test_a_list_that_keeps_tensors_of_each_step() -> None:
    weight = torch.ones(3, requires_grad=True)

    def loop() -> Loop:
        kept: list[Any] = []
        numbers = []
        while True:
            out = weight * 2
            kept.append((torch.ones(3), {"out": out}))  # that line
            numbers.append(1.0)
            yield sys._getframe()

    found = looked(loop)
    kept = found["kept"]
    assert (kept.kind, kept.holds, kept.item_bytes) == ("list", "graphs", 24)
    assert kept.last_size - kept.first_size == kept.steps
    line = int(kept.place.rpartition(":")[2])
    with open(__file__) as file:
        assert "# that line" in file.readlines()[line - 1]
    assert found["numbers"].holds == "" and next(iter(found)) == "kept"


def test_what_a_cycle_keeps() -> None:
    def loop() -> Loop:
        batches = itertools.cycle(torch.ones(2) for _ in range(1000))  # this line
        while True:
            next(batches)
            yield sys._getframe()

    found = looked(loop)["batches"]
    assert (found.kind, found.holds, found.item_bytes) == ("cycle", "tensors", 8)
    with open(__file__) as file:
        assert "# this line" in file.readlines()[int(found.place.rpartition(":")[2]) - 1]


def test_a_history_in_an_object_and_a_tensor_that_is_never_cut() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.history: dict[str, Any] = {"loss": [], "name": "x"}
            self.tokens = torch.zeros(2, 4)

        def fit(self) -> Loop:
            while True:
                self.history["loss"].append(torch.ones(2))
                self.tokens = torch.cat([self.tokens, torch.zeros(2, 1)], 1)
                yield sys._getframe()

    found = looked(Trainer().fit)
    assert found["self.history['loss']"].holds == "tensors"
    assert found["self.tokens"].kind == "tensor"
    with open(__file__) as file:
        text = file.readlines()
    assert "torch.cat" in text[int(found["self.tokens"].place.rpartition(":")[2]) - 1]


def test_a_sum_that_keeps_the_graph_of_each_loss() -> None:
    weight = torch.ones((), requires_grad=True)

    def loop() -> Loop:
        total: Any = 0
        number = 0.0
        while True:
            total += weight * 2
            number += 1.0
            yield sys._getframe()

    found = looked(loop)
    assert found["total"].kind == "sum" and found["total"].holds == "graphs"
    assert set(found) == {"total"}


def test_a_cache_that_fills_a_list_that_is_cleared_and_what_stays() -> None:
    def loop() -> Loop:
        cache: dict[int, Any] = {}
        epoch: list[Any] = []
        weights = np.ones(1000)
        for number in range(10_000):
            cache[number % 50] = weights
            epoch.append(number)
            if number % 37 == 36:
                epoch.clear()
            yield sys._getframe()

    assert looked(loop) == {}


def test_objects_that_do_not_bear_to_be_looked_at() -> None:
    class Odd:
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("not this")

        def __len__(self) -> int:
            raise RuntimeError("nor this")

    class Entry(dict):  # type: ignore[type-arg]
        def __len__(self) -> int:
            raise RuntimeError("nor that")

    def loop() -> Loop:
        odd, entries, kept = Odd(), {"a": Entry()}, [0]
        while True:
            kept.append(1)
            assert odd is not None and entries
            yield sys._getframe()

    assert set(looked(loop)) == {"kept"}


def test_a_look_keeps_nothing_alive() -> None:
    """Before Python 3.13 a frame keeps what f_locals has given."""
    seen = []

    def loop() -> Loop:
        while True:
            out = torch.ones(5)
            seen.append(weakref.ref(out))
            yield sys._getframe()
            del out

    running = loop()
    frame = next(running)
    VariableLooks().look(10, frame, frozenset((frame.f_code,)))
    next(running)
    gc.collect()
    assert seen[0]() is None


def test_the_variables_that_the_script_asked_for_stay_its_own() -> None:
    def loop() -> Loop:
        count = 0
        asked = locals()
        while True:
            count += 1
            yield sys._getframe()
            assert asked["count"] >= 0 and count

    running = loop()
    frame = next(running)
    VariableLooks().look(10, frame, frozenset((frame.f_code,)))
    next(running)
    next(running)


def test_functions_that_are_not_of_the_loop_are_left_alone() -> None:
    def loop() -> Loop:
        kept = []
        while True:
            kept.append(1)
            yield sys._getframe()

    found, running = VariableLooks(), loop()
    for number in range(8):
        frame = next(running)
        for _ in range(19):
            next(running)
        found.look(20 * (number + 1), frame, frozenset())
    assert found.found() == ()


class Frames:
    """A data set with two caches."""

    def __init__(self) -> None:
        self.cache: dict[int, torch.Tensor] = {}

    @staticmethod
    @functools.lru_cache(maxsize=None)  # noqa: UP033, as scripts have it
    def load(index: int) -> float:
        return index / 2

    def __getitem__(self, index: int) -> torch.Tensor:
        self.load(index)
        self.cache[index] = torch.ones(4)  # it stays
        return self.cache[index]


@functools.cache
def parsed(index: int) -> int:
    return index


def test_what_a_data_set_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, looks = Frames(), VariableLooks()
    own = {"parsed": parsed, "Frames": Frames, "__name__": __name__}
    monkeypatch.setattr(variables, "_modules", lambda: iter([(__file__, own, None)]))
    part = torch.utils.data.Subset(frames, range(9))  # type: ignore[arg-type]
    for step in range(8):
        for index in range(20 * step, 20 * step + 20):
            frames[index], parsed(index)
        looks.look_at(20 * step, parts_of(part))
    found = {each.name: each for each in looks.found()}
    assert found["self.cache"].holds == "tensors" and found["self.cache"].kind == "dict"
    assert found["parsed"].kind == "cache" and found["parsed"].last_size == 160
    assert found["Frames.load"].kind == "cache" and found["Frames.load"].last_size == 160
    source = Path(__file__).read_text().splitlines()
    lines = {name: int(each.place.rpartition(":")[2]) for name, each in found.items()}
    assert source[lines["self.cache"] - 1].endswith("# it stays")
    assert source[lines["parsed"] - 1] == "@functools.cache"
    Frames.load.cache_clear()
    parsed.cache_clear()


def test_states_of_a_model_that_are_kept() -> None:
    """``copy.deepcopy(model.state_dict())`` is an ordered dictionary."""
    model = torch.nn.Linear(4, 2)

    def loop() -> Loop:
        snapshots: list[Any] = []
        while True:
            snapshots.append((0.5, copy.deepcopy(model.state_dict())))
            yield sys._getframe()

    kept = looked(loop)["snapshots"]
    assert (kept.holds, kept.item_bytes) == ("tensors", 40)


class Meter:
    def __init__(self) -> None:
        self.values: list[Any] = []


class State:
    def __init__(self) -> None:
        self.meters = {"loss": Meter(), "accuracy": Meter()}


def test_what_an_object_in_a_small_dictionary_keeps() -> None:
    weight = torch.ones(3, requires_grad=True)

    def loop() -> Loop:
        state = State()
        while True:
            state.meters["loss"].values.append((weight * 2).sum())
            yield sys._getframe()

    assert looked(loop)["state.meters['loss'].values"].holds == "graphs"


def test_the_line_of_a_list_in_a_dictionary_of_an_object() -> None:
    class Probe:
        def __init__(self) -> None:
            self.acts: dict[str, list[torch.Tensor]] = {}

        def keep(self, out: torch.Tensor) -> None:
            self.acts.setdefault("0", []).append(out)  # the hook's line

    def steps() -> Loop:
        probe = Probe()
        while True:
            probe.keep(torch.ones(64))
            yield inspect.currentframe()  # type: ignore[misc]

    found = looked(steps)["probe.acts['0']"]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, each in enumerate(lines, 1) if each.endswith("# the hook's line"))
    assert found.holds == "tensors" and found.place.endswith(f"test_variables.py:{line}")


def test_handlers_of_a_logger_that_each_step_adds() -> None:
    def loop() -> Loop:
        logger = logging.getLogger("test_variables")
        while True:
            logger.addHandler(logging.NullHandler())  # that line
            yield sys._getframe()

    grown = looked(loop)["logger.handlers"]
    first = inspect.getsourcelines(test_handlers_of_a_logger_that_each_step_adds)[1]
    assert grown.place.endswith(f"test_variables.py:{first + 4}")


def test_a_worker_s_first_look_does_not_put_off_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads which modules are the script's, once; later looks take turns by what they cost."""
    looked: list[int] = []

    def costs(self: VariableLooks, step: int, objects: object) -> None:
        looked.append(step)
        spent[0] += 0.02

    spent = [0.0]
    monkeypatch.setattr("time.thread_time", lambda: spent[0])
    monkeypatch.setattr(VariableLooks, "look_at", costs)
    code = FetchCode(tmp_path / "rank0")
    code.dataset = object()
    seen = []
    for tenth in range(1, 300):
        code.ended(0.1)
        code.look_for_growth(tenth / 10)
        seen.append(len(looked))
    assert seen[0] == 1 and seen[9] == 2 and seen[-1] == 3


def test_a_worker_tells_of_what_grows_as_soon_as_that_is_known(tmp_path: Path) -> None:
    """Next to other programs there are few looks at its lines, and a run is ended by Ctrl-C."""

    class Cached:
        def __init__(self) -> None:
            self.ready: dict[int, list[int]] = {}

    stem = tmp_path / "rank0"
    code = FetchCode(stem)
    code.dataset = Cached()
    code.write()
    assert not told_by_workers(stem)
    for look in range(30):
        for number in range(40):
            code.dataset.ready[40 * look + number] = [0]
        code.ended(0.1)
        code.look_for_growth(float(100 * look))
        code.look_for_growth(float(100 * look) + 50.0)  # a batch needs that long
        code.write()
    (grows,) = growing(told_by_workers(stem))
    assert grows.name.endswith("ready")
    (path,) = tmp_path.iterdir()
    path.unlink()
    code.write()
    assert not told_by_workers(stem)  # nothing is new


# --- Python's objects, a data set of the training process, a state that keeps its graph -----------


def test_entries_of_python_objects_are_told_with_their_size() -> None:
    def steps() -> Loop:
        rows, plain, by_name = [], [], {}
        for step in itertools.count():
            plain.extend(step + part / 7 for part in range(100))
            rows.append({"step": 1000 + step, "value": step / 7, "words": ["a", "b"]})
            by_name[f"sample {step}"] = (step / 3, step / 7)
            yield sys._getframe()

    found = looked(steps)
    assert all(each.holds == "" for each in found.values())
    assert found["plain"].item_bytes == 32  # a float, and its place
    assert 250 <= (found["rows"].item_bytes or 0) <= 700
    assert 150 <= (found["by_name"].item_bytes or 0) <= 350
    assert found["plain"].bytes_per_step == pytest.approx(3200)


def test_the_line_that_adds_to_a_history_by_its_name() -> None:
    def steps() -> Loop:
        history: dict[str, list[float]] = {"loss": [], "scores": []}
        for step in itertools.count():
            history["loss"].append(step / 7)
            history["scores"].append(step / 3)
            yield sys._getframe()

    found = looked(steps)
    (first, second) = (
        int(found[f"history[{name!r}]"].place.rpartition(":")[2]) for name in ("loss", "scores")
    )
    assert second == first + 1


class Numbered:
    def __sizeof__(self) -> int:
        raise AssertionError("nobody asks the script's objects")


def test_objects_of_the_script_are_not_asked_for_their_size() -> None:
    def steps() -> Loop:
        kept = []
        for step in itertools.count():
            each = Numbered()
            each.value = step / 7  # type: ignore[attr-defined]
            kept.append(each)
            yield sys._getframe()

    assert (looked(steps)["kept"].item_bytes or 0) > 24


@pytest.mark.parametrize("limit", [None, 10**6])
def test_a_deque_that_has_a_limit_is_full_some_time(limit: int | None) -> None:
    def steps() -> Loop:
        memory: collections.deque[float] = collections.deque(maxlen=limit)
        for step in itertools.count():
            memory.append(step / 7)
            yield sys._getframe()

    assert ("memory" in looked(steps)) is (limit is None)


def test_what_a_data_set_keeps_in_the_training_process() -> None:
    class Cached(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.cache: dict[int, np.ndarray] = {}

    dataset = Cached()
    found = VariableLooks()
    for number in range(8):
        for each in range(20):
            dataset.cache[20 * number + each] = np.zeros(100)
        subset = torch.utils.data.Subset(dataset, range(3))
        found.look(20 * (number + 1), None, frozenset(), [subset])
    (cache,) = found.found()
    assert cache.name == "self.cache" and cache.of_data and cache.item_bytes == 800
    assert cache.place.startswith("tests") or "test_variables.py" in cache.place


def _recurrent(detach: bool, *, keep: bool = False) -> Callable[[], Loop]:
    def steps() -> Loop:
        cell, kept = torch.nn.GRUCell(2, 3), []
        state = torch.zeros(1, 3)
        for _ in itertools.count():
            state = cell(torch.ones(1, 2), state.detach() if detach else state)
            if keep:
                kept.append(state)
            yield sys._getframe()

    return steps


def test_a_state_that_goes_from_step_to_step_with_its_graph() -> None:
    found = looked(_recurrent(detach=False))
    assert found["state"].kind == "graph" and found["state"].holds == "graphs"
    assert found["state"].last_size == 140 and found["state"].steps == 140
    assert "test_variables.py" in found["state"].place
    assert not looked(_recurrent(detach=True))


def test_a_state_of_two_tensors_that_a_module_has() -> None:
    class Stream(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.LSTMCell(2, 3)
            self.state: Any = None

    def steps() -> Loop:
        stream = Stream()
        for _ in itertools.count():
            stream.state = stream.cell(torch.ones(1, 2), stream.state)
            yield sys._getframe()

    found = looked(steps)
    assert found["stream.state"].kind == "graph"
    assert "test_variables.py" in found["stream.state"].place


def test_results_that_a_list_keeps_are_no_state() -> None:
    found = looked(_recurrent(detach=True, keep=True))
    assert list(found) == ["kept"]


def test_a_result_that_was_computed_once_is_no_state() -> None:
    def steps() -> Loop:
        weight = torch.ones(3, requires_grad=True)
        scaled = weight / weight.norm()
        for _ in itertools.count():
            loss = (scaled * 2).sum()
            loss.backward(retain_graph=True)
            yield sys._getframe()

    assert not looked(steps)
