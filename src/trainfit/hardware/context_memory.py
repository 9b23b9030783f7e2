"""Device memory outside PyTorch's allocator: from a calibration profile, or from a rule.

A profile may be the user's (``--profile``) or one of those shipped in ``profiles/``, which
hold nothing but what a publication states or this project measured. Where neither covers a GPU,
the figures follow from those of a GPU of its architecture, or are assumed, with a range.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from trainfit.hardware.gpu_figures import CONTEXT_SOURCE, GpuNameError, bare_context_mib
from trainfit.hardware.gpu_lookup import find_gpu, variants
from trainfit.results.files.errors import TrainfitError
from trainfit.results.gpus import (
    COMMUNICATION,
    CONTEXT,
    LIBRARIES,
    Constant,
    DeviceConstants,
    GpuFigure,
    GpuSpec,
    ModuleLoading,
    Profile,
)
from trainfit.results.text import MIB

#: Lazily loaded modules, MiB: expected, and most (the least is 0). Only the sum, 100 MiB, is
#: old knowledge of ours, a guess; how it is split is a guess as well. `trainfit calibrate`
#: measures each.
_ASSUMED_MIB = {
    "kernels": (20, 40),
    "cublas": (22, 70),
    "cublas_backward": (8, 70),
    "cudnn_forward": (30, 80),
    "cudnn_backward": (15, 40),
    "sdpa": (5, 20),
}
_ASSUMED_LIBRARY = "assumed: estimate for a lazily loaded library; `trainfit calibrate` measures it"

#: CUDA_MODULE_LOADING=EAGER loads every kernel of PyTorch and its libraries with the context.
#: Two publications give 16.8 (V100, without cuDNN) and 15.7 MiB an SM (A100); see profiles/.
_EAGER_PER_SM_MIB = 16.2
_EAGER_SHARES = (0.6, 1.5)
_EAGER_SOURCE = (
    "assumed: 16.2 MiB per SM with CUDA_MODULE_LOADING=EAGER, all libraries included; between "
    "1,341 MiB on a V100 (huggingface.co/docs/transformers/model_memory_anatomy) and 1,700 on "
    "an A100 (github.com/itu-rad/GPUMemNet)"
)

#: What cuDNN adds where everything is loaded eagerly and a profile's context is without it, MiB.
_EAGER_CUDNN_MIB = {"cudnn_forward": (360, 800), "cudnn_backward": (0, 200)}
_EAGER_CUDNN_SOURCE = (
    "assumed: cuDNN's libraries are loaded whole at their first use; an A100 with them uses "
    "359 MiB more than a V100 without"
)

#: What NCCL's buffers and kernels take of each GPU at one communicator, MiB, by the number of ranks
#: (expected, and most). The most is the least device memory less peak allocated seen on A100 80 GB
#: under NCCL 2.20.5 (fms-acceleration's runs: 2,188 MiB with 2 GPUs, 4,026 with 4, 6,199 with 8),
#: less the 940 of one GPU; it includes fragmentation, so that it is no estimate.
_NCCL_MIB = {2: (1250, 1490), 4: (1600, 3090), 8: (1600, 5260)}
#: 4 MiB a channel and peer (NCCL_BUFFSIZE) of few channels, without NCCL's kernels.
_LEAST_NCCL_MIB = 200
_NCCL_SOURCE = (
    "assumed: one communicator; 0.55 to 2.00 GiB at the first barrier of 2 GPUs (ml-engineering), "
    "about 1.6 GB (github.com/NVIDIA/nccl, issue 864); NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS lower it"
)

#: Two variants of a card differ by at least a third of their memory.
_SAME_CARD = 0.1

#: How far a GPU may be off what was measured on another one of its architecture. A guess: drivers
#: and versions of CUDA differ, too.
_SAME_ARCHITECTURE = 0.15
#: What every multiprocessor has a part of: state of the context, local memory of kernels.
_BY_PROCESSORS = (CONTEXT, "kernels")


class ProfileMismatch(TrainfitError):
    """A calibration profile that was made for another GPU or driver."""


def device_constants(
    gpu: GpuSpec,
    *,
    profile: Profile | None = None,
    title: str = "",
    module_loading: ModuleLoading = "lazy",
    other_processes_bytes: int = 0,
    notes: tuple[str, ...] = (),
) -> DeviceConstants:
    """Memory that a process on ``gpu`` uses in addition to reserved memory.

    ``profile`` is the user's and ``title`` its name; without one a shipped profile for this
    GPU and way of loading modules is taken, and a rule where there is none.
    """
    if profile is None:
        profile, title = shipped_profile(gpu, module_loading)
    parts = {part.name: part for part in assumed_parts(gpu.sm_count, module_loading)}
    if profile is None:
        parts |= _of_architecture(gpu, module_loading)
    else:
        parts |= _profiled(profile)
    return DeviceConstants(
        parts=tuple(parts[name] for name in (CONTEXT, *LIBRARIES)),
        other_processes_bytes=other_processes_bytes,
        profile=title,
        notes=notes,
        torch=(profile.torch if profile is not None else None) or "",
        communication=nccl_memory(gpu.count) if gpu.count > 1 else None,
    )


def nccl_memory(ranks: int) -> Constant:
    """What a communicator of so many ranks in one machine takes of each GPU."""
    nearest = min(_NCCL_MIB, key=lambda known: (known < min(ranks, max(_NCCL_MIB)), known))
    value, most = _NCCL_MIB[nearest]
    return Constant(
        COMMUNICATION, value * MIB, _LEAST_NCCL_MIB * MIB, most * MIB, "assumed", _NCCL_SOURCE
    )


def assumed_parts(sm_count: int, module_loading: ModuleLoading = "lazy") -> tuple[Constant, ...]:
    """The rule for a GPU that nobody has measured: context and libraries."""
    if module_loading == "eager":
        value = round(_EAGER_PER_SM_MIB * sm_count) * MIB
        low, high = (round(value * share) for share in _EAGER_SHARES)
        context = Constant(CONTEXT, value, low, high, "assumed", _EAGER_SOURCE)
        return (context, *(_included(name, _EAGER_SOURCE) for name in LIBRARIES))
    bare, least, most = (round(mib) * MIB for mib in bare_context_mib(sm_count))
    context = Constant(CONTEXT, bare, least, most, "assumed", CONTEXT_SOURCE)
    libraries = (
        Constant(name, mib * MIB, 0, most_mib * MIB, "assumed", _ASSUMED_LIBRARY)
        for name, (mib, most_mib) in _ASSUMED_MIB.items()
    )
    return (context, *libraries)


def check_profile(
    profile: Profile, title: str, gpu: GpuSpec, driver: str | None, *, force: bool
) -> tuple[str, ...]:
    """Is ``profile`` of this GPU and of this driver (``None``: not known)?

    Returns what the result has to say where ``force`` let a foreign profile pass; raises
    :class:`ProfileMismatch` otherwise.
    """
    reasons = _mismatches(profile, gpu, driver)
    if not reasons:
        return ()
    text = "; ".join(reasons)
    if not force:
        raise ProfileMismatch(
            f"profile {title!r}: {text}; run `trainfit calibrate` on that GPU, or use "
            "the profile anyway with --force-profile"
        )
    return (f"the profile {title!r} is used with --force-profile: {text}",)


def _mismatches(profile: Profile, gpu: GpuSpec, driver: str | None) -> list[str]:
    reasons = []
    named = {name.casefold() for name in profile.gpus}
    usable = profile.memory.usable
    if gpu.name.casefold() not in named:
        reasons.append(f"it was measured on {' / '.join(profile.gpus)}, not on {gpu.name}")
    elif usable is not None and not _same_memory(usable.value, gpu.memory_bytes):
        reasons.append(
            f"its GPU has {usable.value / MIB:,.0f} MiB, this one {gpu.memory_bytes / MIB:,.0f}"
        )
    if driver is not None and profile.driver is not None and driver != profile.driver:
        reasons.append(f"it was measured with driver {profile.driver}, this one is {driver}")
    if profile.is_rehearsal:
        reasons.append("it is a trial run on the simulated GPU, not a measurement")
    return reasons


def gpu_of_profile(profile: Profile) -> GpuSpec:
    """The GPU that a profile was measured on, as the catalogue has it.

    Raises ``GpuNameError`` where the catalogue does not know it.
    """
    usable = profile.memory.usable
    for name in profile.gpus:
        try:
            return find_gpu(name)
        except GpuNameError:
            named = variants(name)
        if named and usable is not None:
            return min(named, key=lambda gpu: abs(gpu.memory_bytes - usable.value))
    return find_gpu(profile.gpus[0])


def shipped_profile(gpu: GpuSpec, module_loading: ModuleLoading) -> tuple[Profile | None, str]:
    """The shipped profile for ``gpu`` and its name; ``(None, "")`` where there is none."""
    for title, profile in shipped_profiles().items():
        if profile.module_loading == module_loading and not _mismatches(profile, gpu, None):
            return profile, title
    return None, ""


@cache
def shipped_profiles() -> Mapping[str, Profile]:
    """The profiles that come with trainfit, by name."""
    folder = resources.files("trainfit.hardware") / "profiles"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".json"): Profile.from_json(
            file.read_text(encoding="utf-8"), Path(file.name)
        )
        for file in files
        if file.name.endswith(".json")
    }


def _same_memory(one: float, other: float) -> bool:
    return abs(one - other) < _SAME_CARD * max(one, other)


def _profiled(profile: Profile) -> dict[str, Constant]:
    """The parts that ``profile`` knows better than the rule."""
    memory, parts = profile.memory, {}
    if memory.context is not None:
        parts[CONTEXT] = _constant(CONTEXT, memory.context)
        if profile.module_loading == "eager":
            parts |= {
                name: Constant(name, mib * MIB, 0, most * MIB, "assumed", _EAGER_CUDNN_SOURCE)
                for name, (mib, most) in _EAGER_CUDNN_MIB.items()
            }
        parts |= {name: _included(name, memory.context.how) for name in memory.included}
    parts |= {name: _constant(name, figure) for name, figure in memory.libraries.items()}
    return parts


def _of_architecture(gpu: GpuSpec, module_loading: ModuleLoading) -> dict[str, Constant]:
    """Parts from the shipped profile of another GPU of this architecture, where each was measured;
    those of every multiprocessor in proportion to their number."""
    for profile in shipped_profiles().values():
        same = (profile.capability, profile.module_loading) == (gpu.capability, module_loading)
        if not same or set(profile.memory.libraries) != set(LIBRARIES):
            continue
        measured = gpu_of_profile(profile)
        share = gpu.sm_count / measured.sm_count
        source = f"derived from {measured.name}, of the same architecture"
        return {
            name: _scaled(part, share if name in _BY_PROCESSORS else 1.0, source)
            for name, part in _profiled(profile).items()
        }
    return {}


def _scaled(part: Constant, share: float, source: str) -> Constant:
    low, high = 1 - _SAME_ARCHITECTURE, 1 + _SAME_ARCHITECTURE
    return Constant(
        part.name,
        round(part.value_bytes * share),
        round(part.low_bytes * share * low),
        round(part.high_bytes * share * high),
        "derived",
        source,
    )


def _constant(name: str, figure: GpuFigure) -> Constant:
    return Constant(
        name, round(figure.value), round(figure.low), round(figure.high), figure.basis, figure.how
    )


def _included(name: str, how: str) -> Constant:
    """A library whose memory is part of the context's figure."""
    return Constant(name, 0, 0, 0, "derived", f"part of the context ({how})")
