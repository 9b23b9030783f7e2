"""The static reading of scripts: every rule speaks where it should, and is silent where not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_report import on_one_line, whole
from trainfit.lint.api import mistakes_in, read_script
from trainfit.lint.imports import UnreadableScriptError
from trainfit.report.sections.doctor import script_subject
from trainfit.results.doctor import ScriptReport
from trainfit.results.findings import Finding, Fix, Place
from trainfit.results.text import WIDTH, laid_out_for

ROOT = Path(__file__).parents[2]

#: What scripts begin with; the device is chosen, so nothing of it is to be found.
HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader as DL, Dataset, TensorDataset
from torchvision import datasets
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(8, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())
"""
#: A loop that begins with this has nothing to be found but what follows.
LOOP = """
loader = DL(range(9))
for epoch in range(3):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
"""


def script_text(report: ScriptReport) -> str:
    with laid_out_for(WIDTH):
        return whole(script_subject(report))


def report(folder: Path, text: str, **others: str) -> ScriptReport:
    """The report on a script, with other files next to it."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    for name, content in others.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(content), encoding="utf-8")
    return read_script(path)


def rules(folder: Path, text: str, **others: str) -> list[str]:
    """The rules that found something, in order."""
    return [each.kind for each in report(folder, text, **others).findings]


def only(folder: Path, text: str, **others: str) -> Finding:
    """The one finding."""
    (found,) = report(folder, text, **others).findings
    return found


def body(lines: str, indent: int = 8) -> str:
    """More lines of the training loop."""
    return HEAD + LOOP + textwrap.indent(textwrap.dedent(lines), " " * indent)


def test_the_beginning_of_the_samples_is_clean(tmp_path: Path) -> None:
    assert rules(tmp_path, HEAD + LOOP) == []


# hard-coded-cuda


def test_a_call_of_cuda_is_named_with_its_place_and_the_whole_line(tmp_path: Path) -> None:
    found = only(tmp_path, "import torch\nnet = torch.nn.Linear(1, 1)\nnet = net.cuda()  # there\n")
    assert (found.kind, found.at.line, found.at.column) == ("hard-coded-cuda", 3, 7)
    assert found.at.source == "net = net.cuda()  # there"
    assert found.fix.action.startswith(
        "net = net.to(device)  # there, with `device = torch.device("
    )
    assert "without a CUDA GPU" in found.cause


@pytest.mark.parametrize(
    ("line", "rewrite"),
    [
        ("y = x.cuda(non_blocking=True)", "y = x.to(device, non_blocking=True)"),
        ("y = x.cuda(), x.cuda(0)", "y = x.to(device), x.to(device)"),
        ("y = x.to('cuda:0')", "y = x.to(device)"),
        ("y = x.to(device='cuda')", "y = x.to(device=device)"),
        ("y = torch.zeros(3, device='cuda')", "y = torch.zeros(3, device=device)"),
        ("y = torch.load('p', map_location='cuda')", "y = torch.load('p', map_location=device)"),
        (
            "d = torch.device('cuda')",
            'd = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
        ),
    ],
)
def test_literal_devices(tmp_path: Path, line: str, rewrite: str) -> None:
    found = only(tmp_path, f"import torch\nx = torch.zeros(2)\n{line}\n")
    assert found.kind == "hard-coded-cuda"
    assert found.fix.action.partition(", with `")[0] == rewrite


def test_a_chain_over_lines_is_named_where_cuda_stands(tmp_path: Path) -> None:
    found = only(tmp_path, "import torch\nnet = torch.nn.Sequential(\n    a,\n).cuda()\n")
    assert (found.at.line, found.at.column, found.at.source) == (4, 3, ").cuda()")
    assert found.fix.action.startswith(").to(device)")


@pytest.mark.parametrize(
    "text",
    [
        "if torch.cuda.is_available():\n    x = x.cuda()\n",
        "gpu = args.gpu and torch.cuda.is_available()\nif gpu:\n    x = x.cuda()\n",
        "if args.gpu is not None:\n    x = x.cuda(args.gpu)\nelse:\n    x = x.cuda()\n",
        "x = x.cuda() if torch.cuda.is_available() else x\n",
        "assert torch.cuda.is_available()\nx = x.cuda()\n",
        "if not torch.cuda.is_available():\n    raise SystemExit('no GPU')\nx = x.cuda()\n",
        "def f(x):\n    if device.type == 'cpu':\n        return x\n    return x.cuda()\n",
        "try:\n    x = x.cuda()\nexcept RuntimeError:\n    pass\n",
        "torch.distributed.init_process_group('nccl')\nx = x.cuda()\n",
        "x = x.cuda(local_rank)\n",
        "def move(y):\n    return y.cuda()\nif use_cuda:\n    x = move(x)\n",
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nx = x.to(device)\n",
        "parser.add_argument('--device', default='cuda')\n",
        "with torch.autocast('cuda'):\n    pass\n",
        "torch.cuda.synchronize()\n",
    ],
)
def test_guarded_cuda_is_no_finding(tmp_path: Path, text: str) -> None:
    assert rules(tmp_path, "import torch\nx = torch.zeros(2)\n" + text) == []


def test_a_library_that_places_tensors_switches_the_rule_off(tmp_path: Path) -> None:
    assert rules(tmp_path, "import torch\nimport accelerate\nx = torch.zeros(2).cuda()\n") == []


# data-parallel


def test_data_parallel_under_its_names(tmp_path: Path) -> None:
    for use in ("nn.DataParallel(model)", "torch.nn.parallel.DataParallel(model)"):
        found = only(tmp_path, f"{HEAD}model = {use}\n")
        assert found.kind == "data-parallel"
        assert "DistributedDataParallel(model, device_ids=[local_rank])" in found.fix.action


def test_data_parallel_beside_ddp_is_the_users_choice(tmp_path: Path) -> None:
    text = "if one:\n    model = nn.DataParallel(model)\nelse:\n    model = nn.parallel.{}(model)\n"
    assert rules(tmp_path, HEAD + text.format("DistributedDataParallel")) == []
    assert rules(tmp_path, "class DataParallel: pass\nm = DataParallel(1)\n") == []


# no-autocast


PLAIN_LOOP = """
for x, y in DL(range(9)):
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_no_autocast_anywhere(tmp_path: Path) -> None:
    found = only(tmp_path, HEAD + PLAIN_LOOP)
    assert (found.kind, found.at.line) == ("no-autocast", 12)


