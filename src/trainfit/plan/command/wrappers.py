"""Programs before a training command: wrappers that start it as one process, and launchers.

Wrappers stay in the launch command and are left out of the simulation. What they do to the process
is not simulated either, but for the cores and the priority of a measured DataLoader
(:class:`trainfit.plan.dataloader.process.CoreWrapper`). Options are those of the programs'
manuals: util-linux 2.41, coreutils 9.7, numactl 2.0.19, systemd 257, Slurm 24.11.

Launchers of training processes are unwrapped, and tasks of Slurm or MPI that are ranks themselves:
of the processes that they start the first is simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.plan.command.interpreter import HASTENED, Interpreter
from trainfit.plan.command.tasks import (
    MPI_PROGRAMS,
    SEPARATOR,
    Given,
    Tasks,
    of_mpi,
    of_slurm,
    wanted_of_slurm,
)
from trainfit.plan.command.tunables import CommandError
from trainfit.results.runs.script import LAUNCHER_MODULES, Launched


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A program that starts another: which of its options have a value (their names without
    dashes, a short one with the long one that it stands for: ``n=adjustment``), how many words
    of its own follow them, which of them change the working directory, a check that says why a
    call is not one process here, and the tasks that it starts."""

    valued: str = ""
    arguments: int = 0
    moves: tuple[str, ...] = ()
    refusal: Callable[[Given], str] = lambda given: ""
    starts: Callable[[Given], Tasks] = lambda given: Tasks()

    def read(self, words: Sequence[str], at: int) -> tuple[dict[str, str], int]:
        """The options in ``words`` from ``at`` on, and where they end."""
        short = dict(pair.split("=") for pair in self.valued.split() if "=" in pair)
        valued = {*short.values(), *(name for name in self.valued.split() if "=" not in name)}
        given: dict[str, str] = {}
        while at < len(words) and words[at].startswith("-"):
            word = words[at]
            at += 1
            if word == "--":
                break
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                if not equals and name in valued and at < len(words):
                    value, at = words[at], at + 1
                given[name] = value
                continue
            for place, letter in enumerate(word[1:], 2):
                name = short.get(letter, letter)
                given[name] = ""
                if name in valued:  # a value may follow in the same word, as in -n5
                    given[name] = word[place:].removeprefix("=")
                    if place == len(word) and at < len(words):
                        given[name], at = words[at], at + 1
                    break
        return given, at


def check(name: str, wrapper: Wrapper, given: Given) -> None:
    """Raise :class:`CommandError` where ``name`` with these options does not start one process
    from here."""
    for option in wrapper.moves:
        if folder := given.get(option):
            raise CommandError(
                f"{name} {'-' if len(option) == 1 else '--'}{option} {folder} changes the working "
                "directory: change to that folder yourself, and leave the option out"
            )
    if reason := wrapper.refusal(given):
        raise CommandError(f"{name}: {reason}")


def _systemd(given: Given) -> str:
    if "scope" in given:
        return ""
    return (
        "without --scope the command is started by systemd, as a service with another "
        "environment; add --scope"
    )


def _slurm(given: Given) -> str:
    if "multi-prog" in given:
        return "--multi-prog starts different programs; give the command of one of them"
    if of_slurm(given).count is None:
        wanted = wanted_of_slurm(given)
        text = " ".join(f"--{name}={value}" for name, value in wanted.items() if value)
        return f"{text} does not say how many tasks it starts; write --ntasks=1"
    return ""


def _mpi(given: Given) -> str:
    if of_mpi(given).count is None:
        return "it does not say how many processes it starts; write -np 8, one for each GPU"
    return ""


class MpiWrapper(Wrapper):
    """``mpirun``: a dash or two before an option's whole name, and ``name=2`` in ``valued`` for one
    with two values (``-mca btl self``). What is given several times (``-x``) is joined."""

    def read(self, words: Sequence[str], at: int) -> tuple[dict[str, str], int]:
        """The options in ``words`` from ``at`` on, and where they end."""
        pairs = (word.partition("=") for word in self.valued.split())
        numbers = {name: int(number or 1) for name, _, number in pairs}
        given: dict[str, str] = {}
        while at < len(words) and words[at].startswith("-"):
            name, equals, value = words[at].lstrip("-").partition("=")
            at += 1
            if not equals and (number := numbers.get(name, 0)):
                value = "=".join(words[at : at + number])
                at += number
            given[name] = SEPARATOR.join(filter(None, (given.get(name, ""), value)))
        if ":" in words[at:]:
            raise CommandError(
                "mpirun: ':' starts different programs; give the command of one of them"
            )
        return given, at


