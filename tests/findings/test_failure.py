"""Why runs fail: real exceptions where they are cheap, else the words of PyTorch and the driver."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import socket
import threading
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

from trainfit.findings import worker_start
from trainfit.findings.facts import Failure, FailureContext
from trainfit.findings.failure import KINDS, of_exception, of_failure
from trainfit.findings.tracebacks import exception_in
from trainfit.loader.measure.probe_runs import bounds_of
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Finding

HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64


class Holding(Dataset[Any]):
    """A data set with an attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.held(index) if callable(self.held) else torch.zeros(index + 1)


class Refuses:
    """What some libraries' objects say to pickle."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def printed(function: Callable[[], Any]) -> str:
    """The traceback of what it raises."""
    try:
        function()
    except BaseException:
        return traceback.format_exc()
    raise AssertionError("it raised nothing")


def cause(function: Callable[[], Any]) -> Finding | None:
    fault = of_exception(printed(function))
    assert fault is None or fault.kind in KINDS
    return fault


def spawned(held: Any) -> Callable[[], Any]:
    loader = DataLoader(Holding(held), 2, num_workers=1, multiprocessing_context="spawn")
    return lambda: iter(loader)


# --- Workers that are spawned -----------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        TypeError("cannot pickle 'Environment' object"),  # lmdb
        TypeError("cannot pickle 'lmdb.cpython.Environment' object"),
        TypeError("h5py objects cannot be pickled"),
        TypeError("cannot pickle 'sqlite3.Connection' object"),
        TypeError("cannot pickle '_io.BufferedReader' object"),
        TypeError("cannot pickle 'cv2.VideoCapture' object"),
        pickle.PicklingError("Can't pickle <class 'botocore.client.S3'>: attribute lookup S3"),
    ],
    ids=str,
)
def test_a_handle_is_opened_in_the_worker_and_not_forked(error: Exception) -> None:
    fault = cause(spawned(Refuses(error)))
    assert fault is not None and fault.kind == "not_picklable"
    assert "__getitem__" in fault.fix.action and "fork" not in fault.fix.action
    assert str(error) in fault.title and type(error).__name__ in fault.cause


def test_a_lambda_becomes_a_function_or_is_forked() -> None:
    fault = cause(spawned(lambda index: index))
    assert fault is not None and fault.kind == "not_picklable"
    assert fault.place is not None and fault.place.file == "tests/findings/test_failure.py"
    code = Path(__file__).read_text().splitlines()[fault.place.line - 1]
    assert code == "    fault = cause(spawned(lambda index: index))"
    assert fault.fix.action.startswith("use a module-level function") and "fork" in fault.fix.action


@pytest.mark.parametrize(
    "held",
    [
        threading.Lock(),
        Refuses(TypeError("no default __reduce__ due to non-trivial __cinit__")),
        Refuses(ValueError("whatever a library of one's own says")),
    ],
)
def test_what_else_refuses_is_named(held: Any) -> None:
    fault = cause(spawned(held))
    assert fault is not None and fault.kind == "not_picklable"
    assert "every attribute" in fault.fix.action


def test_a_process_of_the_scripts_own_has_no_data_set() -> None:
    context = multiprocessing.get_context("spawn")
    fault = cause(context.Process(target=lambda: None).start)
    assert fault is not None and fault.kind == "not_picklable"
    assert "data set" not in fault.title


def test_pickling_and_copying_elsewhere_is_not_explained() -> None:
    assert cause(lambda: pickle.dumps(lambda: None)) is None
    assert cause(lambda: copy.deepcopy(threading.Lock())) is None


def test_files_that_the_script_keeps_open_are_told_by_its_line() -> None:
    """And not by what workers hold open, where there are any."""
    text = "OSError: [Errno 24] Too many open files: 'out/trace_2.txt'"
    script = f'Traceback (most recent call last):\n  File "train.py", line 12, in write\n{text}'
    fault = of_exception(script)
    assert fault is not None and fault.kind == "open_files" and str(fault.place) == "train.py:12"
    assert "with open(" in fault.fix.action
    seen = FailureContext()
    failure = Failure("OSError", text.partition(": ")[2], script)
    of_workers = of_failure(failure, LoaderSettings(2), seen)
    assert of_workers is not None and "set_sharing_strategy" in of_workers.fix.action
    # Without a name: a file that a library opens once more.
    bare = text.partition(": '")[0]
    fault = of_exception(script.replace(text, bare))
    assert (
        fault is not None and str(fault.place) == "train.py:12" and "with open(" in fault.fix.action
    )
    sends = (
        f'  File "/lib/torch/multiprocessing/reductions.py", line 359, in reduce_storage\n{bare}'
    )
    fault = of_exception(script.replace(text, sends))
    assert fault is not None and "set_sharing_strategy" in fault.fix.action


def test_a_class_that_a_checkpoint_misses_is_no_spawned_worker() -> None:
    text = "AttributeError: Can't get attribute 'Net' on <module '__main__' from 'train.py'>"
    loading = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{text}'
    assert of_exception(loading) is None
    frame = '  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 132, in _main\n'
    message = "DataLoader worker (pid(s) 7) exited unexpectedly"
    seen = FailureContext(output=f"Traceback (most recent call last):\n{frame}{text}")
    fault = of_failure(Failure("RuntimeError", message, message), None, seen)
    assert fault is not None and fault.kind == "not_importable"


def test_the_guard_that_a_script_lacks_is_named_by_what_workers_print() -> None:
    message = "DataLoader worker (pid(s) 7) exited unexpectedly"
    output = "current process has finished its bootstrapping phase."
    fault = of_failure(
        Failure("RuntimeError", message, message), None, FailureContext(output=output)
    )
    assert fault is not None and fault.kind == "no_main_guard"


def printed_by_spawned(module: str) -> str:
    return (
        'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
        '  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 132, in _main\n'
        "    self = reduction.pickle.load(from_parent)\n"
        f'{module}  File "/home/me/data.py", line 16, in __getattr__\n'
        "    return getattr(self.inner, name)\nRecursionError: maximum recursion depth exceeded\n"
    )


def test_an_object_that_cannot_be_made_of_its_pickle() -> None:
    message = "DataLoader worker (pid(s) 7) exited unexpectedly with exit code 1."
    failure = Failure("RuntimeError", message, message)
    spawn = LoaderSettings(2, 2, start_method="spawn")
    seen = FailureContext(output=printed_by_spawned(""))
    fault = of_failure(failure, spawn, seen)
    assert fault is not None and fault.kind == "not_rebuilt" and fault.kind in KINDS
    assert "RecursionError" in fault.title and "__getattr__" in fault.fix.action
    assert str(fault.place) == "/home/me/data.py:16"
    imported = '  File "/home/me/other.py", line 3, in <module>\n'
    seen = FailureContext(output=printed_by_spawned(imported))
    other = of_failure(failure, spawn, seen)
    assert other is None or other.kind != "not_rebuilt"


# --- Types ------------------------------------------------------------------------------------


def linear(one: torch.dtype, other: torch.dtype) -> Any:
    return functional.linear(torch.zeros(2, 3, dtype=one), torch.zeros(4, 3, dtype=other))


@pytest.mark.parametrize(
    "call",
    [
        lambda: linear(HALF, FLOAT),
        lambda: linear(FLOAT, torch.bfloat16),
        lambda: torch.nn.Conv2d(3, 4, 3)(torch.zeros(1, 3, 8, 8, dtype=HALF)),
        lambda: torch.zeros(2, 3) @ torch.zeros(3, 2, dtype=HALF),
        lambda: functional.scaled_dot_product_attention(
            *(torch.zeros(1, 1, 4, 8, dtype=each) for each in (FLOAT, HALF, HALF))
        ),
        lambda: torch.zeros(4).index_put_(
            (torch.tensor([0]),), torch.ones(1, dtype=torch.bfloat16)
        ),
    ],
    ids=["linear", "bfloat16", "conv", "matmul", "attention", "index_put"],
)
def test_two_precisions_in_one_operator(call: Callable[[], Any]) -> None:
    fault = cause(call)
    assert fault is not None and fault.kind == "mixed_dtypes", printed(call)
    assert "autocast" in fault.fix.action


@pytest.mark.parametrize(
    "message",
    [
        "expected scalar type Half but found Float",
        "expected m1 and m2 to have the same dtype, but got: float != c10::Half",
        "index_add_(): self (Float) and source (Half) must have the same scalar type",
        "index_copy_(): self and source expected to have the same dtype, but got (self) Float and "
        "(source) Half",
        "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the "
        "same",
        "Found dtype Float but expected Half",
    ],
)
def test_the_words_of_operators_on_a_gpu(message: str) -> None:
    fault = of_failure(Failure("RuntimeError", message, ""))
    assert fault is not None and fault.kind == "mixed_dtypes"


def test_numpys_float64() -> None:
    fault = cause(lambda: linear(DOUBLE, FLOAT))
    assert fault is not None and fault.kind == "mixed_dtypes"
    assert "NumPy" in fault.title and "autocast" not in fault.fix.action


def test_other_types_and_devices_are_not_mixed_precision() -> None:
    for call, kind in (
        (lambda: linear(torch.int64, FLOAT), "whole_numbers"),
        (lambda: torch.nn.Embedding(3, 2)(torch.zeros(2)), "index_type"),
    ):
        fault = cause(call)
        assert fault is not None and fault.kind == kind
    devices = "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be"
    other = of_failure(Failure("RuntimeError", f"{devices} the same", ""))
    assert other is not None and other.kind == "two_devices"


def test_gradients_in_float16() -> None:
    fault = of_failure(Failure("ValueError", "Attempting to unscale FP16 gradients.", ""))
    assert fault is not None and fault.kind == "fp16_gradients" and "autocast" in fault.fix.action


# --- Memory -----------------------------------------------------------------------------------

FULL = (
    "CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 23.64 GiB of "
    "which 102.00 MiB is free. Process 7 has 23.53 GiB memory in use. Of the allocated memory "
    "{held} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If …"
)


def test_a_line_that_only_a_notebook_runs() -> None:
    fault = cause(lambda: eval("get_ipython().run_line_magic('matplotlib', 'inline')"))
    assert fault is not None and fault.kind == "notebook_line" and fault.kind in KINDS
    assert "delete the line" in fault.fixes[0].action


def test_out_of_gpu_memory() -> None:
    message = FULL.format(tried="2.00 GiB", held="22.80 GiB", unused="310.52 MiB")
    fault = of_failure(Failure("OutOfMemoryError", message, ""))
    assert fault is not None and fault.kind == "gpu_out_of_memory"
    assert fault.fix.action.startswith("a smaller batch") and "trainfit plan" in fault.fix.action
    message = FULL.format(tried="20.00 MiB", held="12.80 GiB", unused="9.10 GiB")
    fault = of_failure(Failure("OutOfMemoryError", message, ""))
    assert fault is not None and "fragmentation" in fault.title
    assert "expandable_segments" in fault.fix.action
    for words in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"):
        fault = of_failure(Failure("RuntimeError", words, ""))
        assert fault is not None and fault.kind == "gpu_out_of_memory"


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: np.empty(1 << 60, dtype=np.uint8),
        lambda: bytes(1 << 62),
    ],
)
def test_out_of_ram(call: Callable[[], Any]) -> None:
    fault = cause(call)
    assert fault is not None and fault.kind == "out_of_memory", printed(call)
    assert "RAM" in fault.title and "worker" not in fault.fix.action
    assert str(fault.place).startswith("tests/findings/")


def test_one_large_array_is_no_matter_of_how_many_workers() -> None:
    said = "Unable to allocate {} for an array with shape (5,) and data type float64"
    for amount, many in (("37.3 GiB", False), ("300. MiB", True)):
        message = (
            "Caught _ArrayMemoryError in DataLoader worker process 0.\nOriginal Traceback:\n"
            f"_ArrayMemoryError: {said.format(amount)}\n"
        )
        fault = of_failure(Failure("_ArrayMemoryError", message, message), LoaderSettings(2))
        assert fault is not None and fault.title.endswith(said.format(amount))
        assert ("fewer workers" in fault.fix.action) is many


def test_a_gpus_shared_memory_is_not_dev_shm() -> None:
    message = "out of resource: shared memory, Required: 147456, Hardware limit: 101376"
    assert of_failure(Failure("OutOfResources", message, "triton/compiler.py")) is None


# --- The GPU ----------------------------------------------------------------------------------


def test_a_device_side_assert_with_the_kernels_own_words() -> None:
    message = "CUDA error: device-side assert triggered\nCUDA kernel errors might be …"
    fault = of_failure(Failure("AcceleratorError", message, ""))
    assert fault is not None and fault.kind == "device_assert"
    assert "CUDA_LAUNCH_BLOCKING=1" in fault.fix.action and "classes - 1" in fault.fix.action
    said = "Loss.cu:250: nll_loss: block: [0,0,0] Assertion `t >= 0 && t < n_classes` failed."
    fault = of_failure(Failure("RuntimeError", message, ""), None, FailureContext(output=said))
    assert fault is not None and "`t >= 0 && t < n_classes`" in fault.title


def test_the_advice_at_the_end_of_every_error_of_cuda_is_no_assert() -> None:
    """As PyTorch 2.11 printed it on an H200."""
    message = (
        "CUDA error: initialization error\nSearch for `cudaErrorInitializationError' in https://…\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert of_failure(Failure("AcceleratorError", message, "")) is None
    illegal = message.replace("initialization error", "an illegal memory access was encountered")
    fault = of_failure(Failure("AcceleratorError", illegal, ""))
    assert fault is not None and fault.kind == "kernel_failed"


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        ("CUDA error: invalid device ordinal\nGPU device may be out of", "no_such_gpu", "ordinal"),
        (
            "Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1.",
            *("no_such_gpu", "(device 3)"),
        ),
        (
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            *("gpu_out_of_memory", "CUBLAS_STATUS_NOT_INITIALIZED"),
        ),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "kernel_failed", "CUDNN"),
        ("Duplicate GPU detected : rank 1 and rank 0", "gpu_of_two_ranks", "NCCL"),
        ("No backend type associated with device type cpu", "host_tensor_sent", "RAM"),
        (
            "output tensor size must be equal to world_size times input tensor size",
            "sizes_of_ranks",
            "number of ranks",
        ),
        ("Tensor's dim 0 does not divide equally across group size", "sizes_of_ranks", "ranks"),
        (
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], "
            "output_device None, and module parameters {device(type='cpu')}.",
            "wrapped_on_host",
            "CPU",
        ),
        (
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy",
            *("gpu_to_numpy", "NumPy"),
        ),
        ("CUDA error: operation not permitted when stream is capturing", "graph_capture", "graph"),
        ("CUDA error: uncorrectable ECC error encountered", "gpu_defect", "ECC"),
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            *("gpu_not_seen", "busy or unavailable"),
        ),
    ],
)
def test_errors_of_cuda_and_its_libraries(message: str, kind: str, says: str) -> None:
    fault = of_failure(Failure("RuntimeError", message, ""))
    assert fault is not None and fault.kind == kind and kind in KINDS
    assert says in fault.title and fault.fix.action


def test_the_gpu_in_the_main_process_is_not_the_data_sets() -> None:
    words = "CUDA error: initialization error"
    assert of_failure(Failure("RuntimeError", words, "")) is None
    inner = f'  File "data.py", line 3, in __getitem__\nRuntimeError: {words}'
    caught = f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\n{inner}"
    fault = of_failure(Failure("RuntimeError", caught, caught))
    assert fault is not None and fault.kind == "cuda_in_worker"


# --- A training's own code ----------------------------------------------------------------------


def without_graph() -> None:
    with torch.no_grad():
        loss = torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum()
    loss.backward()


def used_twice() -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


def changed_in_place() -> None:
    x = torch.ones(2, requires_grad=True).sigmoid()
    y = x.pow(2).sum()
    x += 1
    y.backward()


def activation_in_place() -> None:
    x = torch.ones(2, requires_grad=True).tanh()
    y = x.pow(2).sum()
    x += 1
    y.backward()


def weight_in_place() -> None:  # as a simulated run says it
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: [MetaFloatType [256, 1]], which is output 0 of T, is at version 1; expected "
        "version 0 instead."
    )


def mask_in_a_channel() -> None:
    masks = torch.zeros(2, 1, 3, 3, dtype=torch.long)
    functional.cross_entropy(torch.zeros(2, 4, 3, 3), masks)


def last_observation_by_its_old_name() -> None:
    infos: dict[str, int] = {"final_obs": 0}
    infos["final_observation"]


def stepped_between() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def one_sample() -> None:
    torch.nn.BatchNorm1d(3)(torch.ones(1, 3))


def a_label_too_many() -> None:
    functional.cross_entropy(torch.zeros(2, 10), torch.tensor([1, 10]))


def a_token_too_many() -> None:
    torch.nn.Embedding(10, 3)(torch.tensor([10]))


def no_image() -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.open(io.BytesIO(b"<html>404</html>"))


def names_of_a_wrapper() -> None:
    model = torch.nn.Linear(2, 2)
    model.load_state_dict({f"module.{name}": it for name, it in model.state_dict().items()})


def no_hub() -> None:  # as transformers/utils/hub.py raises it
    raise OSError("We couldn't connect to 'https://huggingface.co' to load the files, and …")


def no_server() -> None:
    """As an environment without a network has it; ``.invalid`` is no address anywhere."""
    urllib.request.urlopen("http://data.invalid/cora.tgz")


def gated() -> None:
    raise OSError("You are trying to access a gated repo.\nMake sure to have access to it at …")


def weights_with_others(folder: Path) -> None:
    torch.save({"accuracy": np.float64(0.5)}, folder / "last.pt")
    torch.load(folder / "last.pt")


def a_parameter_in_place() -> None:
    torch.ones(3, requires_grad=True).add_(1)


def several_losses() -> None:
    torch.ones(3, requires_grad=True).mul(2).backward()


def graph_to_numpy() -> None:
    torch.ones(3, requires_grad=True).numpy()


def classes_as_numbers() -> None:
    functional.cross_entropy(torch.zeros(4, 3), torch.zeros(4))


def classes_in_a_column() -> None:
    functional.cross_entropy(torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.long))


def other_numbers_than_classes() -> None:
    functional.binary_cross_entropy_with_logits(torch.zeros(4), torch.zeros(4, dtype=torch.long))


def targets_in_a_row() -> None:
    functional.binary_cross_entropy_with_logits(torch.zeros(4, 1), torch.zeros(4))


def samples_made_features() -> None:
    functional.cross_entropy(torch.zeros(8, 3), torch.zeros(4, dtype=torch.long))


def wider_than_the_layer() -> None:
    torch.nn.Linear(3, 2)(torch.zeros(4, 5))


def grey_image() -> None:
    torch.nn.Conv2d(3, 4, 3)(torch.zeros(2, 1, 8, 8))


def state_of_a_larger_batch() -> None:
    torch.nn.GRU(3, 4)(torch.zeros(2, 3, 3), torch.zeros(1, 5, 4))


def lengths_elsewhere() -> None:
    lengths = torch.tensor([3, 2], device="meta")
    torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(2, 3, 4), lengths, batch_first=True)


def optimizer_of_another_model() -> None:
    layer = torch.nn.Linear(3, 2)
    state = torch.optim.Adam(layer.parameters()).state_dict()
    torch.optim.Adam([layer.weight]).load_state_dict(state)


def tied_twice() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    torch.optim.Adam([{"params": [weight]}, {"params": [weight]}])


def plateau_without_metric() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step()  # type: ignore[call-arg]


def model_with_a_result() -> None:
    model = torch.nn.Linear(3, 2)
    model.kept = model(torch.zeros(1, 3))  # type: ignore[assignment]
    copy.deepcopy(model)


def flipped() -> None:
    torch.from_numpy(np.zeros((3, 3))[::-1])


def of_objects() -> None:
    torch.from_numpy(np.array(["a", None], dtype=object))


def without_torchrun() -> None:
    torch.distributed.barrier()


def head_of_other_classes() -> None:
    torch.nn.Linear(3, 2).load_state_dict(torch.nn.Linear(3, 4).state_dict())


def unnamed_columns() -> None:  # transformers/trainer.py
    raise ValueError("No columns in the dataset match the model's forward method signature: (x).")


def no_address() -> None:  # aiohttp/client_exceptions.py, of fsspec
    raise OSError("Cannot connect to host github.com:443 ssl:default [Name or service not known]")


def no_address_of_httpx() -> None:
    raise OSError("[Errno -2] Name or service not known")


def no_files() -> None:  # torchvision/datasets/voc.py
    raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")


def no_metadata() -> None:  # torchvision/datasets/cifar.py
    raise RuntimeError(
        "Dataset metadata file not found or corrupted. You can use download=True to download it"
    )


def other_head() -> None:  # transformers/modeling_utils.py
    raise RuntimeError(
        "You set `ignore_mismatched_sizes` to `False`, thus raising an error. For details look at "
        "the above report!"
    )


def no_classes() -> None:  # torchvision/datasets/folder.py
    raise FileNotFoundError("Couldn't find any class folder in images.")


def betas_of_two_types() -> None:  # torch/optim/adam.py
    raise ValueError("betas must be either both floats or both Tensors")


def no_padding() -> None:  # transformers/tokenization_utils_base.py
    raise ValueError("Asking to pad but the tokenizer does not have a padding token. Please …")


@pytest.mark.parametrize(
    ("call", "kind", "fix"),
    [
        (no_hub, "hub_unreachable", "hf download"),
        (no_server, "server_unreachable", "where there is a network"),
        (no_address, "server_unreachable", "where there is a network"),
        (no_address_of_httpx, "server_unreachable", "where there is a network"),
        (gated, "hub_refused", "hf auth login"),
        (no_files, "no_data_set", "VOCdevkit/VOC2012"),
        (no_metadata, "no_data_set", "VOCdevkit/VOC2012"),
        (other_head, "state_dict_sizes", "ignore_mismatched_sizes=True"),
        (no_classes, "no_data_set", "FOLDER/cat/1.jpg"),
        (no_padding, "no_padding_token", "tokenizer.eos_token"),
        (without_graph, "no_graph", "no_grad"),
        (used_twice, "graph_used_twice", "detach()"),
        (used_twice, "graph_used_twice", "log_prob and values of a rollout"),
        (betas_of_two_types, "optimizer_argument", "betas=(0.0, 0.9)"),
        (changed_in_place, "changed_in_place", "x = x + y"),
        (stepped_between, "changed_in_place", "optimizer.step() came between"),
        (weight_in_place, "changed_in_place", "what is carried from step to step"),
        (activation_in_place, "changed_in_place", "x = x + y"),
        (mask_in_a_channel, "target_type", "mask.squeeze(1)"),
        (last_observation_by_its_old_name, "outdated", 'infos["final_obs"]'),
        (one_sample, "batch_of_one", "drop_last=True"),
        (a_label_too_many, "label_out_of_range", "from 0"),
        (a_token_too_many, "index_out_of_range", "resize_token_embeddings"),
        (no_image, "unreadable_file", "leave it out"),
        (names_of_a_wrapper, "state_dict_names", "model.module.state_dict()"),
        (a_parameter_in_place, "leaf_in_place", "torch.no_grad()"),
        (several_losses, "loss_not_scalar", "loss.mean()"),
        (graph_to_numpy, "numpy_of_graph", "detach()"),
        (classes_as_numbers, "target_type", "y.long()"),
        (classes_in_a_column, "target_type", "y.squeeze(1)"),
        (other_numbers_than_classes, "target_type", "y.float()"),
        (targets_in_a_row, "target_shape", "unsqueeze(1)"),
        (samples_made_features, "batches_differ", "flatten(1)"),
        (wider_than_the_layer, "features_differ", "nn.LazyLinear"),
        (grey_image, "features_differ", 'convert("RGB")'),
        (state_of_a_larger_batch, "hidden_size", "drop_last=True"),
        (lengths_elsewhere, "lengths_on_gpu", "lengths.cpu()"),
        (optimizer_of_another_model, "optimizer_groups", "load the model alone"),
        (tied_twice, "parameter_twice", "shared weights"),
        (plateau_without_metric, "plateau_metric", "scheduler.step(validation_loss)"),
        (model_with_a_result, "copied_graph", "self.features"),
        (flipped, "negative_strides", "array.copy()"),
        (of_objects, "object_array", "np.float32"),
        (without_torchrun, "no_process_group", "torchrun"),
        (head_of_other_classes, "state_dict_sizes", "strict=False"),
        (unnamed_columns, "trainer_columns", "remove_unused_columns=False"),
    ],
)
def test_errors_of_a_training(call: Callable[[], Any], kind: str, fix: str) -> None:
    fault = cause(call)
    assert fault is not None and fault.kind == kind, printed(call)
    assert fix in fault.fix.action
    assert fault.place is not None and fault.place.file.endswith("test_failure.py")


def test_a_checkpoint_with_more_than_weights(tmp_path: Path) -> None:
    fault = cause(lambda: weights_with_others(tmp_path))
    assert fault is not None and fault.kind == "checkpoint_types"
    assert "weights_only=False" in fault.fix.action
    assert fault.place is not None and fault.place.file.endswith("test_failure.py")


def test_what_an_exception_was_raised_from() -> None:
    def imports() -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'Trainer'.") from error

    fault = cause(imports)
    assert fault is not None and fault.kind == "package_mismatch"

    def handles() -> None:
        try:
            used_twice()
        except RuntimeError:
            raise KeyError("another") from None

    assert cause(handles) is None


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("torch.nn.BCELoss are unsafe to autocast.\nMany models …", "unsafe_autocast"),
        ("No inf checks were recorded for this optimizer.", "scaler_unused"),
        ("Attempted step but _scale is None.  This may indicate …", "scaler_unused"),
        ("No inf checks were recorded prior to update.", "scaler_skipped"),
        (
            "unscale_() has already been called on this optimizer since the last update().",
            "scaler_order",
        ),
        (
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            "unused_parameters",
        ),
        ('expect_autograd_hooks_ INTERNAL ASSERT FAILED at "…"', "static_graph_unsynced"),
        ("Expected to mark a variable ready only once. This error …", "ready_twice"),
        (
            "Parameter 'shared.weight' is shared with a parameter already managed by another FSDP "
            "group. For shared/tied parameters, use fully_shard([module_a, module_b]) to place …",
            "tied_across_groups",
        ),
        (
            "aten._foreach_mul_.Scalar got mixed torch.Tensor and DTensor, need to convert all "
            "torch.Tensor to DTensor before calling distributed operators!",
            "partly_distributed",
        ),
        ("Cannot re-initialize CUDA in forked subprocess. To use …", "cuda_in_worker"),
        (
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
            "pins_gpu_tensor",
        ),
        (
            "Expected a 'cuda' device type for generator but found 'cpu'",
            "generator_device",
        ),
        ("optimizer got an empty parameter list", "no_parameters"),
        (
            "Tried to step 12 times. The specified number of total steps is 10",
            "schedule_over",
        ),
        (
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
            "and cpu!",
            "two_devices",
        ),
        (
            "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the "
            "same",
            "two_devices",
        ),
    ],
)
def test_errors_of_a_training_on_gpus(message: str, kind: str) -> None:
    fault = of_failure(Failure("RuntimeError", message, ""))
    assert fault is not None and fault.kind == kind and fault.kind in KINDS


@pytest.mark.parametrize(
    ("inside", "is_state"),
    [
        (("torch/optim/optimizer.py", "torch/optim/adam.py"), True),
        (("torch/optim/lbfgs.py", "/home/me/train.py", "torch/nn/functional.py"), False),
        (("torch/nn/functional.py",), False),
    ],
    ids=["in the step", "in its closure", "in the model"],
)
def test_an_optimizers_state_on_another_device(inside: tuple[str, ...], is_state: bool) -> None:
    paths = ["/home/me/train.py", *inside]
    paths = [path if path.startswith("/") else f"/lib/site-packages/{path}" for path in paths]
    lines = (f'  File "{path}", line 3, in step\n    step()\n' for path in paths)
    message = "Expected all tensors to be on the same device, but found at least two devices"
    trace = f"Traceback (most recent call last):\n{''.join(lines)}RuntimeError: {message}\n"
    fault = of_failure(Failure("RuntimeError", message, trace))
    assert fault is not None and fault.kind == "two_devices"
    assert ("load_state_dict" in fault.fix.action) == is_state


# --- Ports and processes ----------------------------------------------------------------------


def bound_twice() -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        second.bind(first.getsockname())


def test_fewer_shards_than_workers() -> None:
    said = "No samples found in dataset; perhaps you have fewer shards than workers."
    found = of_failure(Failure("ValueError", said, ""), LoaderSettings(8))
    assert found is not None and found.kind == "few_shards"
    assert bounds_of(found).workers == 4


def test_a_port_in_use() -> None:
    fault = cause(bound_twice)
    assert fault is not None and fault.kind == "port_in_use" and "torchrun" not in fault.fix.action


def test_a_port_of_ranks_in_use() -> None:
    def listens() -> None:
        with socket.socket() as first:
            first.bind(("0.0.0.0", 0))
            first.listen()
            torch.distributed.TCPStore("127.0.0.1", first.getsockname()[1], 1, is_master=True)

    fault = cause(listens)
    assert fault is not None and fault.kind == "port_in_use"
    assert "--standalone" in fault.fix.action and "port " in fault.title


def test_the_users_interrupt_of_a_worker_is_no_crash() -> None:
    message = "DataLoader worker (pid 7) is killed by signal: Interrupt. "
    assert of_failure(Failure("RuntimeError", message, message)) is None


# --- Data -------------------------------------------------------------------------------------


def test_collation_is_told_from_a_stack_of_the_models() -> None:
    def stacked() -> Any:
        return torch.stack([torch.zeros(1), torch.zeros(2)])

    assert cause(stacked) is None
    fault = cause(lambda: next(iter(DataLoader(Holding(None), 2))))
    assert fault is not None and fault.kind == "collate" and "collate_fn" in fault.fix.action
    pairs = [(torch.zeros(1), 0), None]  # its second sample could not be read
    fault = cause(lambda: next(iter(DataLoader(pairs, 2))))  # type: ignore[arg-type]
    assert fault is not None and fault.title == "The data set gives None for a sample"


def test_what_images_of_a_batch_differ_in() -> None:
    class Images(Dataset[Any]):
        def __init__(self, *shapes: tuple[int, ...]) -> None:
            self.shapes = shapes

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(self.shapes[index])

        def __len__(self) -> int:
            return len(self.shapes)

    grey = cause(lambda: next(iter(DataLoader(Images((3, 8, 8), (1, 8, 8)), 2))))
    sizes = cause(lambda: next(iter(DataLoader(Images((3, 8, 8), (1, 9, 8)), 2))))
    assert grey is not None and 'convert("RGB")' in grey.fix.action
    assert sizes is not None and "resize" in sizes.fix.action

    missing = cause(lambda: next(iter(DataLoader(Holding(lambda _: None), 2))))
    assert missing is not None and "None for a sample" in missing.title
    assert "if it is not None" in missing.fix.action


def first_batch(sample: Callable[[int], Any], **options: Any) -> Callable[[], Any]:
    return lambda: next(iter(DataLoader(Holding(sample), 2, **options)))


def test_none_for_a_sample_for_a_part_of_it_and_for_something_else() -> None:
    def collate(samples: list[Any]) -> Any:
        return [x for x, _ in samples]

    class Collator:
        words = None

        def collate(self, samples: list[Any]) -> Any:
            return [self.words[each] for each in samples]  # type: ignore[index]

    whole = cause(first_batch(lambda _: None, collate_fn=collate))
    part = cause(first_batch(lambda index: {"x": index, "y": None}))
    assert whole is not None and "None for a sample" in whole.title
    assert part is not None and "None for a part of a sample" in part.title
    assert cause(first_batch(lambda index: index, collate_fn=Collator().collate)) is None
    # A worker's exception is not collation's for being a worker's.
    inner = (
        "  File \"data.py\", line 3, in __getitem__\nTypeError: 'NoneType' object is not iterable"
    )
    caught = f"Caught TypeError in DataLoader worker process 0.\nOriginal Traceback:\n{inner}"
    assert of_failure(Failure("TypeError", caught, caught)) is None


def test_samples_with_other_keys_and_images_of_pil() -> None:
    keys = cause(first_batch(lambda index: {"x": 0} if index else {"x": 0, "weight": 1}))
    assert keys is not None and "'weight' is in the first and not in all" in keys.title
    image = PIL.Image.new("RGB", (2, 2))
    images = cause(first_batch(lambda _: image))
    assert images is not None and "ToTensor()" in images.fix.action
    assert cause(first_batch(lambda _: {}["weight"])) is None


def test_functions_that_a_loader_calls_with_one_argument() -> None:
    class Set(Holding):
        def joined(samples: list[Any]) -> Any:
            return samples

    def joins(samples: list[Any], size: int) -> Any:
        return samples

    data = Set(lambda index: index)
    own = cause(lambda: next(iter(DataLoader(data, 2, collate_fn=data.joined))))
    assert own is not None and own.fix.action.startswith("def joined(self, samples): ")
    free = cause(first_batch(lambda index: index, collate_fn=joins))
    assert free is not None and free.kind == "arguments"
    assert free.fix.action.startswith("def joins(samples): ") and "partial" in free.fix.action
    assert cause(first_batch(lambda index: int("1", 2, 3))) is None  # type: ignore[call-overload]


class Rows(Dataset[Any]):
    """Five rows, of which it says that there are more."""

    def __init__(self) -> None:
        self.rows = [[0] for _ in range(5)]
        self.array = np.zeros((5, 1))
        self.order = [9]

    def __len__(self) -> int:
        return 8


class OfList(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class OfArray(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.array[index])


class OfColumn(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.array[0, 1]


class OfPart(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index][1]


class OfOrder(Rows):
    def __getitem__(self, index: int) -> Any:
        index = self.order[0]
        return self.rows[index]


@pytest.mark.parametrize("data", [OfList, OfArray])
def test_a_data_set_that_is_shorter_than_it_says(data: type[Rows]) -> None:
    fault = cause(lambda: list(DataLoader(data(), 2)))
    assert fault is not None and fault.kind == "index_beyond_data"
    assert "__len__" in fault.fix.action and str(fault.place).startswith("tests/findings/")


@pytest.mark.parametrize("data", [OfColumn, OfPart, OfOrder])
def test_another_index_is_not_the_data_sets(data: type[Rows]) -> None:
    fault = cause(lambda: list(DataLoader(data(), 2)))
    assert fault is None or fault.kind != "index_beyond_data"


def test_indices_of_subsets_and_of_samplers() -> None:
    rows = OfList()
    inner = Subset(rows, [0, 1, 2])
    fault = cause(lambda: list(DataLoader(Subset(inner, [1, 3]), 2)))
    assert fault is not None and "Subset" in fault.title and fault.kind == "index_beyond_data"
    fault = cause(lambda: list(DataLoader(rows, 2, sampler=list(np.arange(4) / 1.0))))
    assert fault is not None and fault.kind == "index_type_of_data"
    assert "float64" in fault.title and "integers" in fault.fix.action
    fault = cause(lambda: list(DataLoader(rows, 2, sampler=[[0, 1]])))  # type: ignore[arg-type]
    assert fault is not None and "batch_sampler=" in fault.fix.action


@pytest.mark.parametrize(
    "call",
    [
        lambda: {}["a"],
        lambda: Path("/no/such/file").read_text(),
        lambda: int("x"),
        lambda: torch.zeros(2).no_such_name,
    ],
)
def test_what_is_not_known_is_not_explained(call: Callable[[], Any]) -> None:
    assert cause(call) is None


def test_what_a_script_printed_before_does_not_explain_another_exception() -> None:
    seen = FailureContext(output="warning: Too many open files\nNo space left on /dev/shm")
    assert of_failure(Failure("KeyError", "'a'", "KeyError: 'a'"), None, seen) is None


# --- Printed tracebacks -----------------------------------------------------------------------


def test_the_last_exception_of_a_chain_is_the_one() -> None:
    def chained() -> None:
        try:
            int("x")
        except ValueError as error:
            raise OSError(24, "Too many open files") from error

    assert exception_in(printed(chained)) == ("OSError", "[Errno 24] Too many open files")


def test_a_workers_chain_is_within_the_message() -> None:
    def sample(index: int) -> Any:
        try:
            return {}[index]
        except KeyError as error:
            raise RuntimeError("second") from error

    loader = DataLoader(Holding(sample), 2, num_workers=1, multiprocessing_context="fork")
    name, message = exception_in(printed(lambda: next(iter(loader))))
    assert name == "RuntimeError" and message.startswith("Caught RuntimeError in DataLoader worker")
    assert message.endswith("RuntimeError: second") and "KeyError" in message


def test_a_text_without_exception_has_none() -> None:
    assert exception_in("") == ("", "")
    assert of_exception("  nothing of that kind") is None


def test_handles_are_known_by_module_and_type() -> None:
    assert worker_start.library_of("h5py._hl.files", "File") == "h5py"
    assert worker_start.library_of("builtins", "Environment") == "lmdb"
    assert worker_start.library_of("h5py.h5t", "TypeID") == ""
    assert worker_start.library_of("zipfile", "ZipInfo") == ""
    assert worker_start.library_of("_io", "BytesIO") == ""


def test_a_whole_object_that_is_saved_in_a_simulated_run() -> None:
    """Of which the traceback ends with the script's line."""
    message = "Can't pickle local object 'Net.__init__.<locals>.<lambda>'"
    head = 'Traceback (most recent call last):\n  File "train.py", line 15, in fit\n    '
    for line, kind in (("torch.save(net, path)", "saved_whole"), ("pool.map(f, rows)", None)):
        text = f"{head}{line}\nAttributeError: {message}\n"
        fault = of_failure(Failure("AttributeError", message, text))
        assert (fault.kind if fault else None) == kind