def test_the_loss_that_autocast_refuses_is_named(tmp_path: Path) -> None:
    """torch/csrc/autograd: binary_cross_entropy and BCELoss are unsafe to autocast."""
    assert "BCEWithLogitsLoss" not in only(tmp_path, HEAD + PLAIN_LOOP).fix.action
    text = HEAD + "other = nn.BCELoss()\n" + PLAIN_LOOP
    assert "use BCEWithLogitsLoss" in only(tmp_path, text).fix.action


def test_autocast_is_named_where_gradients_are(tmp_path: Path) -> None:
    loop, rest = PLAIN_LOOP.split("\n", 2)[1:]
    text = HEAD + f"{loop}\n    with torch.no_grad():\n        model(x.to(device))\n" + rest
    assert only(tmp_path, text).at.source == only(tmp_path, HEAD + PLAIN_LOOP).at.source


def test_autocast_is_not_asked_of_a_script_that_acts_on_an_environment(tmp_path: Path) -> None:
    assert rules(tmp_path, HEAD + PLAIN_LOOP + "    env.step(action)\n") == []


@pytest.mark.parametrize(
    "more",
    [
        "scaler = torch.amp.GradScaler()\n",
        "model = model.bfloat16()\n",
        "model = model.to(torch.float64)\n",
        "from apex import amp\n",
        "import lightning\n",
        "import deepspeed\n",
        "from transformers import Trainer\n",
        "from my_package_that_nobody_knows import train\n",
        "parser.add_argument('--fp16')\n",
    ],
)
def test_autocast_may_be_elsewhere(tmp_path: Path, more: str) -> None:
    assert rules(tmp_path, HEAD + more + PLAIN_LOOP) == []