def require_tasks(tasks: Tasks, launcher: Launcher | None) -> None:
    """Raise :class:`CommandError` for several tasks of which each is a launcher, but not one of
    the same job on each machine (``srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 …``)."""
    if tasks.count in (1, None) or launcher is None:
        return
    if (machines := launcher.launched.machines) != tasks.count:
        starter, text = tasks.starter, f"srun --nodes={tasks.count} --ntasks-per-node=1"
        raise CommandError(
            f"{starter}: it starts {tasks.count} tasks{tasks.where}, each a {launcher.name} for "
            f"{machines} machine{'s' if machines > 1 else ''}; start one on each machine, as in "
            f"`{text if starter == 'srun' else f'mpirun -np {tasks.count} --map-by node'}` and "
            f"{_MACHINES.get(launcher.name, '--nnodes')}={tasks.count}"
        )


def _other_process(*options: str) -> Callable[[Given], str]:
    """It is called for processes that run already, and starts none."""

    def refusal(given: Given) -> str:
        found = next((option for option in options if option in given), None)
        return "" if found is None else f"-{found} is for a process that runs already"

    return refusal


#: Open MPI 5.0, MPICH 4.2 and Intel MPI 2021.
_MPIRUN: Final = MpiWrapper(
    "n np c n-procs N npernode npersocket ppn perhost H host hosts hostfile machinefile f "
    "default-hostfile x genv=2 env=2 genvlist envlist mca=2 gmca=2 pmixmca=2 prtemca=2 map-by "
    "rank-by bind-to cpu-set cpu-list prefix wdir wd path timeout stdin output output-filename am "
    "tune app rf rankfile launch-agent iface bootstrap bootstrap-exec launcher rmk binding "
    "personality stream-buffering max-restarts dvm",
    moves=("wdir", "wd"),
    refusal=_mpi,
    starts=of_mpi,
)

WRAPPERS: Final[Mapping[str, Wrapper]] = {
    "env": Wrapper(
        "u=unset C=chdir S=split-string",
        moves=("chdir",),
        refusal=lambda given: (
            "-S splits a word into a command, which is not read; write its words themselves"
            if "split-string" in given
            else ""
        ),
    ),
    "nice": Wrapper("n=adjustment"),
    "ionice": Wrapper("c=class n=classdata", refusal=_other_process("p", "P", "u")),
    "taskset": Wrapper(arguments=1, refusal=_other_process("p")),
    "chrt": Wrapper(
        "T=sched-runtime P=sched-period D=sched-deadline",
        arguments=1,
        refusal=_other_process("p"),
    ),
    "numactl": Wrapper(
        "i=interleave w=weighted-interleave p=preferred P=preferred-many m=membind "
        "N=cpunodebind C=physcpubind"
    ),
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "stdbuf": Wrapper("i=input o=output e=error"),
    "time": Wrapper("o=output f=format"),
    "timeout": Wrapper("k=kill-after s=signal", arguments=1),
    "systemd-run": Wrapper(
        "u=unit p=property E=setenv M=machine H=host description slice uid gid nice",
        refusal=_systemd,
    ),
    "xvfb-run": Wrapper(
        "e=error-file f=auth-file n=server-num p=xauth-protocol s=server-args w=wait"
    ),
    "srun": Wrapper(
        "A=account b=begin D=chdir M=clusters C=constraint S=core-spec c=cpus-per-task "
        "d=dependency m=distribution e=error x=exclude B=extra-node-info G=gpus i=input "
        "J=job-name L=licenses F=nodefile w=nodelist N=nodes n=ntasks o=output p=partition "
        "q=qos r=relative T=threads t=time W=wait "
        "acctg-freq bb bbf bcast-exclude cluster-constraint comment container container-id "
        "cores-per-socket cpu-bind cpu-freq cpus-per-gpu deadline delay-boot epilog export "
        "export-file gpu-bind gpu-freq gpus-per-node gpus-per-socket gpus-per-task gres "
        "gres-flags het-group hint jobid mail-type mail-user mcs-label mem mem-bind mem-per-cpu "
        "mem-per-gpu mincpus mpi msg-timeout network ntasks-per-core ntasks-per-gpu "
        "ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode power prefer priority "
        "profile prolog reservation signal slurmd-debug sockets-per-node switches task-epilog "
        "task-prolog thread-spec threads-per-core time-min tmp tres-bind tres-per-task wckey",
        moves=("chdir",),
        refusal=_slurm,
        starts=of_slurm,
    ),
    **dict.fromkeys(MPI_PROGRAMS, _MPIRUN),
}

