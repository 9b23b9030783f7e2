"""One simulation: installs the device, runs, records, and puts PyTorch back."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from torch.optim import optimizer as optim

from trainfit.hardware import GpuSpec, device_constants
from trainfit.hardware.gpu_topology import find_gpus
from trainfit.results.gpus import DeviceConstants, total
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.step_cycle import StepCycle
from trainfit.results.runs.steps import WaitKind
from trainfit.simgpu import cuda_module, torch_patches
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.settings import VARIABLE, AllocatorSettings, unread_variables
from trainfit.simgpu.communication import one_process
from trainfit.simgpu.communication.one_process import OneProcess
from trainfit.simgpu.communication.peers import Peers
from trainfit.simgpu.communication.process_groups import Collectives
from trainfit.simgpu.cuda_clocks import ScriptTime, clock_of
from trainfit.simgpu.cuda_graphs import Graphs, event_class
from trainfit.simgpu.cuda_module import Surface
from trainfit.simgpu.device import device_names, gradient_sums, host_fills, subclasses
from trainfit.simgpu.device import tensor as checkpoints
from trainfit.simgpu.device.device_memory import DeviceMemory
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.errors import visible_gpus
from trainfit.simgpu.device.modes import Modes
from trainfit.simgpu.device.ownership import ModuleTracker, Ownership
from trainfit.simgpu.device.recorder import RecordingBuilder
from trainfit.simgpu.device.settling import StepUse
from trainfit.simgpu.device.tensor import set_engine
from trainfit.simgpu.operators import compilation, sparse, torchvision_operators
from trainfit.simgpu.operators import convolution as kernels_convolution  # noqa: F401  (registers)
from trainfit.simgpu.operators import data_dependent as _data  # noqa: F401  (registers)
from trainfit.simgpu.operators import host_side as _host_side  # noqa: F401  (registers)
from trainfit.simgpu.operators import matmul as kernels_products  # noqa: F401  (registers)
from trainfit.simgpu.operators import reductions as _reductions  # noqa: F401  (registers)
from trainfit.simgpu.operators import scratch as _scratch  # noqa: F401  (registers)
from trainfit.simgpu.operators.autocast import Autocast
from trainfit.simgpu.operators.compilation import Compilation
from trainfit.simgpu.operators.launch_log import KernelLog
from trainfit.simgpu.operators.overrides import Overrides
from trainfit.simgpu.operators.triton_kernels import TritonKernels
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.stand_ins import deepspeed, quanto
from trainfit.simgpu.stand_ins.absent import AbsentPackage, AbsentPackages
from trainfit.simgpu.stand_ins.bitsandbytes import BitsAndBytes
from trainfit.simgpu.stand_ins.disk_offload import DiskOffload
from trainfit.simgpu.stand_ins.flash_attention import FLASH_ATTN
from trainfit.simgpu.stand_ins.selective_scan import CAUSAL_CONV1D
from trainfit.simgpu.stand_ins.state_space_dual import MAMBA_SSM
from trainfit.simgpu.stand_ins.triton_language import TRITON
from trainfit.simgpu.stand_ins.xformers import XFORMERS
from trainfit.torch_private import compiled
from trainfit.torch_private.cuda import initialize_anew, missing_functions
from trainfit.torch_private.needed import MissingNameError
from trainfit.torch_private.operators import lift_cpu_only, lifts_cpu_only, local_part

#: The packages that there are stand-ins for, by the name that is imported.
STAND_INS: Final[dict[str, AbsentPackage]] = {
    "causal_conv1d": CAUSAL_CONV1D,
    "flash_attn": FLASH_ATTN,
    "mamba_ssm": MAMBA_SSM,
    "triton": TRITON,
    "xformers": XFORMERS,
}

_F = TypeVar("_F", bound=Callable[..., Any])
_active: Simulation | None = None

#: Capacity that no job reaches: what a recording for planning is made at, so that a job
#: that does not fit can still be measured.
UNLIMITED = 1 << 50
#: Numbers of an optimizer on the CPU, whose step's time is worth a word: a millisecond of a core's
#: (Adam reads and writes 28 bytes for each, and a core some 20 GB a second).
_MANY: Final = 1_000_000


class Simulation:
    """A simulated CUDA device; context manager and decorator.

    Inside, unmodified PyTorch code sees one GPU of the named model as ``cuda:0``. Its
    tensors have shapes, no data. Memory is limited to the GPU's, and
    ``torch.cuda.OutOfMemoryError`` is raised where the GPU would raise it.

    Args:
        gpu: catalogue name ("RTX 4090", "a100-80gb", "custom:24GiB") or a ``GpuSpec``.
        allocator: settings of the caching allocator; by default those of
            the environment, as the PyTorch that runs reads it.
        limited: ``False`` lets memory grow past the GPU's capacity, to measure a job that
            does not fit.
        constants: what the process uses in addition to PyTorch's memory; by default the
            catalogue's for this GPU.
        command: the launch command, for the recording's header.
        peers: the other ranks of the job (``None``: this is rank 0, alone).

    Attributes: ``recording`` is what happened so far, also after the end.
    """

    def __init__(
        self,
        gpu: str | GpuSpec,
        *,
        allocator: AllocatorSettings | None = None,
        limited: bool = True,
        constants: DeviceConstants | None = None,
        command: str = "",
        peers: Peers | None = None,
    ) -> None:
        self.peers = peers or Peers()
        self.gpu = find_gpus(gpu) if isinstance(gpu, str) else gpu
        self.constants = device_constants(self.gpu) if constants is None else constants
        self._command = command
        self._settings = allocator
        self._limited = limited
        self._patches = PatchSet()
        self._on_step: list[Callable[[int], None]] = []
        self._final: Recording | None = None
        self._live = False

    # -- use -----------------------------------------------------------------------------

    def __enter__(self) -> Simulation:
        global _active
        if _active is not None:
            raise RuntimeError("a simulation is already active; simulations cannot be nested")
        self._final = None
        self._build()
        _active = self
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            self._final = self._record()
        finally:
            self._remove()

    def __call__(self, function: _F) -> _F:
        """Decorator: every call of ``function`` runs in a simulation of its own."""

        @functools.wraps(function)
        def simulated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return simulated  # type: ignore[return-value]

    @property
    def recording(self) -> Recording:
        """Everything recorded so far; the whole run once the simulation has ended."""
        if self._final is not None:
            return self._final
        if not self._live:
            raise RuntimeError("nothing has been simulated yet")
        return self._record()

    def rename(self, command: str) -> None:
        """What is simulated from now on is this launch command."""
        self._command = command

    @property
    def is_untouched(self) -> bool:
        """Has nothing been simulated yet?"""
        return not (self._recorder.op_count or self._recorder.step or self._modules.calls)

    def pause(self) -> None:
        """What passes from now on costs the script no time, until :meth:`go_on`."""
        self._time.enter()

    def go_on(self) -> None:
        """The script runs again, maybe in a process that was forked meanwhile."""
        self._time.leave()

    @property
    def steps(self) -> int:
        """Training steps completed so far."""
        return self._recorder.step

    @property
    def periods(self) -> int:
        """Steps that were whole periods of the loop: all but the parts of its first one."""
        return max(0, self.steps - self.cycle.partial_steps)

    @property
    def operators(self) -> int:
        """Operators that ran so far."""
        return self._recorder.op_count

    @property
    def missed_packages(self) -> tuple[str, ...]:
        """Packages with a stand-in that the script imported in vain, where that matters."""
        return self.absent.missed(self._modules.files)

    @property
    def replaying(self) -> bool:
        """Did the step that is over happen in a CUDA graph?"""
        return self._graphs.replaying

    @property
    def warm_up_steps(self) -> int:
        """Steps before a CUDA graph was captured, the latest, and those that were only a part of
        a period of the loop, before all its optimizers had stepped."""
        return max(self._graphs.warm_up_steps, self.cycle.partial_steps)

    def step_uses(self) -> list[StepUse]:
        """Memory use of each training step completed so far."""
        self._memory.flush()
        return self._recorder.step_uses()

    def on_arithmetic(self, callback: Callable[[Any, Any, Any], None]) -> None:
        """Call it with two tensors and their difference or product, as the script computes them."""
        self.engine.on_arithmetic = callback

    def on_view(self, callback: Callable[[Any, Any], None]) -> None:
        """Call it with a tensor and its view, or copy of another shape, that the script makes."""
        self.engine.on_view = callback

    def on_result(self, callback: Callable[[Any, Any, Any, Any], None]) -> None:
        """Call it with a function, its arguments and the tensor on the device that it gave,
        or with one that changes all tensors of a list."""
        self.engine.on_result = callback

    def on_upload(self, callback: Callable[[torch.Tensor], None]) -> None:
        """Call it with what the host is about to copy to the GPU, where it waits for the copy."""
        self.engine.on_upload = callback

    def on_step(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(steps)`` after each training step."""
        self._on_step.append(callback)

    # -- parts ---------------------------------------------------------------------------

    def _build(self) -> None:
        gradient_sums.held_by_autograd_alone()
        version = str(torch.__version__)
        settings = self._settings or AllocatorSettings.from_environment(os.environ, version)
        self._alloc_conf = settings.to_conf()
        #: Says where a step is over.
        self.cycle = StepCycle()
        #: Called where the host waits for the device, but for copies to it.
        self.on_wait: Callable[[WaitKind], None] = lambda _: None
        self._recorder = RecordingBuilder()
        self._memory = DeviceMemory(
            [self._make_allocator(settings, number) for number in range(self.gpu.count)],
            self._recorder,
        )
        self._memory.on_other = lambda _: self._grow_context()
        self._ownership = Ownership(self._recorder)
        self._modules = ModuleTracker(self._recorder, self._meet_module)
        self.engine = Engine(self.gpu, self._memory, self._modules)
        self.engine.on_library, self.engine.on_sparse = self._grow_context, sparse.run
        self._compilation = Compilation(self.engine)
        self._modules.on_call = self._call
        self._kernels = KernelLog(self.engine)
        self.engine.on_launch, self._memory.on_wait = self._kernels.operator, self._wait
        self._time = ScriptTime(clock_of(self._recorder, self.gpu), self.engine.in_framework)
        self._memory.on_death = self._time.leave_out
        self.engine.on_enter, self.engine.on_leave = self._time.enter, self._time.leave
        self._grow_context()
        self._autocast = Autocast()
        self._modes = Modes(self.engine)
        self._overrides: Overrides | None = None
        self._lifts_cpu_only = False
        self._missing = [f"this PyTorch has no {name}" for name in missing_functions()]
        self._missing += [
            f"PyTorch {version} does not read {name}: set {VARIABLE}"
            for name in unread_variables(os.environ, version)
        ]
        self._default_device = device_names.DefaultDevice()
        self._collectives = Collectives(self.engine, self._kernels, self.peers)
        self._triton = TritonKernels(self.engine, self._kernels)
        self._bitsandbytes = BitsAndBytes(self.engine)
        self._disk_offload = DiskOffload(self.engine.assume, self._ownership.move)
        #: Packages that are not installed, and stand-ins for some of them.
        self.absent = AbsentPackages(STAND_INS, self.engine.assume)
        self._graphs = Graphs(self.engine, self._kernels, self._count_step)

    def _install(self) -> None:
        # Every optimizer imports torch._dynamo; it must see PyTorch as it is, not patched.
        compiled.import_compiler()
        self._live = True
        set_engine(self.engine)
        device_names.install(self.engine, self._patches)
        subclasses.install(self.engine, self._patches)
        cuda_module.install(self._patches, self.gpu.count)
        checkpoints.install(self._patches)
        host_fills.install(self._patches)
        self._optional(
            "FlexAttention",
            lambda: compilation.install(self._patches, self._compilation.inside),
        )
        self._compilation.install_tracing(self._patches)
        self._overrides = Overrides(self.gpu, self._autocast)
        event = event_class(self._memory, self._kernels, self._time)
        Surface(self.gpu, self._memory, event, self._graphs).install(self._patches)
        OneProcess(self.engine, self._kernels).install(self._patches)
        one_process.install(self._patches, self.engine)
        self._optional("torch.distributed", lambda: self._collectives.install(self._patches))
        self._triton.install(self._patches)
        self._bitsandbytes.install(self._patches)
        self._disk_offload.install(self._patches)
        quanto.install(self._patches)
        self.absent.install()
        torch_patches.install(
            self._patches,
            clear_casts=self._autocast.clear,
            moved=self._ownership.move,
            materialized=self._ownership.materialize,
            compiled=self._compilation.compile,
        )
        torch_patches.refuse_extensions(
            self._patches, functools.partial(deepspeed.extension_of, assume=self.engine.assume)
        )
        torchvision_operators.count_positives(self._patches)
        self._modules.install(self._patches)
        self._patches.hook(optim.Optimizer, "__init__", self._making)
        self._patches.see_steps(self._before_step, self._after_step)
        # torch.tensor(..., device="cuda") builds on the CPU and moves where modes see it.
        self._lifts_cpu_only = lifts_cpu_only()
        lift_cpu_only(True)
        self._modes.install(self._patches)
        self._time.install(self._patches)

    def _optional(self, feature: str, install: Callable[[], None]) -> None:
        """What most scripts do without is left out where PyTorch has changed it."""
        try:
            install()
        except MissingNameError as error:
            self._missing.append(f"{feature} is not simulated: this PyTorch has no {error.name}")

    def _remove(self) -> None:
        global _active
        self._time.stop()
        self._collectives.remove()
        self.absent.remove()
        self._default_device.restore()
        self._modes.remove()
        lift_cpu_only(self._lifts_cpu_only)
        if self._overrides is not None:
            self._overrides.remove()
        self._patches.restore()
        self._autocast.clear()
        if not torch.cuda.is_initialized():
            initialize_anew()
        set_engine(None)
        _active = None

    def _make_allocator(self, settings: AllocatorSettings, number: int) -> CachingAllocator:
        """The allocator of a GPU; other processes are assumed to be on the first."""
        capacity = self.gpu.memory_bytes if self._limited else UNLIMITED
        allocator = CachingAllocator(capacity, settings=settings)
        allocator.gpu = number
        allocator.other_processes_bytes = self.constants.other_processes_bytes if not number else 0
        return allocator

    @property
    def allocator(self) -> CachingAllocator:
        """The allocator of the first GPU."""
        return self._memory.allocators[0]

    def _grow_context(self) -> None:
        """A library or a GPU was used for the first time: the process takes memory from now on, on
        each of its GPUs."""
        used = self.constants.used(self.engine.libraries)
        for number in (0, *self._memory.others):
            self._memory.allocators[number].context_bytes = total(used)[0]

    def _wait(self, stream: int | None) -> None:
        with self._time.simulating():
            self._kernels.host_waits(stream)
        if self.engine.waits_for != "upload":
            self.on_wait(self.engine.waits_for)

    # -- what is what ----------------------------------------------------------------------

    def end_step(self) -> None:
        """A step is over: of the training, or whatever else is counted as one."""
        self._recorder.step_end()
        self._graphs.step_ended()
        self._modules.step_end()
        for callback in self._on_step:
            callback(self._recorder.step)

    def module(self) -> str:
        """The path of the module that is called now; empty: none is."""
        return self._recorder.text(self._modules.current(False))

    def mark_cache(self, tensor: object) -> None:
        """A tensor is part of the cache of a text in the making."""
        self._ownership.mark(tensor, "kv_cache")

    def allocation_of(self, tensor: object) -> int | None:
        """The number of the allocation that a tensor's memory is in; ``None``: of none."""
        return self._ownership.allocation_of(tensor)

    def is_copied(self, number: int) -> bool:
        """Was an allocation made for a copy of the host's data?"""
        return self._ownership.is_copied(number)

    def script_ended(self) -> None:
        """The script has come to its end: that ends its step, if it was the only one."""
        if not self.steps and self.cycle.is_unfinished:
            self.end_step()

    def _count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has stepped."""
        if not self.cycle.only_resumes(optimizer) and self.cycle.stepped(optimizer):
            self.end_step()

    def _making(self, construct: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(construct)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.cycle.made(optimizer)
            construct(optimizer, *args, **kwargs)
            self.cycle.constructed(optimizer)

        return __init__

    @property
    def is_eager(self) -> bool:
        """Did what ``torch.compile`` was given run in eager mode?"""
        return self._compilation.left_out

    def _call(self, module: torch.nn.Module, given: Any) -> None:
        self._compilation.called(module, given)
        if self.cycle.awaits:
            self.cycle.called(module.parameters(recurse=False))

    def _meet_module(self, module: torch.nn.Module, name: int) -> None:
        self._ownership.meet(module, name)
        self.engine.forward_seen = True

    def _before_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._time.simulating():
            self._begin_step(optimizer, sys._getframe(1))
        kwargs = kwargs or {}
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": self._of_script(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._of_script(args[1]), *args[2:]), kwargs
        return None

    def _of_script(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure that an optimizer's step calls, as Lightning gives each: in it the model and
        its loss are computed, and gradients, which are no part of what the optimizer does."""

        @functools.wraps(closure)
        def called(*args: Any, **kwargs: Any) -> Any:
            within, self.engine.in_optimizer = self.engine.in_optimizer, 0
            try:
                return closure(*args, **kwargs)
            finally:
                self.engine.in_optimizer = within

        return called

    def _begin_step(self, optimizer: Any, frame: FrameType) -> None:
        if (on_host := _numbers_on_host(optimizer)) >= _MANY:
            self.engine.assume(
                f"an optimizer's step on the CPU, of {on_host} numbers, was assumed to need no time"
            )
        self.cycle.enter(optimizer, frame)
        self._ownership.before_step(optimizer)
        self.engine.in_optimizer += 1

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        with self._time.simulating():
            self._finish_step(optimizer)

    def _finish_step(self, optimizer: Any) -> None:
        self.engine.in_optimizer = max(0, self.engine.in_optimizer - 1)
        self._ownership.after_step(optimizer)
        if not self.cycle.leave(optimizer):
            return
        if self._graphs.capturing:
            self._graphs.note_step(optimizer)
        else:
            self._count_step(optimizer)

    def _assumptions(self) -> dict[str, int]:
        """Texts with how often each was assumed."""
        found = self._triton.assumption(), self._kernels.assumption()
        return dict(self.engine.assumptions) | {text: 1 for text in found if text is not None}

    def _record(self) -> Recording:
        self._memory.flush()
        used = self.constants.used(self.engine.libraries)
        context, low, high = total(used)
        recording = self._recorder.finish(
            {
                "gpu": self.gpu.key,
                "gpu_memory_bytes": self.gpu.memory_bytes,
                "context_bytes": context,
                "context_range_bytes": [low, high],
                "context_parts": [dataclasses.asdict(part) for part in used],
                "other_processes_bytes": self.constants.other_processes_bytes,
                "profile": self.constants.profile,
                "notes": [
                    *self.constants.notes,
                    *_other_version(self.constants.torch),
                    *self._missing,
                ],
                "command": self._command,
                "torch": str(torch.__version__),
                "assumptions": self._assumptions(),
                "module_calls": self._modules.calls,
                "limited": self._limited,
                "deterministic": torch.backends.cudnn.deterministic
                or torch.are_deterministic_algorithms_enabled(),
                "optimizer": self.cycle.optimizer,
                "alloc_conf": self._alloc_conf,
                "parameters": list(self._ownership.parameters.values()),
                "read": sorted(self._memory.read),
                "ranks": self._collectives.ranks,
                "sharing": self._collectives.sharing,
            }
        )
        # Of each rank alike, its own GPU is the first.
        return recording.seen_from(self.peers.rank % visible_gpus(self.gpu.count))


