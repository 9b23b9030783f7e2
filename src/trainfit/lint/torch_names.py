"""Names of PyTorch's functions that the reading of scripts uses."""

from __future__ import annotations

from typing import Final


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