def test_autocast_in_an_own_module_counts(tmp_path: Path) -> None:
    text = HEAD + "from steps import forward\n" + PLAIN_LOOP
    steps = "import torch\n@torch.autocast('cuda')\ndef forward(m, x):\n    return m(x)\n"
    assert rules(tmp_path, text, steps=steps) == []
    assert rules(tmp_path, text, steps="def forward(m, x):\n    return m(x)\n") == ["no-autocast"]


def test_a_script_that_never_names_cuda_needs_no_autocast(tmp_path: Path) -> None:
    text = (HEAD + PLAIN_LOOP).replace(
        'torch.device("cuda" if torch.cuda.is_available() else "cpu")', 'torch.device("cpu")'
    )
    assert rules(tmp_path, text) == []


# data sets

DATASET = """
class Files(Dataset):
    def __init__(self, names):
        self.names = names
        self.first = {first}
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return {item}
"""


def dataset(first: str = "0", item: str = "torch.load(self.names[i])") -> str:
    return DATASET.replace("{first}", first).replace("{item}", item)


def test_cuda_in_a_data_set(tmp_path: Path) -> None:
    text = HEAD + dataset(item="torch.load(self.names[i]).to(device)")
    found = only(tmp_path, text)
    assert found.kind == "cuda-in-dataset"
    assert "forked subprocess" in found.cause
    assert "return torch.load(self.names[i]);" in found.fix.action
    collate = HEAD + (
        "def stack(samples):\n    return torch.stack(samples).to(device)\n"
        "loader = DL(range(3), collate_fn=stack)\n"
    )
    assert rules(tmp_path, collate) == ["cuda-in-dataset"]


def test_data_on_the_gpu_before_the_loop(tmp_path: Path) -> None:
    assert rules(tmp_path, HEAD + dataset("torch.load('x').to(device)")) == [
        "data-on-gpu-before-loop"
    ]
    found = only(tmp_path, HEAD + "data = TensorDataset(torch.randn(9, 8).to(device))\n")
    assert found.kind == "data-on-gpu-before-loop"
    assert "TensorDataset(torch.randn(9, 8))" in found.fix.action


def test_the_device_that_a_function_knows_is_named(tmp_path: Path) -> None:
    text = "import torch\ndef f(x, dev):\n    return x.cuda()\ndef g(x):\n    return x.cuda()\n"
    first, second = report(tmp_path, text).findings
    assert first.fix.action == "return x.to(dev)"
    assert second.fix.action.startswith("return x.to(device), with `device = ")


@pytest.mark.parametrize(
    "text",
    [
        dataset(),
        dataset(item="torch.load(self.names[i]).to(self.device)"),
        dataset(item="torch.load(self.names[i]).to(torch.float32)"),
        "data = TensorDataset(torch.randn(9, 8))\n",
        "class Net(nn.Module):\n    def forward(self, x):\n        return x.to(device)\n",
    ],
)
def test_data_that_stays_on_the_host(tmp_path: Path, text: str) -> None:
    assert rules(tmp_path, HEAD + text) == []


# DataLoaders


def loop_over(loader: str, move: str = "x.to(device)") -> str:
    return HEAD + dataset() + LOOP.replace("DL(range(9))", loader).replace("x.to(device)", move, 1)


def test_the_loader_is_known_through_functions(tmp_path: Path) -> None:
    text = (
        HEAD
        + dataset()
        + """
def train(net, batches, optim):
    for x, y in batches:
        optim.zero_grad()
        with torch.autocast("cuda"):
            loss = F.cross_entropy(net(x.to(device, non_blocking=True)), y.to(device))
        loss.backward()
        optim.step()

def main():
    batches = DL(Files(names), 8, num_workers=2)
    for epoch in range(3):
        train(model, batches, optimizer)
"""
    )
    assert rules(tmp_path, text) == ["non-blocking-without-pinning"]


def test_non_blocking_from_pageable_memory(tmp_path: Path) -> None:
    found = only(tmp_path, loop_over("DL(range(9), 8)", "x.to(device, non_blocking=True)"))
    assert found.kind == "non-blocking-without-pinning"
    assert found.fix.action.endswith("loader = DL(range(9), 8, pin_memory=True)")


