"""Lines that cannot do what they are for; and others like them, which can."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfit.lint.api import mistakes_in
from trainfit.lint.imports import NEAREST_CHARACTERS
from trainfit.report.notes import spoilt_text


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


def test_what_nothing_calls_of_a_library_spoils_no_run(tmp_path: Path) -> None:
    """As timm's train.py comes with timm: of the functions in it a run calls few."""
    script, library = tmp_path / "train.py", tmp_path / "models"
    library.mkdir()
    for name, text in {
        "__init__.py": "from models.old import old\n__all__ = ['resized', 'old']\n",
        "layers.py": "def resized(x, optimizer):\n    optimizer.step\n    return x\n",
        "old.py": "from models.layers import resized\n"
        "def register(f):\n    return f\n"
        "@register\ndef old():\n    return resized(torch.rand(3))\n",
    }.items():
        (library / name).write_text(text)
    script.write_text("from models import old\nfrom models.layers import resized\n")
    assert len(mistakes_in(script)) == 1  # a script's own folder: it may call it as it likes
    (tmp_path / "pyproject.toml").write_text("")
    assert mistakes_in(script) == ()
    assert len(mistakes_in(script, words=["old"])) == 1  # a registry finds it
    script.write_text("from models import old\nbuild = old\n")
    assert len(mistakes_in(script)) == 1
    script.write_text("from models import old\n")
    layers = library / "layers.py"
    text = layers.read_text()
    layers.write_text(text + "if __name__ == '__main__':\n    resized(1, 2)\n")
    assert mistakes_in(script) == ()  # BasicSR's diffjpeg.py tries itself out
    layers.write_text(text + "if True:\n    resized(1, 2)\n")
    assert len(mistakes_in(script)) == 1
    layers.write_text(text)
    script.write_text("import models.layers\nmodels.layers.resized(x)\n")
    assert len(mistakes_in(script)) == 1


def test_a_run_waits_for_the_files_nearest_to_its_script_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository's train.py imports its whole library; each tree is gone through once."""
    script, near, far = tmp_path / "train.py", tmp_path / "near.py", tmp_path / "far.py"
    script.write_text("import near\nimport far\noptimizer.step\n")
    near.write_text("# " + "x" * NEAREST_CHARACTERS)
    far.write_text("optimizer.step\n")
    walked: list[ast.AST] = []
    walk = ast.walk

    def counted(node: ast.AST) -> Iterator[ast.AST]:
        walked.extend([node] if isinstance(node, ast.Module) else [])
        return walk(node)

    monkeypatch.setattr(ast, "walk", counted)
    assert [each.at.file for each in mistakes_in(script) if each.at] == [str(script)]
    assert len(walked) == len(set(walked)) == 2
    near.write_text("x = 1\n")
    assert len(mistakes_in(script)) == 2


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
    found = _kinds(tmp_path, _LOOPS.format(made=made, before=before, body=body))
    assert "iterator-used-up" not in found


def test_what_an_iterator_gives_is_none(tmp_path: Path) -> None:
    """``train, test = (DataLoader(…) for …)``: each name has a DataLoader."""
    source = _LOOPS.format(made="((x, 1) for x in loader)", before="pass", body="train(x)")
    assert "iterator-used-up" not in _kinds(
        tmp_path, source.replace("batches =", "batches, other =")
    )


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
    "call",
    [
        "F.dropout(x)",
        "F.dropout(x, 0.5)",
        "nn.functional.dropout2d(x, p=0.1, inplace=True)",
        "nn.Dropout(0.5)(x)",
        "torch.nn.Dropout2d()(x)",
        "AlphaDropout(0.1)(x)",
    ],
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
        *("nn.ReLU()(x)", "nn.Dropout(0.5).train(self.training)(x)", "DropPath(0.1)(x)"),
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


