"""The job of a verb: the user's command, and the GPU that is simulated for it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from trainfit.cli.common import UsageError
from trainfit.hardware import GpuNameError, GpuSpec, device_constants, local_gpu
from trainfit.hardware.context_memory import check_profile, gpu_of_profile
from trainfit.hardware.gpu_topology import find_gpus, named_count, with_ranks
from trainfit.hardware.local_gpu import local_usage
from trainfit.plan.command.parsing import Command, parse_command, piped_input
from trainfit.results.gpus import DeviceConstants, Profile, Rates
from trainfit.results.text import count, printable, size


@dataclasses.dataclass(frozen=True)
class GpuChoice:
    """The GPU to simulate, its constants, and the rates of the user's calibration profile
    (``None``: there is none that holds for it)."""

    gpu: GpuSpec
    constants: DeviceConstants
    rates: Rates | None = None


def chosen_device(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    processes: int,
    machines: int,
) -> GpuChoice:
    """The device of ``--gpu``, ``--profile`` and ``--other-processes``; ``environment`` is the
    job's, which has so many ``processes`` with a GPU each, on so many ``machines``.

    Without ``--gpu`` it is this machine's GPU, else the profile's. Raises ``GpuNameError`` for a
    bad name, :class:`UsageError` with no name and no GPU, or too few GPUs.
    """
    profile = Profile.load(options.profile) if options.profile is not None else None
    if options.force_profile and profile is None:
        raise UsageError("--force-profile is for use with --profile FILE")
    here = local_gpu() if options.gpu is None else None
    usage = local_usage() if here is not None else None
    driver = usage.driver if usage is not None else None
    if options.gpu is not None:
        gpu = find_gpus(options.gpu)
    elif here is not None:
        gpu = here
    elif profile is not None:
        gpu = gpu_of_profile(profile)
    else:
        raise UsageError(
            'no GPU in this machine (or no NVML to see it): name one, as in --gpu "RTX 4090", '
            "or give a size, as in --gpu custom:24GiB"
        )
    if machines != gpu.machines and (machines > 1 or processes > gpu.count):
        each = -(-processes // machines)
        raise UsageError(
            f"the command starts processes on {count(machines, 'machine')}, and --gpu names "
            f"{gpu.machines}: name as many, and the network between them, as in "
            f'--gpu "{machines}x({each}x {gpu.key}), 400Gb/s"'
            if machines > 1
            else f"--gpu {options.gpu!r} has {count(gpu.count, 'GPU')} in each machine, and the "
            f"command starts {processes} processes on one: let its launcher know of the others "
            f"(torchrun --nnodes={gpu.machines})"
        )
    counted = named_count(options.gpu) if options.gpu is not None else None
    if counted is not None and processes > counted:
        raise UsageError(
            f"--gpu {options.gpu!r} has {count(counted, 'GPU')}, and the command starts "
            f"{processes} processes, each with a GPU of its own: name as many GPUs, as in "
            f'--gpu "{_as_many(options.gpu, gpu, processes)}", or start fewer processes'
        )
    gpu = with_ranks(gpu, processes)
    if environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        gpu = dataclasses.replace(gpu, peer_to_peer=False)
    notes: tuple[str, ...] = ()
    if profile is not None:
        if options.gpu is not None:
            driver = _driver_here(gpu)
        notes = check_profile(
            profile, str(options.profile), gpu, driver, force=options.force_profile
        )
        if profile.memory.usable is not None and not notes:
            gpu = dataclasses.replace(gpu, memory_bytes=int(profile.memory.usable.value))
    others = options.other_processes
    if others is None:
        others = (usage.used_bytes or 0) if usage is not None else 0
    check_others(others, gpu)
    constants = device_constants(
        gpu,
        profile=profile,
        title=str(options.profile) if profile is not None else "",
        module_loading="eager" if _loads_eagerly(environment) else "lazy",
        other_processes_bytes=others,
        notes=notes,
    )
    # A profile that was forced is another GPU's, or a rehearsal's.
    rates = profile.rates if profile is not None and not notes else None
    return GpuChoice(gpu, constants, rates)


def check_others(held_bytes: int, gpu: GpuSpec) -> None:
    """Raise :class:`UsageError` where other processes leave no memory of ``gpu``."""
    if held_bytes >= gpu.memory_bytes:
        raise UsageError(
            f"other processes hold {size(held_bytes)} of the {size(gpu.memory_bytes)} of "
            f"{gpu.key}: no memory is free; stop them, or correct --other-processes"
        )


def _as_many(name: str, gpu: GpuSpec, processes: int) -> str:
    """A name with a GPU for each process."""
    if gpu.machines == 1:
        return f"{processes}x {gpu.key}"
    network = name.rpartition(",")[2].strip()
    return f"{gpu.machines}x({-(-processes // gpu.machines)}x {gpu.key}), {network}"


def _driver_here(gpu: GpuSpec) -> str | None:
    """The driver of this machine, if its GPU is the one that was named."""
    try:
        here = local_gpu()
    except GpuNameError:  # there is one that is not known, and thus not the one
        return None
    usage = local_usage() if here is not None and here.name == gpu.name else None
    return usage.driver if usage is not None else None


def _loads_eagerly(environment: Mapping[str, str]) -> bool:
    """Lazy is the default of PyTorch since 1.13, and of CUDA since 12.2."""
    return environment.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"


# ---
# The user's command, as the verbs that run it read it.


def read_command(words: Sequence[str], *, several: bool = False, also: str = "") -> Command:
    """The command (``several``: of several processes, too; ``also``: with this tunable), with a
    line on standard error where another Python runs it than its reader would expect, and where it
    reads what comes once.

    Raises:
        CommandError: no Python is found in it, or none that can run it.
    """
    command = parse_command(words, several=several, also=also)
    for said in filter(None, (command.interpreter.note, piped_input(command))):
        sys.stderr.write(f"trainfit: {printable(said)}\n")
        sys.stderr.flush()
    return command
