"""Truth values and numbers of the GPU that nobody knows: the run goes on as a healthy one does."""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path

import pytest

import trainfit
from trainfit.simgpu.device.conditions import ROUNDS

BEGIN = """
import math, operator, sys
import torch
a, b = (torch.rand(100, device="cuda") for _ in range(2))
ids = torch.rand(100, 500, device="cuda").argmax(1)
tolerance = 1e-5
def as_expected(x, y):
    return bool((x > y).all())
def refuses(x):
    if not (x > 0).all():
        raise ValueError("not positive")
    return x
def finite(x):
    return not torch.isnan(x).any() and x.min() >= 0
class Limits:
    low = 0.25
    def __init__(self):
        self.high = 0.5
limits = Limits()
class Tokenizer:
    ends = [1, 2]
    @property
    def end(self):
        return 1
    def stop(self):
        return 1
tokenizer = Tokenizer()
"""


def ran(tmp_path: Path, text: str) -> dict[str, object]:
    script = tmp_path / f"script_{len(list(tmp_path.iterdir()))}.py"
    script.write_text(BEGIN + textwrap.dedent(text))
    return runpy.run_path(str(script))


@pytest.mark.parametrize(
    "check",
    [
        "(a >= b).all()",
        "not (a < b).any()",
        "(a >= b).all() and (b >= 0).all()",
        "(a >= b).all() or (b >= a).all()",
        "((a >= b).all() and not (b < 0).any()), 'a message'",
        "(a >= b).all().item()",
        "bool((a >= b).all())",
        "torch.all(a >= b).item() is True",
        "(a < b).any().item() == False",
        "(a < b).any().item() is not True",
        "a.min() >= 0",
        "0 <= a.min() <= 1",
        "a.sum() == b.sum()",
        "a.sum() != b.sum()",
        "torch.isfinite(a).all()",
        "torch.equal(a, b)",
        "not torch.equal(a, b)",
        "torch.allclose(a, b)",
        "not torch.allclose(a, b)",
        "7 in ids",
        "7 not in ids",
        "ids[0] in ids",
        "all((x > 0).all() for x in (a, b))",
        "not any((x < 0).any() for x in (a, b))",
        "all([bool(x.any()) for x in (a, b)])",
        "as_expected(a, b)",
        "not as_expected(b, a)",
        "finite(a)",
        "(lambda x: bool((x > 0).all()))(a)",
        "a.max().item() < 0.5",
        "0.25 < a.max().item() < limits.high",
        "float(a.max()) <= tolerance",
        "abs(a.sum().item() - 7) < tolerance",
        "a.sum().item() == 12.5",
        "int(ids.max()) == 499",
        "ids.max().item() in (3, 4)",
        "not a.max().item() > 0.5",
    ],
)
def test_a_check_passes(sim: trainfit.Simulation, tmp_path: Path, check: str) -> None:
    ran(tmp_path, f"assert {check}")
    test, _, _ = check.partition(", '")
    ran(tmp_path, f"if not ({test}):\n    raise ValueError('bad')")
    ran(tmp_path, f"if {test}:\n    pass\nelse:\n    print('bad'); sys.exit(1)")
    ran(tmp_path, f"torch._assert({test}, 'bad')")
    ran(tmp_path, f"def check():\n    ok = {test}\n    print(ok)\n    assert ok\ncheck()")


def test_checks_are_noted_once_a_place(sim: trainfit.Simulation, tmp_path: Path) -> None:
    ran(
        tmp_path,
        "for _ in range(3):\n    assert (a >= b).all()\nrefuses(a)\ntorch._assert_async(a[0])",
    )
    notes = sim.recording.header["assumptions"]
    assert {text.partition(" (at ")[0] for text in notes} == {
        "a check of GPU data was assumed to pass"
    }
    assert sorted(notes.values()) == [1, 3]


@pytest.mark.parametrize(
    ("loop", "rounds"),
    [
        ("for _ in range(50):\n    n += 1\n    if a.sum() < tolerance:\n        break", 50),
        ("for _ in range(50):\n    n += 1\n    if not a.sum() > tolerance:\n        break", 50),
        ("for _ in range(50):\n    n += 1\n    if torch.allclose(a, b):\n        break", 50),
        ("for _ in range(50):\n    n += 1\n    if a.sum().item() < 3:\n        break", 50),
        ("while n < 9 and a.sum() > tolerance:\n    n += 1", 9),
        ("while a.sum() > tolerance:\n    n += 1", ROUNDS),
        ("while not (a.sum() < tolerance):\n    n += 1", ROUNDS),
        ("while a.sum().item() > tolerance:\n    n += 1", ROUNDS),
        ("while True:\n    n += 1\n    if (a < b).all():\n        break", ROUNDS + 1),
        ("while ids[0].item() != tokenizer.end:\n    n += 1", ROUNDS),
        ("while ids[0].item() not in tokenizer.ends:\n    n += 1", ROUNDS),
        ("while ids[0].item() != tokenizer.stop() and n < 9:\n    n += 1", 9),
        (
            "for _ in range(50):\n  n += 1\n  if int(ids[0]) in (tokenizer.end, 2):\n    break",
            50,
        ),
        (
            "for _ in range(50):\n  n += 1\n  if ids[0].item() == tokenizer.stop():\n    break",
            50,
        ),
        ("e = 1.0\nwhile e > tolerance:\n    n += 1\n    e = (a - b).norm().item()", ROUNDS + 1),
        ("done = False\nwhile not done:\n    n += 1\n    done = bool((a < b).all())", ROUNDS + 1),
    ],
)
def test_a_stopping_condition_does_not_hold_yet(
    sim: trainfit.Simulation, tmp_path: Path, loop: str, rounds: int
) -> None:
    assert ran(tmp_path, f"n = 0\n{loop}")["n"] == rounds
    inside = textwrap.indent(f"n = 0\n{loop}\nreturn n", "    ")
    twice = f"def solve():\n{inside}\nfirst, second = solve(), solve()"
    found = ran(tmp_path, twice)
    assert found["first"] == found["second"] == rounds