def _numbers_on_host(optimizer: Any) -> int:
    """Numbers that an optimizer is about to change on the CPU: parameters that were offloaded."""
    groups = getattr(optimizer, "param_groups", ())
    parameters = (each for group in groups for each in group["params"])
    changing = (
        parameter
        for parameter in parameters
        if parameter.device.type == "cpu" and parameter.grad is not None
    )
    return sum(local_part(parameter).numel() for parameter in changing)


def active_simulation() -> Simulation | None:
    """The simulation that this process is in."""
    return _active


def simulate(
    gpu: str | GpuSpec,
    *,
    allocator: AllocatorSettings | None = None,
    limited: bool = True,
    constants: DeviceConstants | None = None,
) -> Simulation:
    """A simulated GPU: ``with trainfit.simulate("RTX 4090"): ...`` or ``@trainfit.simulate(...)``.

    See :class:`Simulation` for the arguments. Raises ``trainfit.hardware.GpuNameError`` for
    a name that the catalogue does not know or that fits several GPUs.
    """
    return Simulation(gpu, allocator=allocator, limited=limited, constants=constants)


def _other_version(profiled: str) -> list[str]:
    """What to say where a profile was measured with another PyTorch than runs here.

    The context depends on the CUDA libraries that come with it; patch releases change none.
    """
    here = str(torch.__version__)
    if not profiled or profiled.split(".")[:2] == here.split(".")[:2]:
        return []
    return [f"the profile was measured with torch {profiled}, the job runs torch {here}"]
