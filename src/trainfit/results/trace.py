"""What is asked of a simulated run of a user's script, and what became of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from trainfit.results.constants import DeviceConstants
from trainfit.results.decoding import decode
from trainfit.results.exchange import as_json, write_whole

Status = Literal[
    "finished",  # the wanted number of optimizer steps was reached
    "ended",  # the script came to its end by itself
    "exited",  # the script called sys.exit with a code other than 0
    "failed",  # the script raised
    "out_of_memory",  # the simulated GPU was full
    "unsupported",  # an operator cannot be simulated
    "timeout",  # the time limit was reached
    "died",  # the process ended without a word (killed, crashed)
]


@dataclasses.dataclass(frozen=True)
class Target:
    """What Python runs: a script file or a module (``-m``), and its own arguments."""

    kind: Literal["script", "module"]
    name: str
    args: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoaderOverride:
    """The DataLoader constructed ``index``-th gets ``batch_size`` instead of its own."""

    index: int
    batch_size: int


#: Autocast forced from outside: off, on in the GPU's best half precision, or in this one.
ForcedAmp = Literal["off", "on", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class InterventionRequest:
    """A change to make in the running script, by its name in :mod:`trainfit.simgpu.interventions`.

    ``targets`` are what a survey found that it applies to: paths of modules, a number.
    """

    name: str
    targets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """One simulated run.

    ``recording`` and ``outcome`` are the files to write. ``gpu_memory_bytes`` overrides the
    catalogue's figure (with a measured one); ``limited`` makes it the capacity. ``amp``
    forces autocast. ``survey`` asks which interventions would apply. ``count`` says what
    ``steps`` are: steps of the optimizer, or calls of the model where none is trained.
    With ``until_settled`` the run ends before ``steps`` are done
    if memory has settled by then, or grows by the same with each step.
    ``constants`` are what the process takes besides (``None``: the catalogue's);
    ``command`` is the launch command, for the recording's header.
    """

    target: Target
    gpu: str
    steps: int
    recording: str
    outcome: str
    limited: bool = False
    gpu_memory_bytes: int | None = None
    loader: LoaderOverride | None = None
    amp: ForcedAmp | None = None
    interventions: tuple[InterventionRequest, ...] = ()
    survey: bool = False
    count: Literal["steps", "calls"] = "steps"
    time_limit_s: float = 600.0
    until_settled: bool = False
    constants: DeviceConstants | None = None
    command: str = ""

    def to_json(self) -> str:
        return as_json(self)

    @classmethod
    def from_json(cls, text: str) -> TraceRequest:
        return decode(cls, json.loads(text))


@dataclasses.dataclass(frozen=True)
class LoaderInfo:
    """The DataLoader that fed the first step.

    ``index`` is its place in the order of construction, ``None`` where it could not be told.
    ``samples`` is the number of its sampler's (``None``: unknown), ``batches`` how many
    batches it gave during the run, ``where`` the line that made it.
    """

    index: int | None
    batch_size: int | None
    samples: int | None
    batches: int
    num_workers: int
    dataset: str
    where: str | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """Whether an intervention applies to a script, as a survey saw it.

    ``reason`` says why it does not. ``targets`` are for the trial's request. ``places`` are
    lines of the user's code to change ("file:line"), ``detail`` says in words what was found.
    ``allocations`` are numbers of the recording's allocations that would not be made, where
    the change cannot be tried.
    """

    name: str
    applies: bool
    reason: str = ""
    targets: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    detail: str = ""
    allocations: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compute:
    """The work of one optimizer step, the last one of a run.

    ``flops`` are those of matrix products, convolutions, attention and recurrent networks
    (:mod:`trainfit.simgpu.operator_flops`); ``traffic_bytes`` what all operators read and write, if
    nothing stays in a cache; ``operators`` how many ran.

    The others serve a lower bound of the step's time. ``flops_of`` are the same FLOPs by
    "KIND/DTYPE": kind "product", "convolution" or "attention"; dtype that of the operands,
    "tfloat32" for float32 that may be rounded to it. ``kernels`` are operators that cannot
    but launch one. ``moved_bytes`` must pass the GPU's memory in others than those with FLOPs
    although its L2 cache keeps what it can. ``compiled``: the script calls ``torch.compile``,
    which was left out.
    """

    flops: int
    traffic_bytes: int
    operators: int
    flops_of: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kernels: int = 0
    moved_bytes: int = 0
    compiled: bool = False


@dataclasses.dataclass(frozen=True)
class ForwardCalls:
    """Calls of models (outermost modules with parameters): all, those with gradients enabled."""

    calls: int = 0
    with_grad: int = 0


@dataclasses.dataclass(frozen=True)
class TraceOutcome:
    """What became of a simulated run.

    ``autocast`` is the dtype of autocast regions on the GPU, ``None`` where there were none.
    ``message`` is for people; ``traceback`` is the script's own, ``location`` its line.
    ``accelerate`` is the mixed precision ("no", "bf16", "fp16", …) that Accelerate took from the
    environment, ``None`` where it made none or was told by the script.
    ``findings`` are a survey's; ``changed`` says how many things each intervention changed.
    """

    status: Status
    steps: int
    seconds: float
    message: str = ""
    traceback: str = ""
    location: str | None = None
    loader: LoaderInfo | None = None
    loaders: int = 0
    autocast: str | None = None
    gpu_operators: int = 0
    module_calls: int = 0
    optimizers: int = 0
    forward: ForwardCalls = ForwardCalls()
    compute: Compute | None = None
    findings: tuple[Finding, ...] = ()
    changed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    accelerate: str | None = None

    def save(self, path: Path) -> None:
        """Write the outcome; the file appears whole or not at all."""
        write_whole(path, as_json(self))

    @classmethod
    def load(cls, path: Path) -> TraceOutcome:
        return decode(cls, json.loads(path.read_text()))
