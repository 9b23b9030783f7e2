"""The causes of a simulated peak, as of a snapshot of the same code."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import trainfit
from tests.memory.snapshot import scenarios
from trainfit.findings.out_of_memory import FullMemory, HeldMemory, of_full_memory
from trainfit.memory.explanation import replayed
from trainfit.memory.held import full_memory
from trainfit.results.findings import Finding, Place


def findings(code: Callable[..., None], *words: object) -> dict[str, Finding]:
    with trainfit.simulate("custom:8GiB") as simulation:
        code(*words)
        recording = simulation.recording
    memory = full_memory(recording, replayed(recording))
    assert sum(held.nbytes for held in memory.held) == memory.allocated_bytes
    return {finding.kind: finding for finding in of_full_memory(memory)}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (scenarios.predictions_kept, "tensors_kept"),
        (scenarios.losses_kept, "tensors_kept"),
        (scenarios.large_vocabulary, "logits_copied"),
        (scenarios.one_checkpoint, "one_checkpoint"),
    ],
)
def test_the_cause(code: Callable[[], None], kind: str) -> None:
    assert kind in findings(code)


@pytest.mark.parametrize("casts", [True, False])
def test_a_loss_that_finds_no_memory_leaves_logits_and_their_copy(*, casts: bool) -> None:
    def fails() -> None:
        rows = torch.rand(18432 if casts else 46080, 8, device="cuda", dtype=torch.bfloat16)
        logits = rows @ torch.rand(8, 65536, device="cuda", dtype=torch.bfloat16)
        targets = torch.zeros(len(rows), dtype=torch.long, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.nn.functional.cross_entropy(logits.float() if casts else logits, targets)

    assert ("logits_copied" in findings(fails)) == casts


@pytest.mark.parametrize("steps", [2, 5])
def test_a_checkpoint_that_is_kept_on_the_gpu(tmp_path: Path, steps: int) -> None:
    """In a short run, and in one that is long enough to tell what stays."""
    file = tmp_path / "checkpoint.pt"
    torch.save(scenarios.model(layers=6).state_dict(), file)
    found = findings(scenarios.checkpoint_kept, file, steps)["checkpoint_on_gpu"]
    source = Path(scenarios.__file__).read_text().splitlines()
    assert "torch.load(" in source[found.at.line - 1]


def test_a_state_of_safetensors_that_is_kept_on_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(scenarios.model(layers=6).state_dict(), file)

    def kept() -> None:
        net = scenarios.model(layers=6).to("cuda")
        state = safetensors.torch.load_file(file, device="cuda")
        net.load_state_dict(state)
        scenarios.train(net, batch=32, steps=2)
        del state

    assert "checkpoint_on_gpu" in findings(kept)


def averaged_weights() -> None:
    """An average of the weights that each step updates: copied on the host, then moved."""
    net = scenarios.model(layers=6)
    average = [each.clone().detach() for each in net.parameters()]
    average = [each.to("cuda") for each in average]
    net = net.to("cuda")
    for _ in range(2):
        scenarios.train(net, batch=32, steps=1)
        torch._foreach_lerp_(average, [each.detach() for each in net.parameters()], 0.1)


def state_that_becomes_the_model(file: Path) -> None:
    with torch.device("meta"):
        net = scenarios.model(layers=6)
    net.load_state_dict(torch.load(file, map_location="cuda"), assign=True)
    scenarios.train(net, batch=32, steps=2)


def test_a_state_that_becomes_the_model_is_no_copy(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    torch.save(scenarios.model(layers=6).state_dict(), file)
    assert "checkpoint_on_gpu" not in findings(state_that_becomes_the_model, file)


@pytest.mark.parametrize(
    "code",
    [
        averaged_weights,
        scenarios.plain,
        scenarios.many_layers,
        scenarios.layers_of_a_function,
        scenarios.block_checkpoints,
    ],
)
def test_no_cause_where_there_is_none(code: Callable[[], None]) -> None:
    assert set(findings(code)) <= {"memory_mostly"}


def test_the_line_of_what_is_kept() -> None:
    kept = findings(scenarios.predictions_kept)["tensors_kept"]
    source = Path(scenarios.__file__).read_text().splitlines()
    assert "kept.append" in source[kept.at.line - 1]


def _attention(queries: int = 4096) -> None:
    x = torch.randn(2, queries, 64, device="cuda", requires_grad=True)
    scores = (x @ x.transpose(-2, -1)).softmax(-1)
    (scores @ x).sum().backward()


def test_what_an_operator_makes_for_itself_is_no_librarys_workspace() -> None:
    """PyTorch multiplies the gradient of a softmax by its result before the kernel: a tensor as
    large as the scores, and none of cuDNN's."""
    with trainfit.simulate("custom:8GiB") as simulation:
        _attention()
        recording = simulation.recording
    memory = full_memory(recording, replayed(recording))
    scores = 2 * 4096 * 4096 * 4
    own = [each for each in memory.held if each.operator == "_softmax_backward_data"]
    assert {each.kind for each in own} == {"temporary"}
    assert sum(each.nbytes for each in own) >= scores
    of_library = sum(each.nbytes for each in memory.held if each.kind == "workspace")
    assert 0 < of_library < scores / 2
    found = {each.kind: each for each in of_full_memory(memory)}
    assert "workspace_large" not in found and "temporaries" in found["memory_mostly"].title