def test_loops_that_train_do_not_end(sim: trainfit.Simulation, tmp_path: Path) -> None:
    text = f"""
    model = torch.nn.Linear(100, 100).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n, loss = 0, None
    while loss is None or loss > tolerance:
        loss = model(a).square().mean()
        loss.backward()
        optimizer.step()
        n += 1
        if n == {3 * ROUNDS}:
            break
    """
    assert ran(tmp_path, text)["n"] == 3 * ROUNDS


@pytest.mark.parametrize(
    "guard",
    [
        "if not (a > 0).any():\n        return 0",
        "if (a > 0).any():\n        return 0",
        "if (a > 0).sum() == 0:\n        return 0",
        "if not bool((a > 0).any()):\n        return 0",
        "if (a > 0).any():\n        pass\n    else:\n        return 0",
    ],
)
def test_a_guard_clause_is_not_taken(sim: trainfit.Simulation, tmp_path: Path, guard: str) -> None:
    assert ran(tmp_path, f"def work():\n    {guard}\n    return 1\nn = work()")["n"] == 1


@pytest.mark.parametrize(
    "test", ["known.sum() == 2", "known.max().item() > 4", "5 in known", "(known > 0).all()"]
)
def test_what_is_known_decides(sim: trainfit.Simulation, tmp_path: Path, test: str) -> None:
    with pytest.raises(AssertionError):
        ran(tmp_path, f"known = torch.tensor([1, 0, 2], device='cuda')\nassert {test}")


@pytest.mark.parametrize(
    ("test", "is_true"),
    [
        ("a[0] < math.inf", True),
        ("math.inf > a.mean()", True),
        ("a.mean() <= torch.tensor(math.inf)", True),
        ("torch.tensor(math.inf, device='cuda') > a.mean()", True),
        ("a.mean() < torch.full((), -math.inf, device='cuda')", False),
        ("a.mean() > -math.inf", True),
        ("a.mean() > math.inf", False),
        ("a.mean() < -math.inf", False),
        ("-math.inf < a.mean()", True),
        ("-math.inf >= a.mean()", False),
    ],
)
def test_an_unknown_number_is_finite(
    sim: trainfit.Simulation, tmp_path: Path, test: str, is_true: bool
) -> None:
    """The best value so far begins at infinity: the first one is better."""
    text = f"best = None\nif {test}:\n    best = a.mean()\nis_true = best is not None"
    assert ran(tmp_path, text)["is_true"] is is_true


def test_one_of_several_unknown_numbers_may_be_infinite(
    sim: trainfit.Simulation, tmp_path: Path
) -> None:
    found = ran(tmp_path, "some = ids.float().log() > -math.inf")["some"]
    assert sim.engine.values.read(found) is None


LENGTH = """
x, longer = torch.zeros(2, 80, 3, device="cuda"), torch.zeros(2, 90, 3, device="cuda")
def length():
    return (torch.rand(4, 70, device="cuda") > 0.5).sum(1).max()
n, m = length(), length()
"""


@pytest.mark.parametrize(
    ("sliced", "shape"),
    [
        ("x[:, :n]", (2, 80, 3)),
        ("x[:, : n + 3]", (2, 80, 3)),
        ("x[:, : n.item()]", (2, 80, 3)),
        ("x[:, 5 : int(n)]", (2, 75, 3)),
        ("x[..., :n]", (2, 80, 3)),
        ("x[1, :n]", (80, 3)),
        ("x[-1, :n, 0]", (80,)),
        ("x[None, ..., :n, :]", (1, 2, 80, 3)),
        ("x[:, :n] + longer[:, :n]", (2, 80, 3)),  # it stays what it was taken for
        ("x[:, : min(n.item(), 7)]", (2, 1, 3)),  # as every other integer
        ("x[:, n:]", (2, 79, 3)),
        ("x[:, m:n]", (2, 0, 3)),
        ("x[n, :m]", (1, 3)),
        ("x.reshape(160, 3)[:n]", (1, 3)),
    ],
)
def test_a_slice_to_an_unknown_integer_is_whole(
    sim: trainfit.Simulation,
    tmp_path: Path,
    sliced: str,
    shape: tuple[int, ...],
) -> None:
    found = ran(tmp_path, f"{LENGTH}\nshape = tuple(({sliced}).shape)")
    assert found["shape"] == shape
    whole = "a slice to an integer of GPU data was assumed to be whole"
    is_whole = 80 in shape or 75 in shape
    notes = [text.partition(" (at ")[0] for text in sim.recording.header["assumptions"]]
    assert (whole in notes) is is_whole
