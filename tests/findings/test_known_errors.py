"""What operators, PyTorch and other libraries refuse: real exceptions, each with its explanation,
and others that look alike."""

from __future__ import annotations

import json
import random
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence as pack
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainfit.findings.facts import FailureContext
from trainfit.findings.failure import KINDS, of_exception
from trainfit.torch_private.needed import release

HALF_IMAGE = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
LINEAR = nn.Linear(4, 2)
SAMPLES = TensorDataset(torch.zeros(4, 3))


class Lists(Dataset[Any]):
    """A sample is a list."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return [index, index + 1]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


class Early(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(1, 1)


def classes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def of_two_classes(output: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(
        output, torch.zeros_like(output), pos_weight=torch.tensor([1.0, 4.0])
    )


def whole_checkpoint() -> None:
    nn.Linear(2, 2).load_state_dict({"epoch": 1, "state_dict": {}})


def inferred() -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        features = torch.ones(3)
    (weight * features).sum().backward()


def changed_part() -> None:
    one, _ = (torch.ones(2, 3, requires_grad=True) * 2).unbind()
    one += 1


def nan_found() -> None:
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly():
        (torch.sqrt(x) * 0).backward()


def unused_gradient() -> None:
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad((x * 2).sum(), torch.ones(1))


class Halves(torch.autograd.Function):
    """Gives one gradient of two, or one of another shape."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return one.sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Gradient(torch.autograd.Function):
    """Gives its gradient in the place of another input, or has no backward."""

    @staticmethod
    def forward(ctx: Any, scale: float, x: torch.Tensor) -> torch.Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


def hooked_before_in_place() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    layers[0].register_full_backward_hook(lambda *_: None)
    layers(ONES)


def sparse_step(kind: type[torch.optim.Optimizer], **options: float) -> None:
    table = nn.Embedding(4, 2, sparse=kind is not torch.optim.SparseAdam)
    table(classes(3)).sum().backward()
    kind(table.parameters(), lr=0.1, **options).step()  # type: ignore[call-arg]


def clipped_sparse() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(classes(3)).sum().backward()
    nn.utils.clip_grad_norm_(table.parameters(), 1.0)


def averaged_counters() -> None:
    counters = [torch.tensor(3)]
    torch._foreach_addcdiv_(counters, [torch.tensor(2)], [torch.tensor(2)])


def part_of_weight() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        part = weight[0]
    part += 1


def attended(**masks: torch.Tensor) -> None:
    x = torch.zeros(2, 3, 4)
    nn.MultiheadAttention(4, 2, batch_first=True)(x, x, x, **masks)


def flash_in_float64() -> None:
    x = torch.zeros(1, 1, 4, 3, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4).double(), dropout_p=0.5)


ONES = torch.ones(2, 2, requires_grad=True)
NAN = torch.tensor([float("nan"), 1.0])

