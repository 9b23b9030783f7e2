"""Whose fault: told by the frames of a traceback, and by the text of one."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainfit.findings.failure import of_exception
from trainfit.findings.tracebacks import own_fault_in
from trainfit.results.files.errors import TrainfitError
from trainfit.scripts import execute, fault
from trainfit.scripts.fault import own_fault, script_traceback

#: A frame of ours, by what it does with what the script gave it.
OURS = {
    "an attribute": ("return given.absent", AttributeError, True),
    "an item": ("return {}[given]", KeyError, True),
    "an index": ("return [][given]", IndexError, True),
    "an assert": ("assert not given", AssertionError, True),
    "a name": ("return absent", NameError, True),
    "a call": ("return given()", TypeError, True),
    "a conversion": ("return int('x')", ValueError, True),
    "unpacking": ("one, two = (1,)", ValueError, True),
    "the script's call passed on": ("return len(*args)", TypeError, False),
    "on purpose": ("raise RuntimeError('Expected all tensors')", RuntimeError, False),
    "to be acted on": ("raise TrainfitError('no GPU')", TrainfitError, False),
    "a file": ("return open('/absent')", OSError, False),
    "memory": ("raise MemoryError", MemoryError, False),
    "syntax": ("compile('def f(:', 'x.py', 'exec')", SyntaxError, False),
}
SCRIPT = "def called(function):\n    return function(1, 2, 3)\n"


def of_file(path: str, text: str, **names: Any) -> dict[str, Any]:
    exec(compile(text, path, "exec"), names)
    return names


def raised(body: str, path: str) -> BaseException:
    """What a function of ours with this body raises, called by a script."""
    text = f"def ours(given, *args):\n    {body}\n"
    ours = of_file(path, text, TrainfitError=TrainfitError)["ours"]
    script = of_file("/home/user/train.py", SCRIPT)["called"]
    try:
        script(ours)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def place(name: str = "engine.py") -> str:
    return str(Path(fault.__file__).parents[1] / "simgpu" / name)


def files_of(text: str) -> list[str]:
    """Of a traceback, without this file, whose frames called the script's."""
    return [name for name in re.findall(r'File "(.*?)"', text) if name != __file__]


@pytest.mark.parametrize("case", OURS)
def test_by_the_innermost_frame(case: str) -> None:
    body, kind, is_ours = OURS[case]
    error = raised(body, place())
    found = own_fault(error)
    assert isinstance(error, kind) and (found is not None) == is_ours
    if found is not None:
        assert found.place == "trainfit/simgpu/engine.py:2"
        assert found.error.startswith(type(error).__name__) and "train.py" in found.traceback


def test_a_refusal_of_pytorch_is_the_scripts() -> None:
    """Also where the frame of ours did not pass on the very arguments."""
    torch = pytest.importorskip("torch")
    text = "def ours(*args):\n    return torch.zeros(3).sum(7)\n"
    ours = of_file(place(), text, torch=torch)["ours"]
    script = of_file("/home/user/train.py", SCRIPT)["called"]
    with pytest.raises(IndexError) as told:
        script(ours)
    assert own_fault(told.value) is None


@pytest.mark.parametrize("how", ["raise ValueError('mine') from error", "raise ValueError('mine')"])
def test_an_error_in_answer_to_ours_is_ours(how: str) -> None:
    ours = of_file(place(), "def ours(*args):\n    return args.absent\n")["ours"]
    text = (
        f"def called(f):\n    try:\n        f()\n    except AttributeError as error:\n        {how}"
    )
    script: Callable[..., Any] = of_file("/home/user/train.py", text)["called"]
    with pytest.raises(ValueError) as told:
        script(ours)
    found = own_fault(told.value)
    assert found is not None and found.error.startswith("AttributeError")