class _Adapted(torch.nn.Module):
    """As PEFT's LoRA layer: the input is cast to the type of the adapter."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16).requires_grad_(False)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(1024, 8, dtype=kind)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(8, 1024, dtype=kind)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        cast = x.to(self.lora_A["default"].weight.dtype)
        result = result + self.lora_B["default"](self.lora_A["default"](cast))
        return result.to(x.dtype)


def _adapters(kind: torch.dtype) -> None:
    net = torch.nn.Sequential(*(_Adapted(kind) for _ in range(4))).cuda()
    net(torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)).sum().backward()


def test_copies_for_adapters_of_another_type() -> None:
    """An input of 8192×1024 in float32 for each layer; not the results that are cast back."""
    found = findings(_adapters, torch.float32)["adapter_copies"]
    (copies,) = found.evidence
    assert copies.value == 4 * 8192 * 1024 * 4
    assert found.share > 0.2 and found.severity == "warning"  # which a screen has room for
    assert "adapter_copies" not in findings(_adapters, torch.bfloat16)


def _adapters_under_autocast(kind: torch.dtype) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        _adapters(kind)


def test_autocast_keeps_what_it_casts_back_for_adapters() -> None:
    """In 16 bits: each layer's own, though the input of several layers is the same."""
    found = findings(_adapters_under_autocast, torch.float32)["adapter_copies"]
    (copies,) = found.evidence
    assert copies.value == 4 * 8192 * 1024 * 2
    assert "adapter_copies" not in findings(_adapters_under_autocast, torch.bfloat16)


def _per_sample(*, freed: bool) -> None:
    """Gradients of each sample, as for differential privacy."""
    net = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        x = torch.rand(256, 512, device="cuda")
        gradients = torch.einsum("bi,bj->bij", x, x)
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if freed:
            del gradients


def test_what_a_variable_keeps_of_the_step_before() -> None:
    found = findings(lambda: _per_sample(freed=False))["held_over"]
    source = Path(__file__).read_text().splitlines()
    assert "einsum" in source[found.at.line - 1] and "256 MiB" in found.title
    assert "held_over" not in findings(lambda: _per_sample(freed=True))