REFUSED: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("classes_dimension", lambda: F.cross_entropy(torch.zeros(4, 20, 7), classes(4, 20))),
    ("target_type", lambda: F.cross_entropy(torch.zeros(2, 3, 4, 4), classes(2, 1, 4, 4))),
    ("not_contiguous", lambda: torch.zeros(2, 3, 4).permute(0, 2, 1).view(2, -1)),
    ("no_attention_kernel", flash_in_float64),
    ("reshape_size", lambda: torch.zeros(3, 5).view(-1, 4)),
    ("several_outputs", lambda: nn.Sequential(nn.LSTM(4, 4), LINEAR)(torch.zeros(1, 2, 4))),
    ("several_outputs", lambda: F.cross_entropy((torch.zeros(1, 2),), classes(1))),  # type: ignore[arg-type]
    ("no_output", lambda: F.cross_entropy(None, classes(1))),  # type: ignore[arg-type]
    ("batch_of_list", lambda: next(iter(DataLoader(Lists(), 2))).to("cpu")),
    ("bool_of_tensor", lambda: nn.CrossEntropyLoss(torch.zeros(2, 3), torch.zeros(2))),  # type: ignore[arg-type]
    ("sizes_to_join", lambda: torch.cat([torch.zeros(1, 2, 101), torch.zeros(1, 2, 100)], 1)),
    ("sizes_differ", lambda: torch.zeros(1, 600) + torch.zeros(1, 512)),
    ("dimensions_to_join", lambda: torch.cat([torch.zeros(2, 3, 4, 4), torch.zeros(2, 3)], 1)),
    ("steps_first", lambda: F.ctc_loss(torch.zeros(4, 9, 5), classes(4, 2), [9] * 4, [2] * 4)),
    ("steps_first", lambda: F.ctc_loss(torch.zeros(9, 4, 5), classes(4, 2), [18] * 4, [2] * 4)),
    ("sizes_of_weights", lambda: of_two_classes(torch.zeros(8))),
    ("gradient_none", lambda: nn.Linear(2, 2).weight.grad.clamp_(-1, 1)),  # type: ignore[union-attr]
    ("gradient_none", lambda: 0.1 * nn.Linear(2, 2).weight.grad),  # type: ignore[operator]
    ("state_as_model", lambda: LINEAR.state_dict().eval()),  # type: ignore[attr-defined]
    ("state_as_model", lambda: LINEAR.state_dict()(torch.zeros(4))),  # type: ignore[operator]
    ("sizes_differ", lambda: torch.zeros(1, 4, 4).sub_(torch.zeros(3, 1, 1))),
    ("input_too_small", lambda: nn.Conv2d(1, 1, 3)(torch.zeros(1, 1, 2, 2))),
    ("input_too_small", lambda: F.max_pool2d(torch.zeros(1, 1, 1, 1), 2)),
    ("dimensions_differ", lambda: nn.BatchNorm2d(4)(torch.zeros(2, 4))),
    ("dimensions_differ", lambda: nn.Conv2d(1, 1, 3)(torch.zeros(4, 4))),
    ("no_such_dimension", lambda: torch.zeros(1, 10).squeeze().argmax(1)),
    ("single_number", lambda: torch.zeros(())[0]),
    ("single_number", lambda: list(torch.zeros(()))),
    ("inference_tensor", inferred),
    ("index_type", lambda: nn.Embedding(4, 2)(torch.zeros(3))),
    ("index_type", lambda: torch.zeros(4)[torch.zeros(2)]),
    ("index_beyond", lambda: F.one_hot(torch.tensor([3]), 3)),
    ("index_beyond", lambda: torch.zeros(2, 3).gather(1, torch.tensor([[3]]))),
    ("whole_numbers", lambda: nn.Conv2d(3, 1, 3)(HALF_IMAGE)),
    ("whole_numbers", lambda: nn.Linear(3, 1)(torch.zeros(2, 3).long())),
    ("whole_numbers", lambda: (torch.zeros(3) == 0).mean()),
    ("whole_numbers", lambda: torch.zeros(3).long().requires_grad_()),
    ("type_unsupported", lambda: torch.linalg.inv(torch.eye(2).bfloat16())),
    ("nothing_to_join", lambda: torch.stack([])),
    ("nothing_to_join", lambda: torch.cat([])),
    ("numbers_joined", lambda: torch.cat([torch.tensor(1.0)])),
    ("expand_size", lambda: torch.zeros(2, 3).__setitem__(slice(0, 1), torch.zeros(2, 3))),
    ("matmul_dimensions", lambda: torch.mm(torch.zeros(2, 3), torch.zeros(3))),
    ("matmul_dimensions", lambda: torch.bmm(torch.zeros(2, 3), torch.zeros(3, 2))),
    ("matmul_sizes", lambda: torch.bmm(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))),
    ("einsum_letters", lambda: torch.einsum("bi,bj->bk", torch.zeros(2, 2), torch.zeros(2, 2))),
    ("not_invertible", lambda: torch.linalg.cholesky(-torch.eye(2))),
    ("topk_range", lambda: torch.zeros(3).topk(5)),
    ("index_shape", lambda: torch.zeros(2, 3).gather(1, classes(2))),
    ("mask_shape", lambda: torch.zeros(2, 3)[torch.ones(3, 3).bool()]),
    ("half_overflow", lambda: torch.zeros(2).half().masked_fill(torch.ones(2).bool(), -1e9)),
    ("no_distribution", lambda: torch.multinomial(NAN, 1)),
    ("no_distribution", lambda: torch.distributions.Normal(NAN, 1.0)),
    ("class_weights", lambda: F.cross_entropy(torch.zeros(1, 3), classes(1), torch.ones(2))),
    ("class_weights", lambda: nn.CrossEntropyLoss(weight=[1.0, 2.0])),  # type: ignore[arg-type]
    ("attention_mask", lambda: attended(attn_mask=torch.zeros(2, 3, 3))),
    ("attention_mask", lambda: attended(key_padding_mask=torch.zeros(3, 2))),
    ("heads", lambda: nn.MultiheadAttention(100, 8)),
    ("channels_divisible", lambda: nn.GroupNorm(32, 48)),
    ("channels_divisible", lambda: F.pixel_shuffle(torch.zeros(1, 3, 2, 2), 2)),
    ("normalized_size", lambda: nn.LayerNorm(4)(torch.zeros(2, 3))),
    ("normalized_size", lambda: nn.BatchNorm2d(4)(torch.zeros(2, 3, 1, 1))),
    ("recurrent_input", lambda: nn.LSTM(4, 4)(torch.zeros(2, 1, 3))),
    ("recurrent_input", lambda: nn.LSTM(4, 4)(torch.zeros(2, 1, 4), (ONES, ONES))),
    ("bool_arithmetic", lambda: 1 - torch.ones(2).bool()),
    ("flag_of_result", lambda: setattr(ONES * 2, "requires_grad", False)),
    ("custom_backward", lambda: Halves.apply(ONES).sum().backward()),
    ("custom_backward", lambda: Halves.apply(ONES, ONES * 2).sum().backward()),
    ("custom_backward", lambda: Gradient.apply(2.0, ONES).sum().backward()),
    ("custom_backward", lambda: WithoutBackward.apply(ONES).sum().backward()),
    ("hook_on_in_place", hooked_before_in_place),
    ("sparse_gradients", lambda: sparse_step(torch.optim.Adam)),
    ("sparse_gradients", lambda: sparse_step(torch.optim.SparseAdam)),
    ("sparse_gradients", lambda: sparse_step(torch.optim.SGD, weight_decay=0.1)),
    ("sparse_gradients", lambda: sparse_step(torch.optim.Adagrad, weight_decay=0.1)),
    # PyTorch 2.15 clips them.
    *([("sparse_gradients", clipped_sparse)] if release(torch.__version__) < (2, 15) else []),
    ("averaged_counters", averaged_counters),
    ("view_in_place", part_of_weight),
    ("dimensions_differ", lambda: F.interpolate(torch.zeros(1, 2, 3), 6, mode="bilinear")),
    ("dimensions_differ", lambda: F.max_pool2d(torch.zeros(4, 8), 2)),
    ("no_such_dimension", lambda: torch.zeros(2, 3).permute(0, 2, 1)),
    ("assigned_parameter", lambda: setattr(LINEAR, "weight", torch.zeros(2, 4))),
    ("not_a_module", lambda: nn.Sequential(nn.Linear(2, 2), F.relu)),  # type: ignore[arg-type]
    ("forward_arguments", lambda: nn.Sequential(LINEAR)(ONES, ONES)),
    ("state_wanted", lambda: LINEAR.load_state_dict("model.pt")),  # type: ignore[arg-type]
    ("loader_indexed", lambda: DataLoader(SAMPLES)[0]),  # type: ignore[index]
    ("split_lengths", lambda: torch.utils.data.random_split(SAMPLES, [1, 2])),
    ("state_of_optimizer", lambda: torch.optim.SGD([ONES]).load_state_dict({"model": 1})),
    ("schedule_of", lambda: torch.optim.lr_scheduler.StepLR(LINEAR, 1)),  # type: ignore[arg-type]
    ("schedule_length",
     lambda: torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD([ONES], 0.1), 0.1)),
    ("method_not_called", lambda: f"{ONES.sum().item:.3f}"),
    ("method_not_called", lambda: 0.0 + ONES.sum().item),  # type: ignore[operator]
    ("method_not_called", lambda: torch.optim.SGD(LINEAR.parameters)),  # type: ignore[arg-type]
    ("text_for_number", lambda: torch.optim.SGD([ONES], lr="1e-3")),  # type: ignore[arg-type]
    ("parts_unpacked", lambda: [x for x, y in DataLoader(SAMPLES)]),
    ("few_samples", lambda: random.sample([1], 2)),
    ("no_nvidia_smi", lambda: subprocess.check_output(["nvidia-smi"], env={"PATH": ""})),
    ("ragged_array", lambda: np.array([[1, 2], [3]])),
    ("not_an_array", lambda: torch.from_numpy([1])),
    ("not_an_array", lambda: torch.from_numpy(None)),
    ("no_probabilities", lambda: F.binary_cross_entropy(torch.full((2,), 3.0), torch.zeros(2))),
    ("nan_in_backward", nan_found),
    ("view_in_place", changed_part),
    ("gradient_of_unused", unused_gradient),
    ("text_as_numbers", lambda: torch.tensor(["cat", "dog"])),
    ("attribute_of_wrapper", lambda: nn.DataParallel(nn.Linear(1, 1)).weight),
    ("no_forward", lambda: nn.Module()(1)),
    ("no_super", Early),
    ("checkpoint_whole", whole_checkpoint),
    ("loader_options", lambda: DataLoader(SAMPLES, shuffle=True, sampler=[0])),
    ("loader_options", lambda: DataLoader(Stream(), shuffle=True)),
    ("loader_options", lambda: DataLoader(SAMPLES, persistent_workers=True)),
    ("loader_options", lambda: DataLoader(SAMPLES, batch_sampler=[[0]], drop_last=True)),
    ("no_samples", lambda: DataLoader(TensorDataset(torch.zeros(0)), shuffle=True)),
    ("no_length", lambda: DataLoader(Unsized(), shuffle=True)),
    ("method_not_called", lambda: torch.optim.SGD(nn.Linear(1, 1).parameters, 0.1)),  # type: ignore[arg-type]
    ("lengths_unsorted", lambda: pack(torch.zeros(2, 3, 1), torch.tensor([1, 3]), True)),
    ("length_of_none", lambda: pack(torch.zeros(2, 3, 1), torch.tensor([3, 0]), True)),
    ("one_number_wanted", lambda: torch.ones(3).item()),
    ("one_number_wanted", lambda: torch.tensor([torch.ones(3), torch.ones(3)])),
    ("expanded_written", lambda: torch.zeros(1).expand(3).add_(1)),
    ("schedule_resumed", lambda: StepLR(torch.optim.SGD(LINEAR.parameters()), 1, last_epoch=3)),
    ("attention_shapes", lambda: nn.Transformer(8, 2, 1)(torch.ones(4, 3, 8), torch.ones(4, 2, 8))),
    ("attention_shapes", lambda: nn.MultiheadAttention(8, 2)(*(torch.zeros(4, 3, 6),) * 3)),
    ("no_numbers", lambda: nn.Linear(2, 2, device="meta").to("cpu")),
    ("length_of_nothing", lambda: 1.0 / len(DataLoader(SAMPLES, 64, drop_last=True))),
    ("no_closure", lambda: torch.optim.LBFGS([nn.Parameter(torch.ones(1))]).step()),  # type: ignore[call-arg]
    ("optimizer_tensors", lambda: torch.optim.SGD([[torch.zeros(1)]], 0.1)),  # type: ignore[arg-type]
    ("optimizer_of_results", lambda: torch.optim.SGD([nn.Parameter(torch.ones(1)) * 2], 0.1)),
)  # fmt: skip