def test_a_refusal_in_answer_to_an_error_of_ours_is_none() -> None:
    text = (
        "def ours(*args):\n  try:\n    {}['a']\n  except KeyError:\n    raise RuntimeError('no')\n"
    )
    script = of_file("/home/user/train.py", SCRIPT)["called"]
    with pytest.raises(RuntimeError) as told:
        script(of_file(place(), text)["ours"])
    assert own_fault(told.value) is None


def test_an_error_of_the_script_below_a_frame_of_ours_is_its_own() -> None:
    ours = of_file(place(), "def ours(function):\n    return function()\n")["ours"]
    script = of_file("/home/user/train.py", "def act():\n    return None.absent\n")["act"]
    with pytest.raises(AttributeError) as told:
        ours(script)
    assert own_fault(told.value) is None
    text = script_traceback(told.value)
    assert files_of(text) == ["/home/user/train.py"]


def test_the_script_sees_no_frame_of_ours() -> None:
    text = script_traceback(raised("raise RuntimeError('no')", place()))
    assert files_of(text) == ["/home/user/train.py"]
    assert text.endswith("RuntimeError: no\n")


def test_by_the_text_of_a_process_that_died() -> None:
    head = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
    ours = f'  File "{place()}", line 7, in install\n    x.y\n'
    users = '  File "/home/user/train.py", line 3, in <module>\n    f()\n'
    found = own_fault_in("a warning\n" + head + ours + "AttributeError: no 'y'\n")
    assert found is not None
    assert (found.error, found.place) == ("AttributeError: no 'y'", "trainfit/simgpu/engine.py:7")
    assert own_fault_in(head + users + ours + "AttributeError: no 'y'\n") is None
    assert own_fault_in(head + ours + "OSError: [Errno 28] No space left on device\n") is None
    assert own_fault_in(head + ours + "ModuleNotFoundError: No module named 'torch'\n") is None
    no_room = "ImportError: libtorch_cpu.so: failed to map segment from shared object\n"
    assert own_fault_in(head + ours + no_room) is None
    assert own_fault_in(head + "SyntaxError: x\n") is None
    assert own_fault_in("killed\n") is None and own_fault_in(head + ours) is None


def test_a_simulated_tensor_is_named_as_one_of_cuda() -> None:
    outcome = execute._failure(RuntimeError("inplace: [MetaFloatType [64, 32]], output 0"))
    for text in (outcome.message, outcome.traceback):
        assert "[torch.cuda.FloatTensor [64, 32]], output 0" in text and "MetaFloat" not in text


def _reports(reasons: dict[str, str]) -> BaseException:
    """What Transformers raises for weights that it could not convert, of which it logs why."""
    library = of_file(
        "/usr/lib/python3/site-packages/transformers/utils/loading_report.py",
        "def log_state_dict_report(loading_info):\n    raise RuntimeError('look above')\n",
    )
    script = of_file("/home/user/train.py", SCRIPT)["called"]
    info = types.SimpleNamespace(conversion_errors=reasons)
    with pytest.raises(RuntimeError) as told:
        script(lambda *_: library["log_state_dict_report"](info))
    return told.value


def test_what_a_library_only_logged_is_part_of_the_chain() -> None:
    logged = (
        'Traceback (most recent call last):\n  File "/lib/torchao/int4.py", line 140, in from_hp\n'
        f'    raise ImportError()\n  File "{place()}", line 7, in run\n    ours()\n'
        "ImportError: Requires mslk >= 1.0.0\nRequires mslk >= 1.0.0\nError: of layer 1"
    )
    text = script_traceback(_reports({"layer.1": logged, "layer.2": "no traceback"}))
    assert "Error: of layer" not in text and place() not in text
    assert text.endswith("RuntimeError: look above\n")
    found = of_exception(text)
    assert found is not None and "pip install 'mslk>=1.0.0'" in found.fix.action
    for nothing in ({}, {"layer.1": "Op: no traceback"}):
        assert script_traceback(_reports(nothing)).startswith("Traceback (most")