@pytest.mark.parametrize(
    ("loader", "move"),
    [
        ("DL(range(9), pin_memory=True)", "x.to(device, non_blocking=True)"),
        ("DL(range(9), pin_memory=device.type == 'cuda')", "x.to(device, non_blocking=True)"),
        ("DL(range(9), **options)", "x.to(device, non_blocking=True)"),
        ("batches()", "x.to(device, non_blocking=True)"),
        ("DL(range(9))", "x.pin_memory().to(device, non_blocking=True)"),
        ("DL(range(9))", "x.to(device, non_blocking=args.nb)"),
        ("DL(range(9))", "x.to(device)"),
    ],
)
def test_copies_that_may_be_right(tmp_path: Path, loader: str, move: str) -> None:
    assert rules(tmp_path, loop_over(loader, move)) == []


# no-no-grad

EVALUATE = """
def evaluate(net, batches):
    net.eval()
    right = 0
    for x, y in batches:
        output = net(x.to(device))
        right += (output.argmax(1) == y.to(device)).sum().item()
    return right
print(evaluate(model, DL(range(9))))
"""


def test_evaluation_with_gradients(tmp_path: Path) -> None:
    found = only(tmp_path, HEAD + EVALUATE)
    assert (found.kind, found.at.line) == ("no-no-grad", 15)
    assert found.fix.action.startswith("@torch.inference_mode() above `def evaluate`")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def evaluate", "@torch.no_grad()\ndef evaluate"),
        ("def evaluate", "@torch.inference_mode()\ndef evaluate"),
        ("def evaluate", "@smart_inference_mode()\ndef evaluate"),
        ("    net.eval()", "    torch.set_grad_enabled(False)\n    net.eval()"),
        ("    net.eval()", "    net.requires_grad_(False)\n    net.eval()"),
        ("print(", "with torch.no_grad():\n    print("),
        ("print(", "with context:\n    print("),
        ("print(evaluate(model, DL(range(9))))", "register(evaluate)"),
        ("print(evaluate(model, DL(range(9))))", ""),
        ("    return right", "    output.sum().backward()\n    return right"),
        ("    return right", "    return output"),
        ("    for x, y in batches", "    net.train()\n    for x, y in batches"),
    ],
)
def test_evaluation_that_is_right_or_wants_gradients(tmp_path: Path, old: str, new: str) -> None:
    assert rules(tmp_path, (HEAD + EVALUATE).replace(old, new)) == []


#: As in a notebook: the training is over, and nothing stands in a function.
AT_THE_TOP = (
    HEAD
    + LOOP
    + """
model.eval()
for x, y in DL(range(9)):
    print((model(x.to(device)).argmax(1) == y.to(device)).sum().item())
"""
)


def test_evaluation_outside_functions(tmp_path: Path) -> None:
    found = only(tmp_path, AT_THE_TOP)
    assert (found.kind, found.at.source) == (
        "no-no-grad",
        "    print((model(x.to(device)).argmax(1) == y.to(device)).sum().item())",
    )
    assert found.cause.startswith("The script evaluates the network")
    assert found.fix.action == "`with torch.inference_mode():` around `for x, y in DL(range(9)):`"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.eval()", "torch.set_grad_enabled(False)\nmodel.eval()"),
        ("model.eval()", "model.eval()\nmodel.train()"),
        ("model.eval()", "model.requires_grad_(False)\nmodel.eval()"),
        ("    print(", "    with torch.no_grad(): print("),
        ("    print(", "    model(x).sum().backward()\n    print("),
        ("for x, y in DL(range(9)):\n    print", "x, y = next(iter(DL(range(9))))\nprint"),
    ],
)
def test_evaluation_outside_functions_that_may_be_right(tmp_path: Path, old: str, new: str) -> None:
    assert old in AT_THE_TOP
    assert "no-no-grad" not in rules(tmp_path, AT_THE_TOP.replace(old, new))


#: The training and the evaluation in one function, as most scripts have them.
IN_ONE = (
    HEAD
    + """
def main():
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        model.train()
        for x, y in DL(range(9)):
            loss = loss_fn(model(x.to(device)), y.to(device))
            opt.zero_grad(); loss.backward(); opt.step()
        model.eval()
        total = 0
        for x, y in DL(range(9)):
            out = model(x.to(device))
            total += (out.argmax(1) == y.to(device)).sum().item()
        print(epoch, total)
main()
"""
)


