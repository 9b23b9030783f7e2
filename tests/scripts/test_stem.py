"""Runs that are forked where a script first looks at its arguments, and when there are none."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers_cli import SCRIPTS
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.runs.processes import WarmProcesses
from trainfit.plan.runs.tracing import Trace, Tracer
from trainfit.results.runs.script import SandboxRequest
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import ForcedAmp, InterventionRequest, LoaderOverride
from trainfit.scripts.template_process import Arguments, _other_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks after imports")

#: A script whose ``{before}`` runs before it looks at its arguments.
_SCRIPT = """
import os, sys, torch
open(f"imports-{{os.getpid()}}", "w")
{before}
print("says", flush=True)
batch = int(sys.argv[1])
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(batch, 64).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def command(tmp_path: Path, before: str) -> Command:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(before=before))
    parsed = parse_command(["python", str(script), "{batch_size:8}"])
    # What it writes shows how often its beginning runs.
    return dataclasses.replace(parsed, sandbox=SandboxRequest(allow_writes=True))


def traces(
    parsed: Command, *values: Mapping[str, str], warm: bool = True, amp: ForcedAmp | None = None
) -> list[Trace]:
    """Runs at two values at a time, as a plan makes them."""
    with (
        WarmProcesses() as processes,
        Tracer(parsed, find_gpu("RTX 4090"), steps=3, warm=processes if warm else None) as tracer,
        ThreadPoolExecutor(2) as pool,
    ):
        return list(pool.map(lambda each: tracer.trace(RunSpec(values=each, force=amp)), values))


def imports(tmp_path: Path) -> int:
    return len(list(tmp_path.glob("imports-*")))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_arguments_are_looked_at_but_for_the_name() -> None:
    looks: list[int] = []
    words = Arguments(["a.py"], lambda: looks.append(1))
    assert words[0] == "a.py" and isinstance(words, list) and not looks

    def fill() -> None:
        looks.append(1)
        words.fill(["a.py", "--x", "1"])

    words = Arguments(["a.py"], fill)
    assert words[1:] == ["--x", "1"] and looks == [1]
    words.append("2")
    assert (words.pop(), len(words), list(words)) == ("2", 3, ["a.py", "--x", "1"])
    assert looks == [1]


@pytest.mark.parametrize(
    "look",
    [len, list, repr, iter, sorted, bool, lambda w: w[-1], lambda w: w[:], lambda w: "a" in w,
     lambda w: w == [], lambda w: w * 2, lambda w: [*w], lambda w: " ".join(w),
     lambda w: w.copy(), lambda w: w.pop(), lambda w: w.index("a.py"), lambda w: tuple(w)],
)  # fmt: skip
def test_every_way_to_look_at_arguments(look: object) -> None:
    looks: list[int] = []
    look(Arguments(["a.py"], lambda: looks.append(1)))  # type: ignore[operator]
    assert looks == [1]


