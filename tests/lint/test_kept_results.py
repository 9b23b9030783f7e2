"""Results that are kept for too long, and copies that are read too early."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trainfit.lint.api import mistakes_in


def _kinds(tmp_path: Path, text: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return [each.kind for each in mistakes_in(script)]


_EPOCHS = """
{before}
for epoch in range(20):
    {within}
    for x, y in val:
        preds.append(model(x.cuda()).cpu().numpy())
    {after}
"""


def test_a_list_of_all_epochs_results(tmp_path: Path) -> None:
    joined = "print(np.concatenate(preds).mean())"
    kinds = _kinds(tmp_path, _EPOCHS.format(before="preds = []", within="", after=joined))
    assert kinds == ["kept-over-epochs"]
    (found,) = mistakes_in(tmp_path / "train.py")
    assert found.at.line == 6 and "preds = [] at the start of each epoch" in found.fix.action


@pytest.mark.parametrize(
    ("before", "within", "after"),
    [
        ("", "preds = []", "print(np.concatenate(preds).mean())"),
        ("preds = []", "", "print(np.concatenate(preds).mean()); preds.clear()"),
        ("preds = []", "preds = []", "print(np.concatenate(preds).mean())"),
        ("preds = []", "", "print(len(preds))"),  # losses, maybe
        ("preds = deque(maxlen=9)", "", "print(torch.cat(preds).mean())"),
    ],
)
def test_lists_of_an_epoch(tmp_path: Path, before: str, within: str, after: str) -> None:
    assert not _kinds(tmp_path, _EPOCHS.format(before=before, within=within, after=after))


_TRIALS = """
results = []
for lr in (0.1, 0.01):
    model = make().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    train(model, opt)
    {line}
"""


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("results.append((lr, model))", ["models-kept"]),
        ("results.append(copy.deepcopy(model))", ["models-kept"]),
        ("results.append(copy.deepcopy(model.state_dict()))", ["models-kept"]),
        ("results.append((lr, evaluate(model)))", []),
        ("model.cpu()\n    results.append(model)", []),
        ("results.append(copy.deepcopy(model).cpu())", []),
        ("if lr > best:\n        results.append(model)", []),
        ("results.append({k: v.cpu() for k, v in model.state_dict().items()})", []),
    ],
)
def test_models_of_all_passes(tmp_path: Path, line: str, kinds: list[str]) -> None:
    assert _kinds(tmp_path, _TRIALS.format(line=line)) == kinds


_COPIED = """
for x, y in loader:
    out = model(x.cuda())
    pred = out.argmax(1).to("cpu", non_blocking=True)
    {line}
"""


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("good += (pred == y).sum().item()", ["copy-read-early"]),
        ("print(pred)", ["copy-read-early"]),
        ("torch.cuda.synchronize()\n    good += (pred == y).sum().item()", []),
        ("total += loss.item()\n    good += (pred == y).sum().item()", []),
        ("preds.append(pred)", []),
        ("preds.append((pred, y))", []),
    ],
)
def test_a_copy_that_nobody_waits_for(tmp_path: Path, line: str, kinds: list[str]) -> None:
    assert _kinds(tmp_path, _COPIED.format(line=line)) == kinds


def test_a_copy_that_is_read_at_once(tmp_path: Path) -> None:
    text = 'scores = out.to("cpu", non_blocking=True).numpy()\n'
    assert _kinds(tmp_path, text) == ["copy-read-early"]
    assert not _kinds(tmp_path, 'scores = out.to("cpu").numpy()\n')
    assert not _kinds(tmp_path, 'x = batch.to("cuda", non_blocking=True).float()\n')
