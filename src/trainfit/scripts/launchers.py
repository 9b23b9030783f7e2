"""Launchers of scripts: their arguments by their own code, and scripts run in place."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from trainfit.results.runs.script import Launched
from trainfit.results.runs.trace import Target
from trainfit.simgpu.communication.peers import TASKS, ranks_per_machine
from trainfit.simgpu.device.user_location import loaded_modules
from trainfit.simgpu.patching import PatchSet

#: Any free one: a process that is alone waits for nobody there.
_PORT = "0"
#: What DeepSpeed's launcher sets of what torchrun does.
_OF_DEEPSPEED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
#: As many processes as there are GPUs.
_OF_THE_GPUS = ("gpu", "auto")


def torchrun(words: Sequence[str], gpus: int, module: str = "torch.distributed.run") -> Launched:
    """``torchrun``, or ``python -m torch.distributed.launch``, in a machine of ``gpus`` GPUs."""
    # Modules of libraries, loaded where they are installed; their parsers have no types.
    launcher: Any = importlib.import_module(module)
    run: Any = importlib.import_module("torch.distributed.run")
    options = getattr(launcher, "parse_args", run.parse_args)(list(words))
    each = _processes(run, options, gpus)
    machines = int(run.parse_min_max_nnodes(options.nnodes)[1])
    for name, number in (("--nproc-per-node", each), ("--nnodes", machines)):
        if number < 1:
            raise ValueError(f"{name} {number}: expected 1 or more")
    arguments = () if run.get_use_env(options) else ("--local-rank=0",)
    return Launched(
        processes=each * machines,
        words=1 + len(options.training_script_args),
        kind=_kind(options),
        arguments=arguments,
        variables=_of_torchrun(each, options.role, options.max_restarts, machines),
        machines=machines,
        per_gpu=str(options.nproc_per_node) in _OF_THE_GPUS,
    )


def _processes(run: Any, options: Any, gpus: int) -> int:
    wanted = str(options.nproc_per_node)
    return gpus if wanted in _OF_THE_GPUS else int(run.determine_local_world_size(wanted))


def _kind(options: Any) -> Any:
    if options.module:
        return "module"
    return "program" if options.no_python else "script"


def _of_torchrun(
    processes: int, role: str = "default", restarts: int = 0, machines: int = 1
) -> dict[str, str]:
    """The variables of LocalElasticAgent's first worker of so many on each machine, but for the
    agent's store: without the agent there is none."""
    sizes = ("WORLD_SIZE", "ROLE_WORLD_SIZE")
    threads = {"OMP_NUM_THREADS": "1"} if processes > 1 else {}  # where the user sets none
    return {
        **threads,
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
        **dict.fromkeys(sizes, str(processes * machines)),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_WORLD_SIZE": str(machines),
        "ROLE_NAME": str(role),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": _PORT,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": "none",
    }