def explained(function: Callable[[], Any]) -> str | None:
    """The kind of the finding about what it raises."""
    try:
        function()
    except Exception:
        found = of_exception(traceback.format_exc())
    else:
        raise AssertionError("it raised nothing")
    assert found is None or found.kind in KINDS
    return found.kind if found else None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "refused"), REFUSED)
def test_a_refusal_is_explained(kind: str, refused: Callable[[], Any]) -> None:
    assert explained(refused) == kind


def test_the_gradient_of_a_result_is_told_from_one_that_is_missing() -> None:
    said = (
        'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n'
        "    x -= 0.1 * x.grad\nTypeError: unsupported operand type(s) for *: 'float' and "
        "'NoneType'\n"
    )
    warned = (
        "UserWarning: The .grad attribute of a Tensor that is not a leaf Tensor is being accessed."
    )
    of_result = of_exception(said, seen=FailureContext(output=warned))
    missing = of_exception(said)
    assert of_result is not None and of_result.kind == "gradient_of_result"
    assert "device=device, requires_grad=True" in of_result.fix.action
    assert missing is not None and missing.kind == "gradient_none"


def test_predictions_of_another_number_than_labels() -> None:
    said = (
        'Traceback (most recent call last):\n  File "/w/train.py", line 3, in <module>\n'
        "    {}\nRuntimeError: The size of tensor a (3) must match the size of tensor b (32) at "
        "non-singleton dimension 0\n"
    )
    compared = of_exception(said.format("hits = (pred == y).sum()"))
    added = of_exception(said.format("x = x + self.positions"))
    assert compared is not None and "argmax(dim=1)" in compared.fix.action
    assert added is not None and "argmax" not in added.fix.action


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"shuffle": True, "sampler": [0]}, "leave out shuffle:"),
        ({"batch_sampler": [[0]], "batch_size": 4}, "leave out batch_size, shuffle"),
        ({"batch_size": None, "drop_last": True}, "leave out drop_last"),
        ({"persistent_workers": True}, "leave out persistent_workers"),
        ({"prefetch_factor": 2}, "leave out prefetch_factor"),
    ],
)
def test_options_of_a_loader_that_exclude_each_other(options: dict[str, Any], fix: str) -> None:
    try:
        DataLoader(SAMPLES, **options)
    except ValueError:
        found = of_exception(traceback.format_exc())
    assert found is not None and found.kind == "loader_options" and fix in found.fix.action


