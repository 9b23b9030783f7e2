"""Abstract values of expressions: the lattice and its facts.

A value is described only where the reading is certain; everything else is :data:`UNKNOWN`, about
which no rule says anything.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from typing import Final, Literal

Kind = Literal[
    "unknown",
    "module",  # an nn.Module: a network, a layer or a loss
    "optimizer",
    "scheduler",
    "scaler",
    "loader",  # a DataLoader; iterating it gives a batch
    "dataset",
    "batch",  # what a loader gives: a tensor or a structure of tensors
    "output",  # what a module gives: a tensor or a structure of tensors
    "tensor",
    "array",  # NumPy's
    "number",
    "text",
    "device",  # a torch.device, or its name
    "tuple",
    "list",
    "function",
]
Place = Literal["", "host", "device"]


@dataclasses.dataclass(frozen=True)
class Value:
    """``graph``: it certainly holds an autograd graph; ``place``: where its memory is, if known.

    ``items`` are a tuple's or list's; ``loaders`` the DataLoader calls that a loader or batch is
    certainly from, all of them; ``call`` is the expression that made a data set or module.
    """

    kind: Kind = "unknown"
    graph: bool = False
    place: Place = ""
    items: tuple[Value, ...] = ()
    loaders: frozenset[ast.Call] = frozenset()
    call: ast.AST | None = None

    @property
    def is_unknown(self) -> bool:
        """Is nothing certain?"""
        return self.kind == "unknown" and not self.place

    @property
    def is_tensors(self) -> bool:
        """Is it a tensor or a structure of tensors?"""
        return self.kind in {"tensor", "output", "batch"}


UNKNOWN: Final = Value()
NUMBER: Final = Value("number")
#: Deeper nested tuples and lists are not followed.
_DEPTH: Final = 4


def joined(one: Value, other: Value, depth: int = 0) -> Value:
    """What is certain of a value that is one or the other."""
    if one is other or one == other:
        return one
    if one.kind != other.kind:
        if one.is_tensors and other.is_tensors:
            return dataclasses.replace(_both(one, other), kind="output")
        return Value(place=one.place if one.place == other.place else "")
    items: tuple[Value, ...] = ()
    if depth < _DEPTH and len(one.items) == len(other.items):
        items = tuple(joined(a, b, depth + 1) for a, b in zip(one.items, other.items, strict=True))
    return dataclasses.replace(_both(one, other), items=items)


def join_all(values: Iterable[Value]) -> Value:
    """What is certain of a value that is any of these; nothing is certain of none."""
    result: Value | None = None
    for value in values:
        result = value if result is None else joined(result, value)
    return UNKNOWN if result is None else result


def element(value: Value) -> Value:
    """What iterating over or indexing a value gives."""
    if value.kind == "loader":
        return Value("batch", place="host", loaders=value.loaders)
    if value.is_tensors:
        return value
    if value.kind in {"list", "tuple"}:
        return join_all(value.items)
    return UNKNOWN


def unpacked(value: Value, count: int) -> list[Value]:
    """The parts of a value that is assigned to ``count`` targets."""
    if value.kind == "tuple" and len(value.items) == count:
        return list(value.items)
    return [element(value)] * count


def shallow(value: Value, depth: int = 0) -> Value:
    """A value whose nesting is cut, so that wrapping it again in every pass of a loop ends."""
    if not value.items:
        return value
    if depth >= _DEPTH or len(value.items) > 64:
        return dataclasses.replace(value, items=())
    return dataclasses.replace(value, items=tuple(shallow(each, depth + 1) for each in value.items))


def _both(one: Value, other: Value) -> Value:
    loaders = one.loaders | other.loaders if one.loaders and other.loaders else frozenset()
    return Value(
        one.kind,
        one.graph and other.graph,
        one.place if one.place == other.place else "",
        (),
        loaders,
        one.call if one.call is other.call else None,
    )


# ---
# Names of PyTorch's functions that the reading of scripts uses.


def words(text: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(text.split())


#: Functions of `torch` whose result is one tensor.
TENSOR_FUNCTIONS: Final = frozenset(
    f"torch.{name}"
    for name in words(
        "abs add addmm allclose amax amin arange argmax argmin argsort as_tensor atan2 bmm "
        "cat ceil chunk clamp clip clone concat cos cosine_similarity cumsum diag div dot "
        "einsum empty empty_like eq exp eye flatten flip floor from_numpy full full_like "
        "gather ge gt index_select isfinite isinf isnan le linspace log log_softmax "
        "logical_and logical_not logical_or logsumexp lt masked_fill masked_select matmul "
        "maximum mean minimum mm mul multinomial ne neg norm normal ones ones_like outer "
        "permute pow rand rand_like randint randn randn_like randperm relu repeat_interleave "
        "reshape round rsqrt scatter sigmoid sign sin softmax sqrt square squeeze stack std "
        "sub sum swapaxes tanh tensor tile transpose tril triu unsqueeze var vstack hstack "
        "where zeros zeros_like "
    )
) - {"torch.allclose", "torch.chunk"}

#: Those of them that make a new tensor, on the host unless `device=` says otherwise.
FACTORIES: Final = frozenset(
    f"torch.{name}"
    for name in words(
        "arange as_tensor empty eye from_numpy full linspace normal ones rand randint randn "
        "randperm tensor zeros "
    )
)

#: Methods of a tensor whose result is a tensor of the same place.
TENSOR_METHODS: Final = words(
    "abs add add_ all amax amin any argmax argmin argsort bool byte ceil clamp clamp_ clip "
    "clone contiguous cos cumsum detach detach_ diag div div_ double eq exp expand expand_as "
    "flatten float floor ge gt half int bfloat16 isnan le log logical_not long lt masked_fill "
    "mean mm mul mul_ ne neg norm permute pow prod relu repeat requires_grad_ reshape round "
    "sigmoid sin softmax sqrt square squeeze std sub sub_ sum t tanh transpose type_as "
    "unsqueeze var view view_as zero_ fill_ log_softmax matmul new_zeros new_ones flip roll "
    "index_select gather"
)

#: Those whose result has no graph: integers, booleans, cuts.
GRAPHLESS_METHODS: Final = words(
    "all any argmax argmin argsort bool byte detach detach_ eq ge gt int isnan le logical_not "
    "long lt ne new_zeros new_ones"
)
GRAPHLESS_FUNCTIONS: Final = FACTORIES | frozenset(
    f"torch.{name}"
    for name in words(
        "argmax argmin argsort eq ge gt isfinite isinf isnan le logical_and logical_not logical_or "
        "lt ne ones_like zeros_like rand_like randn_like full_like empty_like"
    )
)

#: Attributes of a tensor that are figures on the host: reading them waits for nothing.
FIGURES: Final = words(
    "shape size dim ndim numel dtype device is_cuda requires_grad grad_fn layout nelement "
    "element_size stride names is_contiguous data_ptr"
)

#: Methods of an nn.Module that give the module back.
SELF_METHODS: Final = words(
    "to cuda cpu half float double bfloat16 train eval requires_grad_ apply compile to_empty"
)

#: Wrappers that give a module for a module (first argument).
WRAPPERS: Final = frozenset(
    {
        "torch.compile",
        "torch.nn.DataParallel",
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "torch.jit.script",
    }
)

NO_GRAD: Final = frozenset({"torch.no_grad", "torch.inference_mode"})

#: Contexts and decorators that leave the recording of gradients as it is.
HARMLESS_CONTEXTS: Final = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.cuda.amp.custom_",
    "torch.amp.custom_",
    "torch.cuda.device",
    "torch.cuda.stream",
    "torch.cuda.nvtx.",
    "torch.profiler.",
    "torch.autograd.profiler.",
    "torch.autograd.detect_anomaly",
    "torch.autograd.set_detect_anomaly",
    "torch.compile",
    "torch.nn.attention.sdpa_kernel",
    "contextlib.nullcontext",
    "contextlib.suppress",
    "tqdm.",
    "functools.",
    "warnings.",
    "typing.",
    "concurrent.",
    "time.",
)
HARMLESS_NAMES: Final = frozenset({"open", "staticmethod", "classmethod", "property", "tqdm"})

#: Libraries that set devices, precision and gradients themselves.
MANAGERS: Final = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Fabric",
    "deepspeed": "DeepSpeed",
    "trl": "TRL",
    "fastai": "fastai",
    "ignite": "Ignite",
    "composer": "Composer",
    "colossalai": "ColossalAI",
    "catalyst": "Catalyst",
    "keras": "Keras",
    "torchtnt": "TorchTNT",
    "skorch": "skorch",
    "mmengine": "MMEngine",
    "detectron2": "Detectron2",
    "ray": "Ray",
    "apex": "Apex",
}

#: Other packages that do not train by themselves and leave autocast alone.
PLAIN: Final = words(
    "torch torchvision torchaudio torchtext torchdata torchmetrics numpy scipy pandas sklearn "
    "PIL cv2 matplotlib seaborn tqdm wandb tensorboard tensorboardX yaml h5py einops timm av "
    "imageio skimage albumentations psutil rich click omegaconf hydra fire absl requests "
    "IPython numba datasets tokenizers sentencepiece pyarrow zarr gym gymnasium mlflow "
    "packaging six attr attrs pydantic typing_extensions safetensors huggingface_hub plotly "
    "natsort joblib transformers lmdb msgpack soundfile librosa nltk spacy regex termcolor "
    "tabulate prettytable torchinfo torchsummary thop fvcore setproctitle pynvml dotenv tyro "
    "draccus"
)