def test_a_tensor_that_is_moved_and_not_kept(tmp_path: Path) -> None:
    text = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.zeros(8, 3), torch.zeros(8)))
        for {target} in loader:
            {line}
            train({target})
    """
    lines = [("x, y", "x.to('cuda')"), ("x, y", "y.long()"), ("batch", "batch[0].cuda()")]
    for target, line in lines:
        assert _kinds(tmp_path, text.format(target=target, line=line)) == ["result-dropped"]
    for target, line in [
        ("x, y", "x = x.to('cuda')"),
        ("x, y", "model.to('cuda')"),
        ("batch", "batch.to('cuda')"),  # an object of its own may move itself
        ("x, y", "x.add_(1)"),
        ("x, y", "torch.zeros(1).cuda()"),  # a first use of the GPU
    ]:
        assert not _kinds(tmp_path, text.format(target=target, line=line))


_EPOCHS = """
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader
    loader = DataLoader(torch.zeros(8, 3))
    for epoch in range(3):
        for {target} in {over}:
            {body}
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("target", "over", "body"),
    [("x", "loader", "loss = F.mse_loss(x, x)"), ("i, x", "enumerate(loader)", "loss = f(x)")],
)
def test_steps_behind_the_loop_over_batches(
    target: str, over: str, body: str, tmp_path: Path
) -> None:
    text = _EPOCHS.format(target=target, over=over, body=body)
    assert _kinds(tmp_path, text) == ["steps-after-loop"]