def _sampling(*, with_graph: bool, kept: bool = False) -> None:
    """Steps of a training, and 32 calls in a row of which each gets what the last one gave."""
    layers = [(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(3)]
    net = torch.nn.Sequential(*(each for pair in layers for each in pair)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step() -> None:
        net(torch.rand(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.set_grad_enabled(with_graph):
        x = torch.rand(1024, 512, device="cuda")
        for _ in range(32):
            x = net(x)
    if not kept:
        del x
    step()


def test_calls_in_a_row_whose_graph_no_backward_pass_uses() -> None:
    found = findings(lambda: _sampling(with_graph=True))["calls_with_graph"]
    assert found.evidence[1].value == "96" and found.at is not None
    assert "calls_with_graph" not in findings(lambda: _sampling(with_graph=False))
    assert "calls_with_graph" in findings(lambda: _sampling(with_graph=True, kept=True))


def test_calls_in_a_row_of_each_step() -> None:
    def recurrent() -> None:
        net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            x = torch.rand(64, 512, device="cuda")
            for _ in range(32):
                x = net(x)
            x.sum().backward()
            optimizer.step()

    assert "calls_with_graph" not in findings(recurrent)


class _Zero:
    """As DeepSpeed's optimizer of ZeRO-2, which makes its bucket at each backward pass."""

    def __init__(self) -> None:
        self.ipg_buckets = {torch.bfloat16: types.SimpleNamespace(buffer=[], index=0)}

    def setup_buckets(self) -> None:
        bucket = self.ipg_buckets[torch.bfloat16]
        bucket.buffer.append(torch.empty(100_000_000, dtype=torch.bfloat16, device="cuda"))


def _zero() -> None:
    scenarios.train(scenarios.model(layers=2).to("cuda"), batch=32, steps=1)
    optimizer = _Zero()
    optimizer.setup_buckets()
    del optimizer


def test_the_bucket_of_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = types.ModuleType("deepspeed.runtime.zero.stage_1_and_2")
    monkeypatch.setattr(_Zero, "__module__", stage.__name__)
    stage.__dict__["_Zero"] = _Zero
    monkeypatch.setitem(sys.modules, stage.__name__, stage)
    found = findings(_zero)
    (bucket,) = found["bucket_large"].evidence
    assert bucket.value == 2 * 100_000_000
    assert "reduce_bucket_size" in found["bucket_large"].fixes[0].action
    assert not hasattr(_Zero.setup_buckets, "__wrapped__")  # which the simulation took back


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [
        (torch.float32, "weights in bfloat16, or quantized with adapters (QLoRA)"),
        (torch.bfloat16, "weights quantized, with adapters (QLoRA)"),
        (torch.uint8, "a smaller model: its weights are quantized already"),
    ],
)
def test_weights_are_made_less_by_what_they_are_not_yet(dtype: torch.dtype, fix: str) -> None:
    def large() -> None:
        model = torch.nn.Linear(8, 8, bias=False)
        weight = torch.zeros(8192, 8192, dtype=dtype, device="cuda")
        model.weight = torch.nn.Parameter(weight, requires_grad=False)
        model.forward = lambda x: x + model.weight[0, 0]  # type: ignore[method-assign]
        model(torch.rand(8, 8, device="cuda"))
        kept.append(model)

    kept: list[torch.nn.Module] = []
    found = findings(large)["memory_mostly"]
    assert [each.action for each in found.fixes] == [fix]


def test_all_pairs_have_the_line_of_what_has_one() -> None:
    """A sort's scratch memory is the most of it and no line's; the matrix has one."""
    line = Place("eval.py", 7)
    held = [
        HeldMemory("workspace", "sort", None, 3 << 30, pairwise=True),
        HeldMemory("temporary", "mm", line, 1 << 30, pairwise=True),
    ]
    found, *_ = of_full_memory(FullMemory(held, 4 << 30, 4 << 30))
    assert (found.kind, found.place) == ("all_pairs", line) and "eval.py:7" in found.title


@pytest.mark.parametrize(("operators", "is_graph"), [(["addmm"], False), (["addmm", "gelu"], True)])
def test_what_is_kept_of_a_graph_and_by_itself(operators: list[str], *, is_graph: bool) -> None:
    """Results of one operator are what a list keeps; a graph keeps those of several layers."""
    held = [HeldMemory("activation", each, Place("a.py", 3), 1 << 30, kept=9) for each in operators]
    found, *_ = of_full_memory(FullMemory(held, 4 << 30, 4 << 30))
    assert found.kind == "tensors_kept" and ("of graphs" in found.cause) is is_graph
