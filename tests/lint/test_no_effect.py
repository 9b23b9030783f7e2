"""Lines of which a training takes no notice, and others like them, which have their effect."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trainfit.lint.api import mistakes_in

_LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
"""
_BY_HAND = """
for x, y in loader:
    loss = ((x @ w - y) ** 2).mean()
    loss.backward()
    {}
"""


def _kinds(tmp_path: Path, text: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return [each.kind for each in mistakes_in(script)]


@pytest.mark.parametrize(
    "line",
    ["optimizer.lr = 0.01", "optimizer.learning_rate = 0.01", 'optimizer.defaults["lr"] = 1'],
)
def test_settings_of_an_optimizer_that_are_none(tmp_path: Path, line: str) -> None:
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    assert _kinds(tmp_path, f"{made}{line}\n") == ["optimizer-attribute"]
    script = mistakes_in(tmp_path / "train.py")
    assert "for group in optimizer.param_groups: group['lr'] = " in script[0].fixes[0].action


@pytest.mark.parametrize(
    "text",
    [
        "optimizer = torch.optim.SGD(p, 0.1)\nfor g in optimizer.param_groups:\n    g['lr'] = 1",
        "optimizer = MyOptimizer(p, 0.1)\noptimizer.lr = 0.01",
        "config = Config()\nconfig.lr = 0.01",
        "class Net:\n    def __init__(self):\n        self.lr = 0.01",
    ],
)
def test_settings_that_something_reads(tmp_path: Path, text: str) -> None:
    assert _kinds(tmp_path, text) == []


def test_the_mode_of_the_outermost_module_alone(tmp_path: Path) -> None:
    text = "model = Net()\nmodel.training = False\nmodel(x)\n"
    assert _kinds(tmp_path, text) == ["mode-of-one-module"]
    assert mistakes_in(tmp_path / "train.py")[0].fixes[0].action == "model.eval()"


@pytest.mark.parametrize(
    "text",
    [
        "for layer in model.modules():\n    layer.training = False",
        "drop = nn.Dropout(0.5)\ndrop.training = False",
        "env = VecNormalize(make())\nenv.training = False\nenv.step(action)",
        "class Net(nn.Module):\n    def train(self, mode=True):\n        self.training = False",
        "model.training = mode",
    ],
)
def test_modes_that_are_set_where_they_count(tmp_path: Path, text: str) -> None:
    assert _kinds(tmp_path, text) == []


def test_a_loader_that_is_cycled(tmp_path: Path) -> None:
    made = "from itertools import cycle\nmore = DataLoader(data, 8)\n"
    assert _kinds(tmp_path, f"{made}for a, b in zip(loader, cycle(more)): ...\n") == [
        "loader-cycled"
    ]
    assert _kinds(tmp_path, "colours = cycle(['r', 'g'])\n") == []
    assert _kinds(tmp_path, "def cycle(l):\n    while True:\n        yield from l\n") == []


def test_a_scaler_that_is_new_in_each_step(tmp_path: Path) -> None:
    step = "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    made = "scaler = torch.amp.GradScaler('cuda')\n"
    assert _kinds(tmp_path, f"for x in loader:\n    {made}{step}") == ["scaler-remade"]
    assert _kinds(tmp_path, f"{made}for x in loader:\n{step}") == []
    inner = textwrap.indent(f"for x in loader:\n{step}", "    ")
    assert _kinds(tmp_path, f"for fold in folds:\n    {made}{inner}") == []


@pytest.mark.parametrize("line", ["w -= lr * w.grad", "w.data -= lr * w.grad.data"])
def test_gradients_that_nothing_sets_to_zero(tmp_path: Path, line: str) -> None:
    assert _kinds(tmp_path, _BY_HAND.format(line)) == ["gradients-never-zeroed"]


@pytest.mark.parametrize(
    "line",
    [
        "w -= lr * w.grad; w.grad.zero_()",
        "w -= lr * w.grad; w.grad = None",
        "w -= lr * w.grad; model.zero_grad()",
        "x -= lr * x.grad; x = batch()",
        "w -= lr * (w.grad - g)" + "\n    w.grad.mul_(0.9)",
        "y -= lr * w.weight",
    ],
)
def test_gradients_that_are_set_to_zero(tmp_path: Path, line: str) -> None:
    assert _kinds(tmp_path, _BY_HAND.format(line)) == []


@pytest.mark.parametrize(
    "read",
    [
        "np.load(self.path)[index]",
        "torch.from_numpy(np.load('all.npy')[index])",
        "pd.read_csv(self.path).iloc[index]",
        "json.load(open(self.path))[index]",
    ],
)
def test_a_file_that_is_read_for_each_sample(tmp_path: Path, read: str) -> None:
    sample = f"class Data:\n    def __getitem__(self, index):\n        return {read}\n"
    assert _kinds(tmp_path, sample) == ["file-read-for-each-sample"]


@pytest.mark.parametrize(
    "lines",
    [
        "return np.load(self.files[index])",
        "path = self.files[index]\n        return np.load(path)",
        "with open(self.files[index]) as file:\n            return json.load(file)",
        "return np.load(self.path, mmap_mode='r')[index]",
        "if self.x is None:\n            self.x = np.load(self.path)\n        return self.x[index]",
        "return pd.read_csv(self.path, skiprows=index, nrows=1)",
    ],
)
def test_files_of_one_sample_each_or_read_once(tmp_path: Path, lines: str) -> None:
    sample = f"class Data:\n    def __getitem__(self, index):\n        {lines}\n"
    assert _kinds(tmp_path, sample) == []


@pytest.mark.parametrize(("first", "is_wrong"), [("torch.manual_seed(0)", True), ("", False)])
def test_a_seed_in_the_function_of_an_epoch(tmp_path: Path, first: str, is_wrong: bool) -> None:
    epoch = f"def epoch():\n    {first or 'pass'}\n{textwrap.indent(_LOOP, '    ')}\n"
    assert (
        "seeded-each-pass" in _kinds(tmp_path, f"{epoch}for _ in range(9): epoch()\n")
    ) is is_wrong
    assert _kinds(tmp_path, f"{epoch}epoch()\n") == []
    fold = f"def fold():\n    {first}\n    optimizer = SGD(model.parameters())\n"
    fold += textwrap.indent(_LOOP, "    ")
    assert _kinds(tmp_path, f"{fold}\nfor _ in range(9): fold()\n") == []


@pytest.mark.parametrize("line", ["torch.no_grad()", "torch.autocast('cuda')", "no_grad()"])
def test_contexts_that_nothing_runs_in(tmp_path: Path, line: str) -> None:
    assert _kinds(tmp_path, f"model.eval()\n{line}\nevaluate(model)\n") == ["context-not-entered"]


@pytest.mark.parametrize(
    "text",
    [
        "with torch.no_grad():\n    evaluate(model)",
        "context = torch.no_grad()",
        "torch.set_grad_enabled(True)",
        "stack.enter_context(torch.no_grad())",
        "@torch.no_grad()\ndef evaluate(model): ...",
        "engine.no_grad()",
    ],
)
def test_contexts_that_are_entered(tmp_path: Path, text: str) -> None:
    assert _kinds(tmp_path, f"{text}\n") == []


_MADE = "optimizer = torch.optim.Adam(model.parameters())\n"


def test_an_optimizer_that_is_new_in_each_epoch(tmp_path: Path) -> None:
    inner = textwrap.indent(_MADE + _LOOP, "    ")
    assert _kinds(tmp_path, f"for epoch in range(9):\n{inner}") == ["optimizer-each-epoch"]
    function = f"def train(model):\n{inner}\nfor epoch in range(9):\n    train(model)\n"
    assert _kinds(tmp_path, function) == ["optimizer-each-epoch"]


@pytest.mark.parametrize(
    "text",
    [
        f"{_MADE}for epoch in range(9):\n{textwrap.indent(_LOOP, '    ')}",
        f"for fold in range(9):\n{textwrap.indent(_MADE + _LOOP, '    ')}",
        f"for fold in range(9):\n    model = Net()\n{textwrap.indent(_MADE + _LOOP, '    ')}",
        "for epoch in range(9):\n    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        + textwrap.indent(_LOOP, "    "),
    ],
    ids=["before", "of folds", "with its model", "without averages"],
)
def test_optimizers_that_are_to_be_new(tmp_path: Path, text: str) -> None:
    assert _kinds(tmp_path, text) == []


def test_a_break_that_ends_the_first_pass(tmp_path: Path) -> None:
    assert _kinds(tmp_path, f"{_LOOP}    break\n") == ["loop-breaks-first"]
    assert _kinds(tmp_path, f"{_LOOP}    if step == 9:\n        break\n") == []
    assert _kinds(tmp_path, "for x, y in loader:\n    show(x)\n    break\n") == []


def test_a_model_that_is_not_moved(tmp_path: Path) -> None:
    assert _kinds(tmp_path, "model = Net()\nmodel.cuda\n") == ["not-moved"]


def test_a_model_that_is_new_in_each_epoch(tmp_path: Path) -> None:
    inner = textwrap.indent(_MADE + _LOOP, "    ")
    made = "for epoch in range(9):\n    model = Net()\n"
    assert _kinds(tmp_path, f"{made}{inner}") == ["model-each-epoch"]
    assert _kinds(tmp_path, f"{made}    model.load_state_dict(torch.load('a.pt'))\n{inner}") == []


_FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {made}

    def forward(self, x):
        {line}
        return self.fc(x)

model = {wrapper}(Net())
"""


@pytest.mark.parametrize("line", ["self.steps += 1", "x, self.steps = self.rnn(x, self.steps)"])
def test_what_a_copy_of_a_module_sets_is_lost(tmp_path: Path, line: str) -> None:
    text = _FORWARD.format(made="self.steps = 0", line=line, wrapper="nn.DataParallel")
    assert _kinds(tmp_path, text) == ["lost-in-replica"]


@pytest.mark.parametrize(
    ("made", "line", "wrapper"),
    [
        ("self.steps = 0", "self.steps += 1", "nn.parallel.DistributedDataParallel"),
        ("self.register_buffer('steps', torch.zeros(1))", "self.steps += 1", "nn.DataParallel"),
        ("self.last = None", "self.last = x", "nn.DataParallel"),
        ("self.steps = 0", "x += self.steps", "nn.DataParallel"),
    ],
)
def test_what_nobody_misses_of_a_copy(tmp_path: Path, made: str, line: str, wrapper: str) -> None:
    assert _kinds(tmp_path, _FORWARD.format(made=made, line=line, wrapper=wrapper)) == []


_PAIRS = "data = TensorDataset(torch.tensor(X), torch.tensor(y))\n"


def test_samples_and_labels_that_are_shuffled_apart(tmp_path: Path) -> None:
    text = "np.random.shuffle(X)\nnp.random.shuffle(y)\n" + _PAIRS
    assert _kinds(tmp_path, text) == ["shuffled-apart"]
    (found,) = mistakes_in(tmp_path / "train.py")
    assert found.is_critical and found.at.line == 2


@pytest.mark.parametrize(
    "text",
    [
        "np.random.seed(1)\nnp.random.shuffle(X)\nnp.random.seed(1)\nnp.random.shuffle(y)\n"
        + _PAIRS,
        "np.random.shuffle(order)\nX, y = X[order], y[order]\n" + _PAIRS,
        "random.shuffle(train)\nrandom.shuffle(test)\nfit(train, epochs)\nevaluate(test)\n",
        "random.shuffle(ins)\nrandom.shuffle(outs)\nedges = list(zip(ins, outs))\n",
        "random.shuffle(cats)\nrandom.shuffle(dogs)\nfiles = Files(cats + dogs, root)\n",
        "state = np.random.get_state()\nnp.random.shuffle(X)\nnp.random.set_state(state)\n"
        "np.random.shuffle(y)\n" + _PAIRS,
    ],
)
def test_what_keeps_its_pairs_is_not_shuffled_apart(tmp_path: Path, text: str) -> None:
    assert _kinds(tmp_path, text) == []


_BEST_OF = """
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    if better():
        {}
{}
"""


def test_the_best_model_is_another_name_of_the_last(tmp_path: Path) -> None:
    text = _BEST_OF.format("best_model = model", "torch.save(best_model.state_dict(), path)")
    assert _kinds(tmp_path, text) == ["state-not-copied"]


@pytest.mark.parametrize(
    ("kept", "after"),
    [
        ("best_model = copy.deepcopy(model)", "evaluate(best_model)"),
        ("best_model = model", "evaluate(model)"),
        ("best_loss = loss", "print(best_loss)"),
        ("best_model = model; torch.save(model.state_dict(), path)", "print(path)"),
    ],
)
def test_what_is_copied_or_not_used_is_no_other_name(tmp_path: Path, kept: str, after: str) -> None:
    assert _kinds(tmp_path, _BEST_OF.format(kept, after)) == []


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        ("X_train, y_train, X_test, y_test", ["split-order"]),
        ("train_data, train_labels, test_data, test_labels", ["split-order"]),
        ("X_train, X_test, y_train, y_test", []),
        ("train_x, val_x, train_y, val_y", []),
        ("a, b, c, d", []),
    ],
)
def test_the_order_of_a_split(tmp_path: Path, names: str, kinds: list[str]) -> None:
    assert _kinds(tmp_path, f"{names} = train_test_split(X, y, test_size=0.2)\n") == kinds


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("p.required_grad = False", ["flag-misspelt"]),
        ("x.require_grad = True", ["flag-misspelt"]),
        ("p.requires_grad = False", []),
        ("self.require_grad = require_grad", []),
    ],
)
def test_a_flag_that_is_misspelt(tmp_path: Path, line: str, kinds: list[str]) -> None:
    assert _kinds(tmp_path, f"for p in model.parameters():\n    {line}\n") == kinds


@pytest.mark.parametrize(
    ("made", "kinds"),
    [
        ("DataLoader(data, shuffle=True)", ["batch-of-one"]),
        ("torch.utils.data.DataLoader(data, shuffle=True, num_workers=2)", ["batch-of-one"]),
        ("DataLoader(data, shuffle=True, batch_size=1)", []),
        ("DataLoader(data, 64, shuffle=True)", []),
        ("DataLoader(data, batch_sampler=sampler)", []),
        ("DataLoader(data, **options, shuffle=True)", []),
        ("DataLoader(data)", []),  # its samples may be batches
    ],
)
def test_a_batch_size_that_nobody_gave(tmp_path: Path, made: str, kinds: list[str]) -> None:
    assert _kinds(tmp_path, f"loader = {made}\n{_LOOP}") == kinds


_CACHE = """
class Images(Dataset):
    def __getitem__(self, i):
        if i not in self.cache:
            self.{name}[i] = decode(i)
        return self.{name}[i]


loader = DataLoader(Images(), {options})
"""


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("cache", "num_workers=4", ["cache-in-worker"]),
        ("_cache", "num_workers=4, persistent_workers=True", ["cache-in-worker"]),
        ("cache", "num_workers=0", []),
        ("cache", "batch_size=8", []),
        ("counts", "num_workers=4", []),
    ],
)
def test_a_cache_that_each_worker_fills(
    tmp_path: Path, name: str, options: str, kinds: list[str]
) -> None:
    assert _kinds(tmp_path, _CACHE.format(name=name, options=options)) == kinds
    for each in mistakes_in(tmp_path / "train.py"):
        assert ("in each epoch" in each.title) is ("persistent" not in options)