def accelerate(words: Sequence[str], gpus: int) -> Launched:
    """``accelerate launch``, with its configuration file, in a machine of ``gpus`` GPUs."""
    launch: Any = importlib.import_module("accelerate.commands.launch")
    prepare: Any = importlib.import_module("accelerate.utils.launch")
    options = launch.launch_command_parser().parse_args(list(words))
    given = options.num_processes
    options, defaults, from_file = launch._validate_launch_command(options)
    per_gpu = given is None and defaults is None and not options.cpu
    machines = options.num_machines or 1
    if per_gpu:
        options.num_processes = gpus * machines
    processes = max(1, options.num_processes or 1)
    if defaults is None and processes > 1 and not (options.use_deepspeed or options.use_fsdp):
        options.multi_gpu = True  # as it decides where it sees several GPUs
    before = dict(os.environ)
    ranks: dict[str, str] = {}
    if options.use_deepspeed and not options.cpu:
        check_json(options.deepspeed_config_file or "")
        fields = list(defaults.deepspeed_config) if defaults else []
        fields += ["mixed_precision"] * from_file
        options.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, environment = prepare.prepare_deepspeed_cmd_env(options)
        ranks = _of_torchrun(processes // machines, machines=machines)
        ranks["DS_ACCELERATOR"] = "cuda"
    elif (options.use_fsdp or options.multi_gpu) and not options.cpu:
        environment = prepare.prepare_multi_gpu_env(options)
        ranks = _of_torchrun(processes // machines, machines=machines)
    else:
        _, environment = prepare.prepare_simple_launcher_cmd_env(options)
    set_by_it = {name: each for name, each in environment.items() if before.get(name) != each}
    return Launched(
        processes=processes,
        words=1 + len(options.training_script_args),
        kind=_kind(options),
        variables={**set_by_it, **ranks},
        machines=machines,
        per_gpu=per_gpu,
    )


def deepspeed(words: Sequence[str], gpus: int) -> Launched:
    """``deepspeed``, with its file of hosts, in a machine of ``gpus`` GPUs.

    Raises ValueError for hosts, GPUs or a configuration that cannot be read.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda")  # its code looks for a GPU, to name it
    runner: Any = importlib.import_module("deepspeed.launcher.runner")
    options = runner.parse_args(list(words))
    if options.autotuning:
        raise ValueError("--autotuning runs the script many times: leave it out")
    hosts = runner.fetch_hostfile(options.hostfile)
    if options.include or options.exclude:
        pool = hosts or {"localhost": gpus}
        chosen = runner.parse_inclusion_exclusion(pool, options.include, options.exclude)
        hosts = {host: len(slots) for host, slots in chosen.items()}
    per_gpu = hosts is None and options.num_gpus < 1
    each = max(hosts.values()) if hosts else gpus
    machines = len(hosts) if hosts else 1
    num_gpus = options.num_gpus if options.num_gpus > 0 else each
    machines = options.num_nodes if options.num_nodes > 0 else machines
    check_json(_config_of(options.user_args))
    set_by_it = _of_torchrun(num_gpus, machines=machines)
    variables = {name: each for name, each in set_by_it.items() if name in _OF_DEEPSPEED}
    cross = {"CROSS_RANK": "0", "CROSS_SIZE": str(machines), "LOCAL_SIZE": str(num_gpus)}
    return Launched(
        processes=num_gpus * machines,
        words=1 + len(options.user_args),
        kind=_kind(options),
        arguments=() if options.no_local_rank else ("--local_rank=0",),
        variables={**variables, **cross, "DS_ACCELERATOR": "cuda"},
        machines=machines,
        per_gpu=per_gpu,
    )


def _config_of(words: Sequence[str]) -> str:
    """DeepSpeed's configuration file among a script's words; "": there is none."""
    for name in ("--deepspeed_config", "--deepspeed"):
        for place, word in enumerate(words):
            given = word.removeprefix(f"{name}=") if word.startswith(f"{name}=") else ""
            if word == name and place + 1 < len(words) and words[place + 1][:1] != "-":
                given = words[place + 1]
            if given and (name == "--deepspeed_config" or given.endswith(".json")):
                return given
    return ""


def check_json(path: str) -> None:
    """Raise ValueError for a configuration that is not there, or that does not parse."""
    if not path or path.startswith("{"):  # it may be JSON itself
        return
    try:
        with open(path, encoding="utf-8") as file:
            json.load(file)
    except OSError as error:
        raise ValueError(f"configuration {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"configuration {path!r} is not valid JSON: {error}") from None


#: What tells tasks that are ranks which of their machine they are.
_LOCAL_RANKS_OF_TASKS = (
    *("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
    "MPI_LOCALRANKID",
)
#: Words by which launchers tell a script which of their processes on the machine it is.
_WORDS_OF_RANK = ("--local-rank", "--local_rank")


def as_rank(rank: int, gpus: int, target: Target) -> Target:
    """Let this process be rank ``rank`` of the job, of which each machine has ``gpus`` GPUs: its
    environment, and the words that its script gets."""
    local = _as_rank(rank, gpus)
    words = {f"{name}=0": f"{name}={local}" for name in _WORDS_OF_RANK}
    return dataclasses.replace(
        target, args=tuple(words.get(argument, argument) for argument in target.args)
    )


def _as_rank(rank: int, gpus: int) -> int:
    """The environment of rank ``rank``; its number on its machine."""
    machine, local = divmod(rank, ranks_per_machine(gpus))
    of_tasks = any(os.environ.get(number, "1") != "1" for _, number in TASKS)
    if "RANK" in os.environ or not of_tasks:  # torchrun's; srun starts one of it on each machine
        os.environ["LOCAL_RANK"] = str(local)
        task, of_machine = machine, 0
    else:
        task, of_machine = rank, local
    numbers = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("GROUP_RANK", "CROSS_RANK", "SLURM_NODEID"), machine),
        **{name: task for name, _ in TASKS},
        **dict.fromkeys(_LOCAL_RANKS_OF_TASKS, of_machine),
    }
    os.environ.update({k: str(v) for k, v in numbers.items() if k in os.environ})
    return local


def read(launcher: str, words: Sequence[str], gpus: int) -> Launched:
    """What ``launcher`` makes of ``words`` in a machine of ``gpus`` GPUs."""
    if launcher == "accelerate":
        return accelerate(words, gpus)
    if launcher == "torchrun":
        return torchrun(words, gpus)
    if launcher == "deepspeed":
        return deepspeed(words, gpus)
    return torchrun(words, gpus, launcher)


def _in_one_line(text: str) -> str:
    """The text in one line, as parsers of files do not say what is wrong with them."""
    return " ".join(text.split())


def main() -> None:
    """The child process's entry point."""
    sys.argv = sys.argv[1:]  # parsers give their errors its name
    launcher, gpus, *words = sys.argv
    sys.argv = [launcher, *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            answer = read(launcher, words, int(gpus))
    except (SystemExit, argparse.ArgumentError):  # argparse has said why, in the last line
        lines = said.getvalue().strip().splitlines() or ["no reason given"]
        answer = Launched(error=lines[-1])
    except ValueError as error:
        answer = Launched(error=_in_one_line(str(error)))
    except Exception as error:  # whatever a library's own checks raise
        answer = Launched(error=_in_one_line(f"{type(error).__name__}: {error}"))
    print(answer.to_json())


if __name__ == "__main__":
    main()


# ---
# Programs that end in ``accelerate launch`` of one process (``trl sft …``): its script runs here.
#
# Accelerate starts the script in a process of its own (``simple_launcher`` in
# accelerate/commands/launch.py), where no GPU is simulated. With one process that is only a clean
# start: the script runs in this process instead, with the environment and the words that it would
# get there.


_MODULE = "accelerate.commands.launch"
#: The module of torchrun's agent.
_AGENT = "torch.distributed.launcher.api"
#: Modules that start ranks by that agent.
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
#: Programs that are such modules.
_PROGRAMS = {"torchrun": "torch.distributed.run"}
#: A command that ends well at once, in the place of a rank that is no process.
_NOTHING = [sys.executable, "-I", "-S", "-c", ""]
_PYTHON = re.compile(r"python[\d.]*")
#: What says which rank a process is, and the most that it is where there is no job.
_WITHOUT_JOB = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
#: A script's words that tell it which rank it is.
_RANK_OF_WORDS = re.compile(r"--(?:(?:node|local|global)[-_])?rank[= ](\d+)")
#: Lightning's ``devices=8`` starts the script again for each of the other ranks: rank 0 goes on.
_OF_LIGHTNING = (
    "lightning.pytorch.strategies.launchers.subprocess_script",
    "lightning.fabric.strategies.launchers.subprocess_script",
    "pytorch_lightning.strategies.launchers.subprocess_script",
    "lightning_fabric.strategies.launchers.subprocess_script",
)


class LaunchInPlace:
    """Runs here what would start the simulated rank as a process, and starts no others.

    That is Accelerate's start of a single process, torchrun's agent where a script calls it,
    Lightning's start of its other ranks, and a script that starts its ranks, or itself, by
    ``subprocess``.

    Args:
        execute: runs a target as Python would.
        rank: which of its ranks runs here.
        gpus: GPUs of a machine.
    """

    def __init__(self, execute: Callable[[Target], None], rank: int = 0, gpus: int = 1) -> None:
        self._execute, self._rank, self._gpus = execute, rank, gpus
        self._patches = PatchSet()
        self._starts_of_itself = 0

    def install(self, patches: PatchSet) -> None:
        """Patch the launchers, until ``patches`` is restored."""
        self._patches = patches
        patches.when_imported(_MODULE, functools.partial(self._patch, patches))
        patches.when_imported(_AGENT, functools.partial(self._patch_agent, patches))
        for name in _OF_LIGHTNING:
            patches.when_imported(name, functools.partial(_start_no_ranks, patches))
        if "RANK" not in os.environ:  # which a launcher has set
            patches.hook(subprocess.Popen, "__init__", self._starts)

    def _starts(self, original: Callable[..., None]) -> Callable[..., None]:
        """A rank of a job runs here, in place of its process, or is not started."""

        @functools.wraps(original)
        def __init__(process: Any, args: Any, *rest: Any, **options: Any) -> None:
            if _asks_for_hosts(args) and shutil.which(_SCONTROL) is None:
                options.pop("shell", None)
                original(process, ["printf", "%s\\n", *_hosts()], *rest, **options)
                return
            given = options.get("env")
            environment = dict(os.environ) if given is None else given
            words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
            target = _of_python([os.fsdecode(word) for word in words])
            number = None if target is None else self._number(target, environment)
            if target is None or number is None:
                original(process, args, *rest, **options)
                return
            options.pop("executable", None)
            original(process, _NOTHING, *rest, **options)
            process.args = args
            if number == self._rank:
                os.environ.update(environment)
                _read_anew(self._patches)
                self._execute(target)

        return __init__

    def _number(self, target: Target, environment: Mapping[str, str]) -> int | None:
        """The rank of a job that ``target`` would be; ``None``: it is none.

        A launcher is the simulated one's, whatever that is: its agent starts it.
        """
        if target.kind == "module" and target.name in _LAUNCHERS:
            return self._rank
        rank = environment.get("RANK", "")
        if rank.isdigit() and "WORLD_SIZE" in environment:
            return int(rank)
        if said := next(filter(None, map(_RANK_OF_WORDS.fullmatch, _joined(target.args))), None):
            return int(said[1])
        own = getattr(sys.modules.get("__main__"), "__file__", None)
        if self._gpus < 2 or target.kind != "script" or not own:
            return None
        if os.path.realpath(target.name) != os.path.realpath(own):
            return None
        self._starts_of_itself += 1
        return self._starts_of_itself - 1

    def _patch_agent(self, patches: PatchSet, module: ModuleType) -> None:
        """torchrun's agent, and what ``elastic_launch`` calls."""
        if not hasattr(module, "launch_agent"):  # another version's
            return

        def launch_agent(
            config: Any, entrypoint: Any, args: Sequence[Any], *_: Any, **__: Any
        ) -> Any:
            each, machines = int(config.nproc_per_node), int(config.max_nodes)
            role, restarts = str(config.role), int(config.max_restarts)
            os.environ.update(_of_torchrun(each, role, restarts, machines))
            _as_rank(self._rank, each)
            _read_anew(patches)
            if callable(entrypoint):
                return {self._rank: entrypoint(*args)}
            words = [os.fspath(word) for word in (entrypoint, *args)]
            target = _of_python(words)
            if target is None:
                raise ValueError(f"{words[0]}: only Python's scripts are simulated")
            self._execute(as_rank(self._rank, each, target))
            return {}

        patches.set(module, "launch_agent", launch_agent)

    def _patch(self, patches: PatchSet, module: ModuleType) -> None:
        start = getattr(module, "simple_launcher", None)
        prepare = getattr(module, "prepare_simple_launcher_cmd_env", None)
        if start is None or prepare is None:  # another version's, of which nothing is known
            return

        @functools.wraps(start)
        def simple_launcher(args: Any) -> None:
            if args.no_python or getattr(args, "mpirun_hostfile", None) is not None:
                start(args)  # another program, which Python cannot run here
                return
            command, environment = prepare(args)
            os.environ.update(environment)
            self._execute(_target(command))

        patches.set(module, "simple_launcher", simple_launcher)


#: Slurm's program that scripts ask for the names of hosts, the first of which is where ranks meet.
_SCONTROL = "scontrol"
_HOSTS_OF_JOB = re.compile(r"node\[1-(\d+)\]")


def _asks_for_hosts(args: Any) -> bool:
    """``scontrol show hostnames $SLURM_JOB_NODELIST``, also as a shell's words."""
    words = args.split() if isinstance(args, str) else [os.fspath(word) for word in args]
    return words[:2] == [_SCONTROL, "show"] and words[2:3] in (["hostname"], ["hostnames"])


def _hosts() -> list[str]:
    """The hosts of the job, whose names are made up where it is not one of this machine's."""
    named = os.environ.get("SLURM_JOB_NODELIST", "localhost")
    several = _HOSTS_OF_JOB.fullmatch(named)
    return [f"node{number}" for number in range(1, int(several[1]) + 1)] if several else [named]


def _read_anew(patches: PatchSet) -> None:
    """Give modules the rank that they would read from the environment of a process of their own
    (``RANK = int(os.getenv("RANK", -1))``); those hold what is read where there is no job."""
    for module, space in loaded_modules():
        for name, most in _WITHOUT_JOB.items():
            held, now = space.get(name), os.environ.get(name, "")
            if type(held) is int and held <= most and now.isdigit():
                patches.set(module, name, int(now))


def _start_no_ranks(patches: PatchSet, module: ModuleType) -> None:
    launcher = getattr(module, "_SubprocessScriptLauncher", None)
    if hasattr(launcher, "_call_children_scripts"):
        patches.set(launcher, "_call_children_scripts", lambda self: None)


def _of_python(words: Sequence[str]) -> Target | None:
    """What a command has this Python run; ``None``: another program, or code of its words."""
    if not words:
        return None
    program = os.path.basename(words[0])
    if program in _PROGRAMS:
        return Target("module", _PROGRAMS[program], tuple(words[1:]))
    if words[0] != sys.executable and not _PYTHON.fullmatch(program):
        return None
    rest = list(itertools.dropwhile(lambda word: word in ("-u", "-B", "-s", "-E"), words[1:]))
    if not rest or (rest[0][:1] == "-" and rest[0] != "-m") or rest == ["-m"]:
        return None
    return _target([words[0], *rest])


def _joined(words: Sequence[str]) -> list[str]:
    """Words, and each with the next as an option's value."""
    return [*words, *(" ".join(pair) for pair in itertools.pairwise(words))]


def _target(command: Sequence[str]) -> Target:
    """What ``python [-m] name args…`` runs."""
    if command[1] == "-m":
        return Target("module", command[2], tuple(command[3:]))
    return Target("script", command[1], tuple(command[2:]))