#: On a GPU, or of libraries.
SAID = (
    ("batch_squeezed", "size mismatch (got input: [10], target: [1])"),
    ("two_devices", "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) "
                    "should be the same"),
    ("two_devices", "Input and hidden tensors are not at the same device, found input tensor at "
     "cuda:0 and hidden tensor at cpu"),
    ("two_devices", "Input and parameter tensors are not at the same device, found input tensor at "
     "cpu and parameter tensor at cuda:0"),
    ("two_devices", "indices should be either on cpu or on the same device as the indexed tensor "
                    "(cpu)"),
    ("whole_numbers", "Input type (torch.cuda.ByteTensor) and weight type (torch.cuda.FloatTensor) "
                      "should be the same"),
    ("type_unsupported", '"addmm_impl_cpu_" not implemented for \'Half\''),
    ("several_outputs", "cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not "
                        "InceptionOutputs"),
    ("attribute_of_wrapper", "'DistributedDataParallel' object has no attribute 'fc'"),
    ("uneven_shards", "Must flatten tensors with uniform `requires_grad` when "
                      "`use_orig_params=False`"),
    ("not_deterministic", "adaptive_avg_pool2d_backward_cuda does not have a deterministic "
                          "implementation, but you set 'torch.use_deterministic_algorithms(True)'"),
    ("not_deterministic", "nll_loss2d_forward_out_cuda_template does not have a deterministic "
                          "implementation, but you set 'torch.use_deterministic_algorithms(True)'"),
    ("not_deterministic", "Deterministic behavior was enabled with either "
                          "`torch.use_deterministic_algorithms(True)` or"),
    ("transform_order", "pic should be PIL Image or ndarray. Got <class 'torch.Tensor'>"),
    ("no_loss", "The model did not return a loss from the inputs, only the following keys: logits"),
    ("quantized_training", "You cannot perform fine-tuning on purely quantized models."),
    ("hub_unreachable", "Couldn't find a module script at /w/accuracy/accuracy.py. Module "
                        "'accuracy' doesn't exist on the Hugging Face Hub either."),
    ("start_method_set", "context has already been set"),
    ("not_prequantized", "The quantization method QuantizationMethod.AWQ does require the model to "
                         "be pre-quantized. You explicitly passed `pre_quantized=False`"),
    ("quantizer_refuses", "NVFP4 requires Blackwell (sm100+) block-scaled tensor cores"),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "said"), SAID)