def test_evaluation_next_to_the_training(tmp_path: Path) -> None:
    assert "no-no-grad" in rules(tmp_path, IN_ONE)
    at_the_top = IN_ONE.replace("def main():", "if True:").replace("\nmain()\n", "\n")
    assert "no-no-grad" in rules(tmp_path, at_the_top)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Trained through, in the loop, after it, and in the next round.
        ("            total +=", "            out.sum().backward()\n            total +="),
        ("        print(", "        out.sum().backward()\n        print("),
        ("        print(", "        more = out.sum() * 2\n        more.backward()\n        print("),
        ("            total +=", "            kept.append(out)\n            total +="),
        ("        model.eval()", "        model.train()"),
        ("    for epoch", "    torch.set_grad_enabled(False)\n    for epoch"),
        ("        print(", "        return out\n        print("),
    ],
)
def test_what_comes_of_an_evaluation_may_be_trained(tmp_path: Path, old: str, new: str) -> None:
    text = IN_ONE.replace("opt = torch", "kept = []\n    opt = torch")
    text = text.replace("loss.backward();", "(loss + sum(map(torch.sum, kept))).backward();")
    assert old in text
    assert "no-no-grad" not in rules(tmp_path, text.replace(old, new))


def test_no_grad_around_the_caller_counts(tmp_path: Path) -> None:
    inner = EVALUATE.replace("print(evaluate(model, DL(range(9))))", "")
    text = HEAD + inner + "def both():\n    return evaluate(model, DL(range(9)))\n"
    assert rules(tmp_path, text + "both()\n") == ["no-no-grad"]
    assert rules(tmp_path, text + "with torch.no_grad():\n    both()\n") == []


# sync-every-step


@pytest.mark.parametrize(
    "line",
    [
        "total = loss.item()",
        "value = float(loss)",
        "print(step, loss)",
        "print(f'{step}: {loss:.3f}')",
        "kept = loss.detach().cpu()",
        "kept = loss.detach().cpu().numpy()",
        "torch.cuda.synchronize()",
        "torch.cuda.empty_cache()",
        "if loss.item() > 9: pass",
        "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()",
    ],
)
def test_waiting_in_every_step(tmp_path: Path, line: str) -> None:
    found = only(tmp_path, body(line))
    assert (found.kind, found.at.line) == ("sync-every-step", 19)


@pytest.mark.parametrize(
    "lines",
    [
        "if step % 50 == 0:\n    print(loss.item())",
        "step % 50 or print(loss.item())",
        "if step % 50:\n    continue\nprint(loss.item())",
        "print(step, loss.shape, len(x))",
        "print(f'step {step}')",
        "count = x.size(0)",
        "kept = y.numpy()",
        "total = meter.item()",
        "observation = env.step(model(x).argmax().item())",
        "def closure():\n    return loss.item()",
    ],
)
def test_not_waiting_in_every_step(tmp_path: Path, lines: str) -> None:
    assert rules(tmp_path, body(lines)) == []


def test_waiting_once_an_epoch_is_fine(tmp_path: Path) -> None:
    assert rules(tmp_path, body("print(loss.item())\ntorch.cuda.empty_cache()", indent=4)) == []


