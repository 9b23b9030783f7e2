"""What a run of a script may be told, how far it has come, what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.decoding import Exchanged
from trainfit.results.runs.communication import Meeting
from trainfit.results.runs.learning import NOTHING_SEEN, LearningFacts
from trainfit.results.runs.operands import NO_CALL, FailedCall
from trainfit.results.runs.script import Protection, ScriptOption
from trainfit.results.runs.steps import Coverage, Framework

Status = Literal[
    "finished",  # the wanted number of optimizer steps was reached
    "ended",  # the script came to its end by itself
    "exited",  # the script called sys.exit with a code other than 0
    "failed",  # the script raised
    "out_of_memory",  # the simulated GPU was full
    "unsupported",  # an operator cannot be simulated
    "timeout",  # the time limit was reached
    "interrupted",  # the user ended it
    "died",  # the process ended without a word (killed, crashed)
]


@dataclasses.dataclass(frozen=True)
class Target:
    """What Python runs: a script file or a module (``-m``), and its own arguments.

    ``constants`` of the script get these values instead of their own
    (:mod:`trainfit.scripts.option_parsers`). ``terminal`` are lines and columns of the terminal
    that it would be started in (``None``: it would be in none). ``input_file`` is the file that is
    its standard input (empty: there is nothing to read).
    """

    kind: Literal["script", "module"]
    name: str
    args: tuple[str, ...]
    constants: Mapping[str, int] = dataclasses.field(default_factory=dict)
    terminal: tuple[int, int] | None = None
    input_file: str = ""


@dataclasses.dataclass(frozen=True)
class LoaderOverride:
    """The DataLoader constructed ``index``-th gets ``batch_size`` instead of its own."""

    index: int
    batch_size: int


@dataclasses.dataclass(frozen=True)
class LoaderCut:
    """The epochs of the DataLoader constructed ``index``-th, and of those made again of its data
    set by the same line or of its batch sampler, end after ``batches`` (``None``: none is the
    training's); those of all others after ``others``, the last of which is the largest batch of
    their data set, after a look of ``look_s`` seconds at its samples (0: it stays). After
    ``periodic`` steps, what the script does every so many steps happens once (0: it does not). The
    last batch of such an epoch has ``remainder`` samples (0: as many as all). ``goes_on``: the run
    does not end after the first evaluation. ``to_end``: nor does it before the script's end, to
    which it comes as its loops end after so many optimizer steps (``numbered``: once more with the
    number of their last round)."""

    index: int | None
    batches: int
    others: int
    look_s: float = 0.0
    periodic: int = 0
    remainder: int = 0
    goes_on: bool = False
    to_end: int = 0
    numbered: bool = False


@dataclasses.dataclass(frozen=True)
class SampleOverride:
    """The DataLoader constructed ``index``-th gives batches of these samples alone.

    First those of ``largest``, each the largest in something; then one sample, ``key``, repeated,
    but for one at the end that is ``padded`` to it (``None``: all are ``key``): where nothing is
    padded, libraries leave masks out. ``whole``: ``largest`` alone is the batch, whatever number of
    samples was asked for.
    """

    index: int
    key: int
    padded: int | None = None
    largest: tuple[int, ...] = ()
    whole: bool = False


#: What is a step of a run: an optimizer's, a call of the model (inference), or a backward pass
#: (training without an optimizer of PyTorch's).
Counted = Literal["steps", "calls", "backwards"]
#: Autocast forced from outside: off, on in the GPU's best half precision, or in this one
#: (which goes for the script's own regions too).
ForcedAmp = Literal["off", "on", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class InterventionRequest:
    """A change to make in the running script, by its name in :mod:`trainfit.simgpu.interventions`.

    ``targets`` are what a survey found that it applies to: paths of modules, a number.
    """

    name: str
    targets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SampleScan:
    """How many elements (numbers, letters) the samples of a data set have.

    ``looked_at`` of ``samples`` were looked at (``None``: not known how many there are).
    ``varying`` are the parts of a sample that differ in size and make batches differ (none: no part
    does); the elements are of these. ``typical`` and ``longest`` are the indices of the median
    sample and of the largest one, ``largest`` those of samples that are each the largest in a part
    or a dimension, or, of a sampler whose batches have different numbers of samples (``whole``), of
    its largest batch. ``padded`` is that of the sample to whose size a usual batch is padded
    (``None``: batches are not padded); ``dense`` then has the average size of the samples in the
    densest batch (``None``: that may be all of the longest). ``is_stacked``: the samples of a batch
    have to be of one size. ``reason`` says why none were looked at.
    """

    looked_at: int = 0
    samples: int | None = None
    typical: int = 0
    longest: int = 0
    typical_elements: int = 0
    longest_elements: int = 0
    padded: int | None = None
    padded_elements: int = 0
    reason: str = ""
    varying: tuple[str, ...] = ()
    largest: tuple[int, ...] = ()
    whole: bool = False
    dense: int | None = None
    is_stacked: bool = False

    @property
    def tells_all(self) -> bool:
        """Can no sample be of another size than those that were looked at?"""
        return self.is_stacked or self.looked_at == self.samples

    def largest_batch(self, index: int) -> SampleOverride:
        """The largest batch of the DataLoader constructed ``index``-th, whose samples vary: those
        that are the largest in something, filled up with the longest of all; where batches are not
        padded, with what has the average size of the densest batch."""
        if self.whole:
            return SampleOverride(index, self.longest, None, self.largest, whole=True)
        fill = self.longest if self.dense is None else self.dense
        shorter = None if self.padded is None else self.typical
        return SampleOverride(index, fill, shorter, () if self.largest == (fill,) else self.largest)


@dataclasses.dataclass(frozen=True)
class CallSite:
    """A line of the user's, ``place`` ("file:line"), with what it calls: the name and the
    parameters of the function (of a class: its own, without ``self``). Without a place it is the
    class of an object whose method is called, made anywhere."""

    place: str
    called: str = ""
    parameters: tuple[str, ...] = ()


#: A sampler that draws so many times what the data set has ends by other means than its length.
_ENDLESS: Final = 100


@dataclasses.dataclass(frozen=True)
class LoaderInfo:
    """The DataLoader that fed the first step.

    ``index`` is its place in the order of construction, ``None`` where it could not be told.
    ``samples`` is the number of its sampler's (``None``: unknown), ``data_set`` that of its data
    set, which a sampler with replacement may draw from for ever; ``batches`` how many
    batches it gave during the run, ``where`` the line that made it. ``fed`` are the samples of the
    first of them; ``varies`` says that those of them that are as large as the first differ in
    other dimensions (padding, crops). ``scan`` is a look at its samples (``None``: it was not asked
    for, or the DataLoader was gone by then). ``drops_last``: an epoch ends with its last full
    batch. ``sites`` are the user's calls that it was made in, the innermost first. Of a run without
    an optimizer step it may be the loader
    that gave none: its data set has less than one batch. Batches have multiples of ``group``
    samples: as many times the sampler gives each in a row (completions of a prompt).
    """

    index: int | None
    batch_size: int | None
    samples: int | None
    batches: int
    settings: LoaderSettings
    dataset: str
    where: str | None
    fed: tuple[int, ...] = ()
    varies: bool = False
    scan: SampleScan | None = None
    drops_last: bool = False
    sites: tuple[CallSite, ...] = ()
    data_set: int | None = None
    group: int = 1

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an epoch: the sampler's, but for one that draws without an end."""
        if not self.samples or not self.data_set or self.samples < _ENDLESS * self.data_set:
            return self.samples
        return self.data_set


@dataclasses.dataclass(frozen=True)
class Applicability:
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
    """The work of one optimizer step, a typical one of a run after its first.

    ``flops`` are those of matmuls, convolutions, attention and recurrent networks
    (:mod:`trainfit.simgpu.operators.flops`); ``traffic_bytes`` what all operators read and
    write, if nothing stays in a cache; ``operators`` how many ran.

    The others serve a lower bound of the step's time. ``flops_of`` are the same FLOPs by
    "KIND/DTYPE": kind "matmul", "convolution" or "attention"; dtype that of the operands,
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
class StepFeed:
    """What a run saw of a training step.

    ``batches`` are the samples of each batch that the feeding DataLoader gave (``None``: not
    known how many), without those fetched while gradients were disabled. ``calls`` counts calls
    of the model that a backward pass followed, ``call_samples`` is the first dimension of what
    they were given (the most frequent; ``None``: no tensor was), ``call_rows`` the sum of all.
    ``backwards`` counts backward passes. ``others``: several steps of optimizers were made, and the
    model was called in between. ``rounds`` are the steps of optimizers that batches were fetched
    for: five of a WGAN's critic. ``is_same``: the model's one call was given the tensors
    of the step before, unchanged. ``is_given_again``: the loader gave a batch of text or numbers
    once more, unchanged, as one does whose batches are kept and trained on in parts. ``loaders``
    are the DataLoaders of which the model was called with a batch each, which ``batches`` are then.
    """

    batches: tuple[int | None, ...] = ()
    calls: int = 0
    call_samples: int | None = None
    backwards: int = 0
    others: bool = False
    rounds: int = 1
    call_rows: int | None = None
    is_same: bool = False
    is_given_again: bool = False
    loaders: int = 1


@dataclasses.dataclass(frozen=True)
class AmpSeen:
    """What a run showed that matters to mixed precision; places are the user's ("file:line").

    ``scaled``: a gradient scaler was at work (PyTorch's, which Accelerate, Lightning and
    Transformers use too); ``scaler_at`` is where the first was made, also one that is switched off.
    ``forward_at`` is the line that called the model with gradients enabled; ``framework`` the
    library that did so, or that was told the precision by ``framework_at``.
    ``functions`` are classes of ``torch.autograd.Function`` that ran under autocast without
    ``custom_fwd``, ``operators`` custom operators that ran there without a rule of their own, each
    with its place. ``fsdp`` is the half precision to which FSDP casts the parameters for the
    forward and the backward pass (empty: it casts none).
    """

    scaled: bool = False
    scaler_at: str | None = None
    forward_at: str | None = None
    framework: Framework = ""
    framework_at: str | None = None
    functions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    operators: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fsdp: str = ""


@dataclasses.dataclass(frozen=True)
class ContextSeen:
    """The ``longest`` sequence of token ids that a model was given, and the ``positions`` that the
    models are made for, by their configuration; ``None``: none was seen, they do not say."""

    longest: int | None = None
    positions: int | None = None

    @property
    def too_long(self) -> bool:
        """Was a model given more than it is made for?"""
        return bool(self.longest and self.positions and self.longest > self.positions)

    def warning(self) -> str:
        """A sentence that the context was seen; empty where it was not."""
        if not self.too_long:
            return ""
        return (
            f"sequences of {self.longest:,} tokens are longer than the {self.positions:,} "
            "positions that the model is made for: learned positions raise an error on the GPU, "
            f"rotary ones were not trained that far; cut them to {self.positions:,}"
        )


@dataclasses.dataclass(frozen=True)
class OwnFault:
    """A failure of trainfit's own code: the exception in a line, our file and line, and the whole
    traceback."""

    error: str
    place: str
    traceback: str


@dataclasses.dataclass(frozen=True)
class FailedRequest:
    """Memory that an operator asked the simulated GPU for in vain, and the tensors that it got:
    their shapes, and the bytes that they are kept in."""

    operator: str
    nbytes: int
    inputs: tuple[str, ...] = ()
    input_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class ScriptOutcome(Exchanged):
    """What became of a run of a script, simulated or real.

    Attributes:
        steps: that it made.
        seconds: that it took, without those for which others had the machine's cores.
        message: for people.
        traceback: the script's own.
        location: the script's line ("file:line").
        own_fault: the failure is trainfit's (``None``: it is not).
        stacks: of its threads and workers at the time limit, as ``faulthandler`` writes them.
        request: what the simulated GPU had no memory for.
        call: what the call was given that raised an exception.
    """

    status: Status
    steps: int = 0
    seconds: float = 0.0
    message: str = ""
    traceback: str = ""
    location: str | None = None
    own_fault: OwnFault | None = None
    stacks: str = ""
    request: FailedRequest | None = None
    call: FailedCall = NO_CALL


@dataclasses.dataclass(frozen=True)
class TraceOutcome(ScriptOutcome):
    """What became of a simulated run.

    ``autocast`` is the dtype of autocast regions on the GPU, ``None`` where there were none;
    ``autocast_at`` the user's line ("file:line") that made the first.
    ``accelerate`` is the mixed precision ("no", "bf16", "fp16", …) that Accelerate took from the
    environment, ``None`` where it made none or was told by the script.
    ``protection`` is what kept it from changing files (``None``: not told).
    ``peak_ram_bytes`` is the most RAM that its process held (0: not known), ``sample_s`` the
    seconds that fetching a sample took a worker, or the script itself (``None``: not known).
    ``periodic`` are lines of what was done before its time, as it comes every so many steps;
    ``later`` is the first of them that comes with a later epoch.
    ``findings`` are a survey's; ``changed`` says how many things each intervention changed.
    ``feeds`` has what each optimizer step was made of (none where calls are counted),
    ``coverage`` what else was simulated. ``options`` are those of the script's command line, as the
    parser knows them that read it. ``amp`` is what matters to mixed precision, ``learning`` what
    spoils it. ``context`` are the sequences that the models were given. ``absent`` are packages
    with a stand-in that the script looked for and that are not installed, ``imported`` those of
    them that it imports where they are. ``meetings`` are the first things that it did with other
    ranks. ``files`` are the user's own that it imported. ``saves`` are files of checkpoints, each
    with the user's line that wrote it.
    """

    loader: LoaderInfo | None = None
    loaders: int = 0
    autocast: str | None = None
    gpu_operators: int = 0
    module_calls: int = 0
    optimizers: int = 0
    forward: ForwardCalls = ForwardCalls()
    compute: Compute | None = None
    findings: tuple[Applicability, ...] = ()
    changed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    accelerate: str | None = None
    protection: Protection | None = None
    feeds: tuple[StepFeed, ...] = ()
    autocast_at: str | None = None
    coverage: Coverage | None = None
    peak_ram_bytes: int = 0
    sample_s: float | None = None
    options: tuple[ScriptOption, ...] = ()
    amp: AmpSeen = AmpSeen()
    learning: LearningFacts = NOTHING_SEEN
    context: ContextSeen = ContextSeen()
    periodic: tuple[str, ...] = ()
    later: str | None = None
    absent: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    files: tuple[str, ...] = ()
    saves: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def half(self) -> str | None:
        """The half precision that the model computes in: autocast's, or else FSDP's."""
        return self.autocast or self.amp.fsdp or None


# ---
# How far a simulated run has come, as its process tells the one that waits for it.


#: Its file, next to the run's outcome.
STATUS_FILE = "status.json"
#: What was recorded by the second step, or soon after it, there too.
EARLY_FILE = "early.trainfit"
#: Folders, there too, of values that it sent to other ranks, and of those that came to it.
SENT_FOLDER, CAME_FOLDER = "sent", "came"
#: The file, there too, that names what it waits for.
WAITS_FILE = "waits"
#: How the message of a rank begins that waits for what never comes.
WAITS_IN_VAIN = "PeerIsGone"
#: The file, there too, that asks the process to end and to tell what it has by then.
INTERRUPT_FILE = "interrupt"


@dataclasses.dataclass(frozen=True)
class RunStatus(Exchanged):
    """A run after ``steps`` optimizer steps (or calls of a model that is not trained).

    It ends after ``least`` to ``most`` of them. ``seconds`` have passed since the script began,
    ``loading_s`` of them in its own DataLoader.
    """

    steps: int
    least: int
    most: int
    seconds: float
    loading_s: float

    @property
    def loading_share(self) -> float:
        """The share of the time that the script waited for its DataLoader, 0 to 1."""
        return min(self.loading_s / self.seconds, 1.0) if self.seconds > 0 else 0.0