def test_what_a_library_says_is_explained(kind: str, said: str) -> None:
    found = of_exception(f"Traceback (most recent call last):\nRuntimeError: {said}\n")

    assert found is not None
    assert found.kind == kind


def test_class_weights_that_were_left_on_the_cpu() -> None:
    found = of_exception(
        "Traceback (most recent call last):\nRuntimeError: Expected all tensors to be on the same "
        "device, but found at least two devices, cuda:0 and cpu! (when checking argument for "
        "argument weight in method wrapper_CUDA_nll_loss_forward)\n"
    )
    assert found is not None and found.kind == "two_devices"
    assert "class weights" in found.title and "criterion.to(device)" in found.fix.action


@pytest.mark.parametrize(
    ("said", "is_split"),
    [
        ("but found at least two devices, cuda:1 and cuda:0!", True),
        ("but got mat2 is on cuda:1, different from other tensors on cuda:0 (when", True),
        ("but found at least two devices, cuda:0 and cpu!", False),
        ("but got mat2 is on cpu, different from other tensors on cuda:0 (when", False),
    ],
)
def test_tensors_of_two_gpus_are_not_said_to_be_on_the_cpu(said: str, is_split: bool) -> None:
    words = f"RuntimeError: Expected all tensors to be on the same device, {said}"
    found = of_exception(f"Traceback (most recent call last):\n{words}\n")
    assert found is not None and found.kind == "two_devices"
    assert ("of two GPUs" in found.title) is is_split and ("CPU" in found.title) is not is_split