def test_a_function_called_in_every_step(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
def one_step(x):
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = model(x.to(device)).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
for x in DL(range(9)):
    one_step(x)
"""
    )
    assert rules(tmp_path, text) == ["sync-every-step"]
    assert rules(tmp_path, text.replace("for x in DL(range(9))", "if x")) == []


def test_a_value_that_was_read_already_is_a_number(tmp_path: Path) -> None:
    text = body("if step % 9 == 0:\n    pass\nloss = loss.item()\nprint(float(loss))\n")
    assert [(f.kind, f.at.line) for f in report(tmp_path, text).findings] == [
        ("sync-every-step", 21)
    ]


# loss-kept-with-graph


def before_loop(line: str) -> str:
    return HEAD + line + LOOP


@pytest.mark.parametrize(
    ("first", "line", "rewrite"),
    [
        ("total = 0", "total += loss", "total += loss.detach()"),
        ("total = 0", "total = total + loss", "total = total + loss.detach()"),
        ("total = 0", "total += loss * len(x)", "total += (loss * len(x)).detach()"),
        ("kept = []", "kept.append(loss)", "kept.append(loss.detach())"),
    ],
)
def test_graphs_that_pile_up(tmp_path: Path, first: str, line: str, rewrite: str) -> None:
    found = only(tmp_path, before_loop(first) + f"        {line}\n")
    assert (found.kind, found.fix.action) == ("loss-kept-with-graph", rewrite)


@pytest.mark.parametrize(
    ("loss", "backward"),
    [
        ("nn.CrossEntropyLoss().to(device)", "scaler.scale(loss).backward()"),
        ("nn.CrossEntropyLoss()", "loss.backward()"),
        ("Own()", "loss.backward()"),  # nothing but a tensor has a backward pass
    ],
)
def test_losses_that_modules_give_are_tensors(tmp_path: Path, loss: str, backward: str) -> None:
    own = "class Own(nn.Module):\n    def forward(self, a, b):\n        return (a - b).mean()\n"
    start = f"scaler = torch.amp.GradScaler()\ncriterion = {loss}\nkept = []\ntotal = 0"
    text = before_loop(own + start).replace("F.cross_entropy(", "criterion(")
    text = text.replace("loss.backward()", backward)
    assert rules(tmp_path, text) == []
    more = "        kept.append(loss)\n        total += loss\n        print(loss)\n"
    assert rules(tmp_path, text + more) == [*["loss-kept-with-graph"] * 2, "sync-every-step"]


def test_what_a_network_gives_may_be_no_tensor(tmp_path: Path) -> None:
    text = before_loop("kept = []") + "        output = model(x)\n"
    assert rules(tmp_path, text + "        kept.append(output)\n") == []


@pytest.mark.parametrize(
    ("first", "lines"),
    [
        ("total = 0", "total += loss.detach()"),
        ("total = 0", "if step % 2:\n    pass\ntotal += float(step)"),
        ("total = 0", "total += x.sum()"),
        ("total = 0", "with torch.no_grad():\n    total += loss"),
        ("total = 0", "total = 0\ntotal += loss"),
        ("total = 0", "total += loss\n(total / 2).backward()"),
        ("kept = []", "kept.append(loss)\ntorch.stack(kept).sum().backward()"),
        ("kept = []", "kept.append(loss)\nkept.clear()"),
        ("kept = deque(maxlen=3)", "kept.append(loss)"),
        ("kept = []", "kept.append(loss.detach())"),
        ("kept = []", "kept.append(x)"),
    ],
)
def test_losses_that_are_used_or_dropped(tmp_path: Path, first: str, lines: str) -> None:
    text = before_loop(first) + textwrap.indent(lines, " " * 8) + "\n"
    assert "loss-kept-with-graph" not in rules(tmp_path, text)


# retained graphs


def test_retained_graphs(tmp_path: Path) -> None:
    text = HEAD + LOOP.replace("backward()", "backward(retain_graph=True)")
    assert only(tmp_path, text).fix.action == "loss.backward()"
    assert rules(tmp_path, text + "        (loss * 2).backward()\n") == []
    shared = (
        HEAD
        + "features = model(data)\n"
        + LOOP.replace("backward()", "backward(retain_graph=True)").replace(
            "model(x.to(device))", "model(x.to(device)) + features"
        )
    )
    assert "retain-graph" not in rules(tmp_path, shared)


def test_iterators_that_are_restarted(tmp_path: Path) -> None:
    text = (HEAD + LOOP).replace(
        "for step, (x, y) in enumerate(loader):",
        "for step in range(100):\n        x, y = next(iter(loader))",
    )
    (found,) = report(tmp_path, text).findings
    assert found.kind == "iterator-restarted" and "for batch in loader:" in found.fix.action
    begun = text.replace("next(iter(loader))", "next(batches)").replace(
        "for epoch", "batches = iter(loader)\nfor epoch"
    )
    assert rules(tmp_path, begun) == []
    assert rules(tmp_path, HEAD + LOOP + "x, y = next(iter(loader))\n") == []


def test_a_method_that_is_not_called(tmp_path: Path) -> None:
    for name in ("optimizer.step", "optimizer.zero_grad", "loss.backward", "self.model.train"):
        (found,) = report(tmp_path, HEAD + f"def step(self):\n    {name}\n").findings
        assert found.kind == "not-called" and found.severity == "critical"
        assert found.fix.action == f"{name}()" and found.place is not None
        assert mistakes_in(tmp_path / "script.py")[0].place == found.place
    for text in (
        "step = optimizer.step\n",
        "model.weight\n",
        "optimizer.step()\n",
        "model.train;f()\n",
    ):
        expected = ["not-called"] if "train" in text else []
        assert rules(tmp_path, HEAD + text) == expected
    assert mistakes_in(tmp_path / "none.py") == ()


def test_a_state_that_is_not_copied(tmp_path: Path) -> None:
    kept = HEAD + LOOP + "    if epoch > 1:\n        best = model.state_dict()\n"
    (found,) = report(tmp_path, kept + "model.load_state_dict(best)\n").findings
    assert found.kind == "state-not-copied"
    assert found.fix.action == "best = copy.deepcopy(model.state_dict())"
    assert rules(tmp_path, kept + "torch.save(best, 'best.pt')\n") == ["state-not-copied"]
    assert rules(tmp_path, kept + "        torch.save(best, 'best.pt')\n") == []
    copied = kept.replace("model.state_dict()", "copy.deepcopy(model.state_dict())")
    assert rules(tmp_path, "import copy\n" + copied + "model.load_state_dict(best)\n") == []


# files


def test_own_modules_are_followed_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "__init__.py").write_text("from .parts import Net\n")
    (tmp_path / "net" / "parts.py").write_text("x = y.cuda()\nfrom .. import nothing\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    found = report(tmp_path, "import torch, net.parts\nimport broken, latin\nfrom net import Net\n")
    names = [Path(each).relative_to(tmp_path).as_posix() for each in found.files]
    assert names == ["script.py", "net/__init__.py", "net/parts.py"]
    assert [(f.kind, Path(f.at.file).name) for f in found.findings] == [
        ("hard-coded-cuda", "parts.py")
    ]
    assert "broken.py: syntax error at line 1" in found.unread[0]
    assert "latin.py: it is not UTF-8: byte 0xe9 at line 1" in found.unread[1]


def test_a_script_in_a_package_finds_its_package(tmp_path: Path) -> None:
    package = tmp_path / "job"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("")
    (package / "train.py").write_text("from job.model import Net\nfrom . import model\n")
    names = {Path(each).name for each in read_script(package / "train.py").files}
    assert names == {"train.py", "model.py", "__init__.py"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no such file"),
        (b"x = 1\ny = (\n", "syntax error at line 2"),
        (b"x = '\xff'\n", "it is not UTF-8: byte 0xff at line 1"),
        (b"x = 1\0\n", "null bytes"),
        (b"x = " + b"(" * 3000, "nested"),
        (b"x = " + b"-" * 20000 + b"1\n", "nested too deeply"),
        (b"# coding: nonsense\n", "it is not UTF-8"),
    ],
)
def test_scripts_that_cannot_be_read(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "script.py"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnreadableScriptError) as caught:
        read_script(path)
    message = str(caught.value)
    assert reason in message and str(path) in message and "\n" not in message
    assert message.count(";") >= 1  # input: reason; remedy


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(UnreadableScriptError, match="it is a directory"):
        read_script(tmp_path)


def test_nothing_is_run_or_imported(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"open({str(mark)!r}, 'w')\nimport other\n"
    report(tmp_path, text, other=text)
    assert not mark.exists()


def test_columns_count_characters(tmp_path: Path) -> None:
    found = only(tmp_path, "import torch\nd = 'größe', x.cuda()\n")
    assert found.at.column == len("d = 'größe', ") + 1
    assert found.fix.action.startswith("d = 'größe', x.to(device), with")


def test_loops_in_loops_stay_quick(tmp_path: Path) -> None:
    """Each loop is not followed twice as often as the one around it: this would take hours."""
    lines = [f"{'  ' * depth}for i{depth} in x:" for depth in range(60)]
    assert rules(tmp_path, "\n".join([*lines, "  " * 60 + "y = z.cuda()"])) == ["hard-coded-cuda"]


def test_deep_parts_are_said_and_the_rest_is_read(tmp_path: Path) -> None:
    found = report(tmp_path, "x = a" + ".b" * 600 + "\nz = z.cuda()\n")
    assert [f.kind for f in found.findings] == ["hard-coded-cuda"]
    assert found.unread == (
        f"{tmp_path / 'script.py'}: partly nested too deeply; that part is skipped",
    )
    chain = "if a:\n    pass\n" + "".join(f"elif x == {n}:\n    pass\n" for n in range(250))
    assert report(tmp_path, chain + "z = z.cuda()\n").unread == ()


# the project's own examples and the text


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda p: p.name)
def test_the_examples_are_clean(path: Path) -> None:
    found = read_script(path)
    assert found.findings == () and found.unread == ()


def test_the_text_names_place_reason_and_rewrite(tmp_path: Path) -> None:
    found = report(tmp_path, HEAD + "import other\n" + EVALUATE, other="x = y.cuda()\n")
    text = script_text(found)
    assert "2 findings in 2 files; 2 files read" in " ".join(text.split())
    assert f"no-no-grad: {tmp_path / 'script.py'}:16:18" in on_one_line(text)
    assert "now         output = net(x.to(device))" in text
    assert "write       @torch.inference_mode() above `def evaluate`" in text
    assert text.index("no-no-grad") < text.index("hard-coded-cuda")


def test_the_text_of_a_clean_script_is_one_line(tmp_path: Path) -> None:
    text = script_text(ScriptReport("train.py", ("train.py", "a.py"), ()))
    assert text == "Script train.py: nothing found; 2 files read"


def test_the_text_is_escaped_and_wrapped() -> None:
    place = Place("a\x1b[2J.py", 1, 1, "x = '\x1b[31m'" + "y" * 300)
    finding = Finding("r", "warning", "", (), "why " * 60, (Fix("do " * 60),), place=place)
    text = script_text(ScriptReport("a\x1b[2J.py", ("a\x1b[2J.py",), (finding,), ("b\x07.py: no",)))
    assert text.isprintable() or all(c.isprintable() or c == "\n" for c in text)
    # But for a word of the user's that nothing can break.
    assert all(len(line) <= WIDTH for line in text.split("\n") if "yyy" not in line)
    assert "y" * 200 not in text
    assert "not read: b\\x07.py: no" in text


# anything at all

SAMPLES = [
    HEAD + LOOP,
    HEAD + EVALUATE,
    HEAD + dataset() + PLAIN_LOOP,
    *(path.read_text() for path in sorted((ROOT / "tests" / "training_scripts").glob("*.py"))),
]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A sample with slices cut, doubled and swapped, and lines left out."""
    lines = draw(st.sampled_from(SAMPLES)).split("\n")
    other = draw(st.sampled_from(SAMPLES)).split("\n")
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(lines)))
        end = draw(st.integers(start, min(len(lines), start + 6)))
        kind = draw(st.sampled_from(["cut", "double", "graft", "character"]))
        if kind == "cut":
            lines[start:end] = []
        elif kind == "double":
            lines[start:start] = lines[start:end]
        elif kind == "graft":
            at = draw(st.integers(0, len(other)))
            lines[start:end] = other[at : at + 5]
        elif lines and start < len(lines):
            text = lines[start]
            at = draw(st.integers(0, len(text)))
            lines[start] = text[:at] + draw(st.text(max_size=2)) + text[at + 1 :]
    return "\n".join(lines)


@settings(max_examples=2 * settings.default.max_examples)
@given(text=mutated())
def test_no_source_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = read_script(path)
    except UnreadableScriptError:
        return
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for each in found.findings:
        assert each.at.source == lines[each.at.line - 1].rstrip()
        assert 1 <= each.at.column <= len(lines[each.at.line - 1]) + 1
    assert script_text(found)


@settings(max_examples=60)
@given(content=st.binary(max_size=200))
def test_no_bytes_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_bytes(content)
    try:
        read_script(path)
    except UnreadableScriptError as error:
        assert "\n" not in str(error)