def test_the_first_line_says_that_such_a_training_does_not_learn(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("optimizer.step\n")
    assert "does not learn" in spoilt_text(mistakes_in(script))
    script.write_text('os.environ["CUDA_LAUNCH_BLOCKING"] = "1"\n')
    assert not spoilt_text(mistakes_in(script))


@pytest.mark.parametrize(
    ("target", "over", "body"),
    [
        ("x", "loader", "loss = loss + f(x)"),
        ("x", "loader", "loss += f(x)"),
        ("x", "loader", "loss = f(x); break"),
        ("x", "loader", "loss = f(x); loss.backward()"),
        ("x", "loader", "losses.append(f(x)); loss = sum(losses)"),
        ("layer", "layers", "loss = f(layer)"),  # each goes on with what the one before gave
    ],
)
def test_losses_of_all_batches(target: str, over: str, body: str, tmp_path: Path) -> None:
    assert not _kinds(tmp_path, _EPOCHS.format(target=target, over=over, body=body))


@pytest.mark.parametrize(
    ("over", "body", "found"),
    [
        ("p in model.parameters()", "p = p - lr * p.grad", True),
        ("e, p in zip(ema.parameters(), model.parameters())", "e = 0.9 * e + 0.1 * p", True),
        ("_, p in model.named_parameters()", "p = p - p.grad", True),
        ("p in model.parameters()", "p -= lr * p.grad", False),
        ("p in model.parameters()", "p = p.detach(); total += p.sum()", False),
        ("p in model.parameters()", "q = p * 2", False),
        ("p in items", "p = p + 1", False),
    ],
)
def test_parameters_that_get_a_name(over: str, body: str, found: bool, tmp_path: Path) -> None:
    kinds = _kinds(tmp_path, f"for {over}:\n    {body}\n")
    assert kinds == ["parameter-rebound"] * found


def test_a_sum_that_its_first_pass_ends(tmp_path: Path) -> None:
    text = """
        def evaluate(loader):
            total = 0
            for x in loader:
                total += x
                {end}
    """
    assert _kinds(tmp_path, text.format(end="return total / 3")) == ["loop-ends-first"]
    assert not _kinds(tmp_path, text.format(end="if total > 3: return total"))
    assert not _kinds(tmp_path, text.format(end="return x"))  # the first one
    assert not _kinds(tmp_path, text.replace("    {end}", "return total"))
    text = text.replace("total += x", "if x: continue")
    assert not _kinds(tmp_path, text.format(end="return total"))


def test_a_transform_of_all_parts(tmp_path: Path) -> None:
    text = """
        full = Images(transform=augment)
        train, val = random_split(full, [8, 2])
        {lines}
    """
    (kind,) = _kinds(tmp_path, text.format(lines="val.dataset.transform = resize"))
    assert kind == "transform-shared"
    for lines in (
        "val.dataset = copy.copy(full); val.dataset.transform = resize",
        "train.dataset.transform = resize; val.dataset.transform = resize",
        "other.dataset.transform = resize",
        "val.transform = resize",
    ):
        assert not _kinds(tmp_path, text.format(lines=lines))


def test_gradients_that_stay_off(tmp_path: Path) -> None:
    text = """
        def validate():
            torch.set_grad_enabled(False)
            {more}
        for x in loader:
            f(x).backward()
            validate()
    """
    assert _kinds(tmp_path, text.format(more="f(x)")) == ["gradients-left-off"]
    assert not _kinds(tmp_path, text.format(more="f(x); torch.set_grad_enabled(True)"))
    assert not _kinds(tmp_path, text.format(more="f(x)").replace(".backward()", ""))
    assert not _kinds(tmp_path, "torch.set_grad_enabled(False)\nf(x)\n")


def test_a_lightning_step_without_a_result(tmp_path: Path) -> None:
    text = """
        class Model(L.LightningModule):
            def training_step(self, batch, index):
                loss = self.net(batch)
                {end}
            def validation_step(self, batch, index):
                self.log("loss", self.net(batch))
    """
    assert _kinds(tmp_path, text.format(end="self.log('loss', loss)")) == ["step-without-result"]
    for end in ("return loss", "self.manual_backward(loss)", "raise NotImplementedError"):
        assert not _kinds(tmp_path, text.format(end=end))
    assert not _kinds(tmp_path, text.format(end="pass").replace("L.LightningModule", "nn.Module"))


def test_aids_of_debugging_that_were_left(tmp_path: Path) -> None:
    lines = {
        'os.environ["CUDA_LAUNCH_BLOCKING"] = "1"': ["launches-blocked"],
        "torch.backends.cudnn.enabled = False": ["cudnn-off"],
        'os.environ["CUDA_LAUNCH_BLOCKING"] = "0"': [],
        "torch.backends.cudnn.enabled = True": [],
        "if debug: torch.backends.cudnn.enabled = False": [],
    }
    for line, kinds in lines.items():
        assert _kinds(tmp_path, line) == kinds


def test_a_plateau_of_what_is_to_rise(tmp_path: Path) -> None:
    text = """
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    scheduler = ReduceLROnPlateau(optimizer{mode}, patience=2)
    for epoch in range(9):
        val_acc = evaluate()
        scheduler.step({measure})
    """
    for mode, measure, told in (
        ("", "val_acc", True),
        (", 'min'", "metrics['accuracy']", True),
        (", mode='max'", "val_acc", False),
        (", mode=mode", "val_acc", False),
        ("", "-val_acc", False),
        ("", "1 - val_acc", False),
        ("", "val_loss", False),
        ("", "acc_loss", False),
    ):
        found = _kinds(tmp_path, text.format(mode=mode, measure=measure))
        assert (found == ["plateau-turned"]) is told and bool(found) is told


def test_a_step_that_is_retried_where_its_error_is_handled(tmp_path: Path) -> None:
    text = """
    for x, y in loader:
        try:
            loss = step(x, y)
        except {kind}:
            {handled}
            for part in x.chunk(2):
                {call}
    """
    out = "print('out of memory')"
    told_by_message = "if 'out of memory' not in str(error): raise"
    for kind, handled, call, told in (
        ("torch.cuda.OutOfMemoryError", "pass", "step(part, y)", True),
        ("RuntimeError as error", told_by_message, "step(part, y)", True),
        ("RuntimeError", "pass", "step(part, y)", False),
        ("torch.cuda.OutOfMemoryError", out, "parts.append(part)", False),
        ("ValueError", out, "step(part, y)", False),
    ):
        found = _kinds(tmp_path, text.format(kind=kind, handled=handled, call=call))
        assert found == ["retried-in-except"] * told


_TRAINS = """
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    {made}
    for x, y in loader:
        loss = f(model(x), y)
        loss.backward()
        optimizer.step()
        {used}
"""


@pytest.mark.parametrize(
    ("made", "used", "told"),
    [
        ("schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)", "pass", True),
        ("schedule = get_cosine_schedule_with_warmup(optimizer, 10, 100)", "pass", True),
        ("schedule = OneCycleLR(optimizer, 0.1, 100)", "schedule.step()", False),
        ("schedule = LambdaLR(optimizer, f)", "trainer.fit(model, schedule)", False),
        ("self.schedule = StepLR(optimizer, 10)", "pass", False),
        ("schedule = noise_schedule(10)", "pass", False),
        ("schedule = StepLR(optimizer, 10)", "print(locals())", False),
    ],
)
def test_a_schedule_that_is_never_stepped(made: str, used: str, told: bool, tmp_path: Path) -> None:
    found = _kinds(tmp_path, _TRAINS.format(made=made, used=used))
    assert found == ["schedule-not-stepped"] * told


def test_a_schedule_that_a_file_makes_for_others(tmp_path: Path) -> None:
    assert not _kinds(tmp_path, "schedule = StepLR(optimizer, 10)")


@pytest.mark.parametrize("called", ["drop(x)", "drop.train(self.training)(x)"])
def test_a_dropout_that_forward_makes(called: str, tmp_path: Path) -> None:
    text = f"""
    class Net(nn.Module):
        def forward(self, x):
            drop = nn.Dropout(0.5)
            return {called}
    """
    assert _kinds(tmp_path, text) == ["dropout-in-evaluation"] * (called == "drop(x)")


_SEEDS = """
    {before}
    for epoch in range(3):
        {inside}
        for x, y in loader:
            f(model(x), y).backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "inside", "told"),
    [
        ("pass", "torch.manual_seed(0)", True),
        ("pass", "set_seed(42)", True),
        ("torch.manual_seed(0)", "pass", False),
        ("pass", "torch.manual_seed(epoch)", False),
        ("pass", "set_seed(42); optimizer = SGD(model.parameters(), 0.1)", False),
        ("pass", "generator.manual_seed(0)", False),
        ("with torch.random.fork_rng(): torch.manual_seed(0)", "sample(model)", False),
    ],
)
def test_a_seed_in_each_pass(before: str, inside: str, told: bool, tmp_path: Path) -> None:
    found = _kinds(tmp_path, _SEEDS.format(before=before, inside=inside))
    assert found == ["seeded-each-pass"] * told


def test_a_seed_that_is_kept_apart(tmp_path: Path) -> None:
    text = """
    for epoch in range(3):
        f(model(x), y).backward()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sample(model)
    """
    assert not _kinds(tmp_path, text)


def test_a_long_call_in_a_title_is_its_function(tmp_path: Path) -> None:
    text = """
    try:
        train(model=model, epochs=arguments.epochs, batch_size=arguments.batch_size, rate=rate)
    except torch.cuda.OutOfMemoryError:
        train(model=model, epochs=arguments.epochs, batch_size=arguments.batch_size,
              rate=rate)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    (found,) = mistakes_in(tmp_path / "train.py")
    assert found.title.startswith("train(…) is tried while the memory of the failed step")


_HITS = """
    from torch.utils.data import DataLoader
    batches = DataLoader(data, 32)
    def evaluate(model, loader):
        right = total = 0
        for i, (x, y) in enumerate({over}):
            right += {count}
            total += len(y)
        return 100 * right / {by}
"""


@pytest.mark.parametrize(
    ("count", "by", "found"),
    [
        ("(model(x).argmax(1) == y).sum().item()", "len(loader)", True),
        ("model(x).argmax(1).eq(y).sum()", "len(loader)", True),
        ("(model(x).argmax(1) == y).sum().item()", "len(loader.dataset)", False),
        ("(model(x).argmax(1) == y).sum().item()", "total", False),
        ("(model(x).argmax(1) == y).sum().item() / len(y)", "len(loader)", False),
        ("(model(x).argmax(1) == y).float().mean()", "len(loader)", False),
        ("criterion(model(x), y).sum()", "len(loader)", False),
    ],
)
def test_samples_over_batches_are_no_accuracy(
    tmp_path: Path, count: str, by: str, found: bool
) -> None:
    text = _HITS.format(over="loader", count=count, by=by)
    assert _kinds(tmp_path, text) == ["samples-over-batches"] * found
    assert _kinds(tmp_path, text.replace("loader", "batches")) == ["samples-over-batches"] * found
    assert not _kinds(tmp_path, text.replace("loader", "samples"))
    assert not _kinds(tmp_path, text.replace("DataLoader(data, 32)", "DataLoader(data)"))
    assert not _kinds(tmp_path, text.replace("data, 32", "data, batch_size=1"))


@pytest.mark.parametrize(
    ("seed", "found"),
    [("0", True), ("torch.initial_seed() % 2**32", False), ("worker", False)],
)
def test_workers_that_all_begin_with_one_seed(tmp_path: Path, seed: str, found: bool) -> None:
    text = f"""
        def begin(worker):
            np.random.seed({seed})
        loader = DataLoader(data, 32, num_workers=2, worker_init_fn=begin)
    """
    assert _kinds(tmp_path, text) == ["same-random-numbers"] * found
    assert not _kinds(tmp_path, text.replace("worker_init_fn=begin", "pin_memory=True"))