@pytest.mark.slow
@pytest.mark.parametrize("amp", [None, pytest.param("on", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("script", "words"),
    [("train.py", "--batch_size={batch_size:8} --amp={amp:true} --workers=1"),
     pytest.param("infer.py", "--batch_size={batch_size:64}", marks=pytest.mark.slow),
     pytest.param("gan.py", "{batch_size:8}", marks=pytest.mark.slow),
     pytest.param("variable.py", "--batch_size={batch_size:8}", marks=pytest.mark.slow)],
)  # fmt: skip
def test_forked_runs_are_what_fresh_ones_are(
    script: str, words: str, amp: ForcedAmp | None
) -> None:
    if amp == "on" and script != "infer.py" and script != "train.py":
        pytest.skip("one kind of forced autocast is enough")
    parsed = parse_command(["python", str(SCRIPTS / script), *words.split()])
    values = [{"batch_size": "8"}, {"batch_size": "24"}]
    forked = traces(parsed, *values, amp=amp)[1:]  # not the first that its stem makes
    fresh = traces(parsed, *values[1:], warm=False, amp=amp)
    for one, two in zip(forked, fresh, strict=True):
        assert one.recording is not None and two.recording is not None
        assert one.recording.to_bytes() == two.recording.to_bytes()
        assert one.output == two.output
        same = {"seconds": 0.0, "peak_ram_bytes": 0, "sample_s": None}
        assert vars(one.outcome) | same == vars(two.outcome) | same


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_what_comes_before_the_arguments_is_done_once(tmp_path: Path) -> None:
    parsed = command(tmp_path, "")
    found = traces(parsed, *({"batch_size": str(n)} for n in (2, 4, 8)))
    assert [each.outcome.steps for each in found] == [3, 3, 3]
    assert [each.output for each in found] == ["says\n"] * 3
    assert imports(tmp_path) == 1


@pytest.mark.usefixtures("warm")
def test_an_intervention_has_a_process_of_its_own(tmp_path: Path) -> None:
    parsed = command(tmp_path, "")
    with (
        WarmProcesses() as warm,
        Tracer(parsed, find_gpu("RTX 4090"), steps=3, warm=warm) as tracer,
    ):
        tracer.trace()
        trace = tracer.trace(RunSpec(interventions=(InterventionRequest("sgd"),)))
    assert trace.outcome.steps == 3
    assert imports(tmp_path) == 2


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "before",
    [
        "file = open('open.txt', 'w')",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "import threading, time\n"
                "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
                "import subprocess; child = subprocess.Popen(['sleep', '600'])",
                "x = torch.ones(3, device='cuda')",
                "context = torch.autocast('cuda')",
                "import torch.utils.data as data; loader = data.DataLoader([1, 2])",
                "import signal; signal.setitimer(signal.ITIMER_REAL, 500)",
            )
        ),
    ],
    ids=["file", "thread", "child", "tensor", "autocast", "loader", "timer"],
)
def test_where_a_fork_would_not_be_a_fresh_process(before: str, tmp_path: Path) -> None:
    parsed = command(tmp_path, before)
    found = traces(parsed, {"batch_size": "2"}, {"batch_size": "4"})
    assert [each.outcome.steps for each in found] == [3, 3]
    assert imports(tmp_path) == 3  # the stem's, and one for each run


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_script_that_never_looks_at_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = _SCRIPT.format(before="").replace("int(sys.argv[1])", "8")
    script.write_text(text)
    (trace,) = traces(parse_command(["python", str(script)]), {})
    assert trace.outcome.steps == 3


@pytest.mark.usefixtures("warm")
def test_a_script_that_dies_before_its_arguments(tmp_path: Path) -> None:
    parsed = command(tmp_path, "os.abort()")
    found = traces(parsed, {"batch_size": "2"}, {"batch_size": "4"})
    assert [each.outcome.status for each in found] == ["died", "died"]
    assert "SIGABRT" in found[0].outcome.message


@pytest.mark.usefixtures("warm")
def test_a_loader_gets_another_batch_size_in_a_forked_run() -> None:
    parsed = parse_command(["python", str(SCRIPTS / "train.py")])
    with (
        WarmProcesses() as warm,
        Tracer(parsed, find_gpu("RTX 4090"), steps=3, warm=warm) as tracer,
    ):
        first = tracer.trace()
        other = tracer.trace(RunSpec(loader=LoaderOverride(0, 32)))
    assert first.outcome.loader is not None and other.outcome.loader is not None
    assert (first.outcome.loader.batch_size, other.outcome.loader.batch_size) == (8, 32)


@pytest.mark.usefixtures("warm")
def test_no_process_is_left(tmp_path: Path) -> None:
    traces(command(tmp_path, ""), {"batch_size": "2"})
    for path in tmp_path.glob("imports-*"):
        assert not Path("/proc", path.name.removeprefix("imports-")).exists()
    assert os.getpid()


@pytest.mark.parametrize(("name", "found"), [("jemalloc_bg_thd", False), ("worker", True)])
def test_a_thread_whose_library_prepares_for_forks_does_not_count(name: str, found: bool) -> None:
    """``import pyarrow`` starts jemalloc's, and with it every run imported all anew."""
    named, end = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        named.set()
        end.wait()

    before = _other_threads()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        named.wait()
        more = len(_other_threads()) - len(before)
    finally:
        end.set()
        thread.join()
    assert more == found


def test_arguments_reach_a_fresh_process_as_a_list() -> None:
    """As ``multiprocessing`` hands ``sys.argv`` to what it spawns."""
    words = Arguments(["a.py"], lambda: words.fill(["a.py", "--lr", "1"]))
    sent = pickle.loads(pickle.dumps(words))
    assert type(sent) is list and sent == ["a.py", "--lr", "1"]