_CONTAINER: Final = (
    "runs the command in a container, whose Python and files are not visible from here; "
    "run trainfit in that container, as in `trainfit plan -- python train.py …`"
)
_SHELL: Final = (
    "runs a shell's script, whose commands are not read; give the training command that it "
    "runs, as in `python train.py …`"
)
_QUEUE: Final = (
    "hands the command to a job queue, and runs nothing here; give the command that the job "
    "runs, as in `python train.py …`"
)
_PROCESSES: Final = (
    "starts the training in its own processes, where it cannot be simulated; give the command of "
    "one process, as in `python train.py …`"
)
_PASSING: Final = (
    "installs the program into an environment for this call only, into which trainfit cannot "
    "look; install it into an environment, and give the command that starts it there"
)
#: Why a program is not unwrapped.
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("horovodrun", "ray"), _PROCESSES),
    **dict.fromkeys(
        ("docker", "podman", "apptainer", "singularity", "enroot", "nerdctl"), _CONTAINER
    ),
    **dict.fromkeys(("sh", "bash", "zsh", "dash", "fish", "ksh"), _SHELL),
    **dict.fromkeys(("sbatch", "salloc", "qsub", "bsub", "condor_submit"), _QUEUE),
    **dict.fromkeys(("uvx", "pipx"), _PASSING),
    **dict.fromkeys(
        ("sudo", "doas", "su", "runuser"),
        "runs the command as another user, with that user's environment and Python; run trainfit "
        "as that user, and leave it out of the command",
    ),
    "ssh": "runs the command on another machine; run trainfit there",
}


def refuse(name: str) -> None:
    """Raise :class:`CommandError` where ``name`` is known to start no single process here, or is
    a whole command in quotes."""
    if reason := REFUSED.get(Path(name).name):
        raise CommandError(f"{name!r} {reason}")
    first, _, rest = name.partition(" ")
    if rest and not Path(name).exists() and (shutil.which(first) or first == "cd"):
        raise CommandError(
            f"{name!r} is one word, as its quotes say, and no shell reads it; write the training "
            "command without quotes around it: -- python train.py …"
        )


# ---
# Launchers of training processes in a command, unwrapped: rank 0 runs.


#: Read by Accelerate where the script does not say which mixed precision it wants.
ACCELERATE: Final = "ACCELERATE_MIXED_PRECISION"

#: autocast's dtypes in Accelerate's words.
PRECISIONS: Final = {"bfloat16": "bf16", "float16": "fp16"}


