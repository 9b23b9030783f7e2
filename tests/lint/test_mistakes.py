"""Lines that cannot do what they are for; and others like them, which can."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trainfit.lint.api import mistakes_in


def _kinds(tmp_path: Path, text: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return [each.kind for each in mistakes_in(script)]


def test_files_that_the_run_did_not_import_are_another_commands(tmp_path: Path) -> None:
    script, video = tmp_path / "train.py", tmp_path / "video.py"
    script.write_text("if kind == 'video':\n    from video import Clips\n")
    video.write_text(
        "class Clips:\n    def __getitem__(self, i):\n        torch.manual_seed(0)\n"
        "        return torch.rand(3)\n"
    )
    assert len(mistakes_in(script)) == 1
    assert mistakes_in(script, [str(script), str(video)]) == mistakes_in(script)
    assert mistakes_in(script, [str(script)]) == ()


_LOOPS = """
    batches = {made}
    for epoch in range(3):
        {before}
        for x in batches:
            {body}
"""


@pytest.mark.parametrize(
    "made", ["iter(loader)", "map(move, loader)", "zip(a, b)", "((x, 1) for x in loader)"]
)
def test_an_iterator_that_each_epoch_goes_over(made: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_LOOPS.format(made=made, before="pass", body="train(x)")))
    (found,) = mistakes_in(script)
    assert found.kind == "iterator-used-up" and found.severity == "critical"
    assert found.at.line == 5 and "loop at line 3" in found.title and made in found.fixes[0].action


@pytest.mark.parametrize(
    ("made", "before", "body"),
    [
        ("iter(loader)", "batches = iter(loader)", "train(x)"),
        ("iter(loader)", "pass", "if train(x): break"),  # the rest is for the next pass
        ("list(map(move, loader))", "pass", "train(x)"),
        ("loader", "pass", "train(x)"),
        ("itertools.cycle(loader)", "pass", "train(x)"),
    ],
)
def test_what_can_be_gone_over(made: str, before: str, body: str, tmp_path: Path) -> None:
    assert not _kinds(tmp_path, _LOOPS.format(made=made, before=before, body=body))


def test_an_iterator_of_one_pass(tmp_path: Path) -> None:
    assert not _kinds(tmp_path, "batches = iter(loader)\nfor x in batches: train(x)\n")
    assert not _kinds(
        tmp_path,
        """
        for epoch in range(3):
            batches = iter(loader)
            for x in batches:
                train(x)
        """,
    )
    assert not _kinds(
        tmp_path,
        """
        while True:
            try:
                for x in batches:
                    train(x)
            except Again:
                continue
        """,
    )


_DATA = """
    class Data(Dataset):
        def {name}(self, index):
            {seed}
            return crop(self.images[index])
"""


@pytest.mark.parametrize("seed", ["np.random.seed(42)", "torch.manual_seed(0)", "random.seed(7)"])
def test_one_seed_for_each_sample(seed: str, tmp_path: Path) -> None:
    assert _kinds(tmp_path, _DATA.format(name="__getitem__", seed=seed)) == ["same-random-numbers"]
    assert not _kinds(tmp_path, _DATA.format(name="__init__", seed=seed))


@pytest.mark.parametrize("seed", ["np.random.seed(index)", "random.seed(seed)", "self.seed()"])
def test_seeds_that_differ(seed: str, tmp_path: Path) -> None:
    assert not _kinds(tmp_path, _DATA.format(name="__getitem__", seed=seed))


_NET = """
    class Net(nn.Module):
        def {name}(self, x):
            return self.last({call})
"""


@pytest.mark.parametrize(
    "call", ["F.dropout(x)", "F.dropout(x, 0.5)", "nn.functional.dropout2d(x, p=0.1, inplace=True)"]
)
def test_a_dropout_that_evaluations_have(call: str, tmp_path: Path) -> None:
    assert _kinds(tmp_path, _NET.format(name="forward", call=call)) == ["dropout-in-evaluation"]
    assert not _kinds(tmp_path, _NET.format(name="augment", call=call))


@pytest.mark.parametrize(
    "call",
    [
        *("F.dropout(x, training=self.training)", "F.dropout(x, 0.5, self.training)"),
        *("F.dropout(x, 0.5, training=True)", "F.alpha_dropout(x)", "self.dropout(x)"),
        *("F.dropout(x, **options)", "mine.dropout(x)"),
        "F.dropout(x) if self.training else x",
    ],
)
def test_a_dropout_that_is_told_when(call: str, tmp_path: Path) -> None:
    assert not _kinds(tmp_path, _NET.format(name="forward", call=call))


def test_a_state_that_is_kept_without_a_copy(tmp_path: Path) -> None:
    text = """
    import copy
    import torch
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for epoch in range(3):
        for x in loader:
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
        if better():
            best = {kept}
    torch.save(best, "best.pt")
    """
    assert _kinds(tmp_path, text.format(kept="model.state_dict()")) == ["state-not-copied"]
    assert not _kinds(tmp_path, text.format(kept="copy.deepcopy(model.state_dict())"))