#: As pandas raises it in a worker; and what looks like it.
IN_PANDAS = """Traceback (most recent call last):
  File "/home/anna/train.py", line 30, in <module>
    for x, y in loader:
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/home/anna/train.py", line 12, in __getitem__
    return self.table["label"][index]
  File "/opt/venv/lib/python3.12/site-packages/pandas/core/series.py", line 1133, in __getitem__
    return self._get_value(key)
  File "/opt/venv/lib/python3.12/site-packages/pandas/core/indexes/base.py", line 3819, in get_loc
    raise KeyError(key) from err
KeyError: 413
"""


def test_a_row_by_its_label_is_explained() -> None:
    found = of_exception(IN_PANDAS)

    assert found is not None
    assert found.kind == "row_label"
    assert of_exception(IN_PANDAS.replace("413", "'colour'")) is None
    assert of_exception(IN_PANDAS.replace("pandas/core", "mine/core")) is None


def of_its_own() -> None:
    raise KeyError(413)


@pytest.mark.parametrize(
    "raised",
    [
        of_its_own,
        lambda: len(3),  # type: ignore[arg-type]
        lambda: "cat".size,  # type: ignore[attr-defined]
        lambda: sorted([1, "a"]),  # type: ignore[list-item]
        lambda: "1" < 2.0,  # type: ignore[operator]
        lambda: [].append_all,  # type: ignore[attr-defined]
    ],
)
def test_an_error_of_the_script_s_own_logic_is_not(raised: Callable[[], Any]) -> None:
    assert explained(raised) is None


#: Files of settings, read by lines like these; what is raised at the last, and what that means.
_READ = "def check(path, opt, k='train'):\n    data = {}\n    {}\n"


@pytest.mark.parametrize(
    ("read", "line", "kind"),
    [
        ("yaml.safe_load('')", "assert k in data, 'missing'", "nothing_read"),
        ("yaml_load(path)", "data['train']", "nothing_read"),
        ("yaml.safe_load('model:')", "data['model']['depth']", "nothing_read"),
        ("yaml.safe_load('')", "data.get('lr')", "nothing_read"),
        ("yaml.safe_load('')", "dict(**data)", "nothing_read"),
        ("yaml.safe_load('lr: 1')", "data['model']", "key_not_read"),
        ('json.loads("{}")', 'data["model"]', "key_not_read"),
        ("yaml.safe_load('a: 1')", "data['a'] + opt['b']", None),  # nothing of the file's
        ("yaml.safe_load('a: 1')", "opt['a']", None),
        ("dict(a=1)", "data['b']", None),
    ],
)
def test_a_file_of_settings_that_lacks_what_is_asked(
    read: str, line: str, kind: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "utils.py"
    script.write_text(_READ.format(read, line))
    scope: dict[str, Any] = {"yaml": yaml, "json": json, "yaml_load": lambda _: None}
    exec(compile(script.read_text(), str(script), "exec"), scope)
    found = None
    try:
        scope["check"]("data.yaml", None)
    except Exception:
        found = of_exception(traceback.format_exc())
    assert (found and found.kind) == kind
    if found is not None:
        assert f"{script}:2 reads" in found.fix.action


def test_a_module_that_another_package_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone of robomimic, and an older one that is installed."""
    (tmp_path / "torch" / "utils").mkdir(parents=True)
    for file in ("setup.py", "torch/__init__.py", "torch/utils/lang_utils.py"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    said = "Traceback (most recent call last):\nModuleNotFoundError: No module named "
    found = of_exception(f"{said}'torch.utils.lang_utils'\n")
    assert found is not None and found.kind == "package_missing"
    assert found.fix.action.startswith("pip install -e ., or PYTHONPATH=. ")
    other = of_exception(f"{said}'torch.utils.gone'\n")
    assert other is not None and other.kind == "outdated"