#: Seconds in which a launcher has read its words; it imports PyTorch.
_LIMIT_S: Final = 120.0
#: Console scripts that are launchers.
_PROGRAMS: Final = {
    "torchrun": "torchrun",
    "accelerate-launch": "accelerate",
    "deepspeed": "deepspeed",
    "ds": "deepspeed",
}
_READ: Final = f"{HASTENED}from trainfit.scripts.launchers import main; main()"


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher in a command: its name, the Python that runs it, and its words.

    They begin at ``begins`` and end before ``ends``, where its script is named; ``given`` is what
    they are at the tunables' present values, ``launched`` what it starts then, in a machine of
    ``gpus`` GPUs.
    """

    name: str
    python: Interpreter
    begins: int
    ends: int
    given: tuple[str, ...]
    launched: Launched
    gpus: int = 1

    def variables(self, plain: Sequence[str]) -> Mapping[str, str]:
        """What it sets in the environment of its process; ``plain`` is the whole command."""
        words = tuple(plain[self.begins : self.ends])
        if words == self.given:
            return self.launched.variables
        return _ask(self.python, self.name, (*words, plain[self.ends]), self.gpus).variables

    def on(self, gpus: int, plain: Sequence[str]) -> Launcher:
        """The same launcher in a machine of so many GPUs; ``plain`` is the whole command."""
        if not self.launched.per_gpu or gpus == self.gpus:
            return self
        launched = _ask(self.python, self.name, tuple(plain[self.begins :]), gpus)
        return dataclasses.replace(self, launched=launched, gpus=gpus)

    def require_one_process(self) -> None:
        """Raise :class:`CommandError` for a launcher of several."""
        if self.launched.processes > 1:
            raise CommandError(
                f"launcher {self.name!r} starts {self.launched.processes} processes, which only "
                "`trainfit plan` and `trainfit simulate` take together; give the share of one "
                f"process: {_ONE_MACHINE[self.name] if self.launched.machines > 1 else ''}"
                f"{_ONE[self.name]}, with its own batch size"
            )


#: How each but torchrun is told the number of machines.
_MACHINES: Final = {"accelerate": "--num_machines", "deepspeed": "--num_nodes"}
#: How each is told to use one machine.
_ONE_MACHINE: Final = dict.fromkeys(LAUNCHER_MODULES.values(), "--nnodes=1 ") | {
    "accelerate": "--num_machines 1 ",
    "deepspeed": "--num_nodes 1 ",
    **dict.fromkeys(("srun", "mpirun"), ""),
}
#: How each is told to start one process.
_ONE: Final = dict.fromkeys(LAUNCHER_MODULES.values(), "--nproc-per-node=1") | {
    "accelerate": "--num_processes 1",
    "deepspeed": "--num_gpus 1",
    "srun": "--ntasks=1 --nodes=1",
    "mpirun": "-np 1",
}


def launcher_of_tasks(tasks: Tasks, at: int, python: Interpreter) -> Launcher:
    """The launcher that starts tasks which are ranks themselves, of the program at ``at``."""
    assert tasks.count is not None
    launched = Launched(processes=tasks.count, machines=tasks.machines)
    return Launcher(tasks.starter, python, at, at, (), launched)


def launcher_of(plain: Sequence[str], at: int, python: Interpreter) -> Launcher | None:
    """The launcher that the program at ``plain[at]`` is, which ``python`` runs; ``None`` for any
    other program."""
    name = Path(plain[at]).name
    if name == "accelerate" and list(plain[at + 1 : at + 2]) == ["launch"]:
        return _launcher(name, python, plain, at + 2)
    return _launcher(_PROGRAMS[name], python, plain, at + 1) if name in _PROGRAMS else None


def launcher_of_module(
    plain: Sequence[str], name: str, at: int, python: Interpreter
) -> Launcher | None:
    """The launcher of ``python -m name``, whose arguments begin at ``plain[at]``; ``None`` for any
    other module."""
    launcher = LAUNCHER_MODULES.get(name)
    return None if launcher is None else _launcher(launcher, python, plain, at)


def _launcher(name: str, python: Interpreter, plain: Sequence[str], begins: int) -> Launcher:
    launched = _ask(python, name, tuple(plain[begins:]), 1)
    ends = len(plain) - launched.words
    return Launcher(name, python, begins, ends, tuple(plain[begins:ends]), launched)


@functools.lru_cache(maxsize=64)
def _ask(python: Interpreter, launcher: str, words: tuple[str, ...], gpus: int) -> Launched:
    """The launcher's own reading of its words, in a process of its interpreter."""
    try:
        ended = subprocess.run(
            [*python.start(_READ), launcher, str(gpus), *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_LIMIT_S,
        )
        found = Launched.from_json(ended.stdout.strip().rpartition("\n")[2])
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise CommandError(
            f"launcher {launcher!r} did not report what it starts ({error}); give the command of "
            "one "
            "process, as in `python train.py …`"
        ) from None
    if found.error:
        raise CommandError(
            f"launcher {launcher!r} rejects its arguments ({found.error}); correct them"
        )
    return found
