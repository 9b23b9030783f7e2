"""The commands that answer the seeds' claims, each run once."""

from __future__ import annotations

import shlex
from typing import Final

from _seeds import Command

#: The article's launch line in the words of our example; what may be tuned is marked.
_ACT: Final = (
    "ACCELERATE_MIXED_PRECISION=bf16 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 taskset -c 0-31 "
    "python examples/act/train.py --dataset=data/act-example '--batch_size={batch_size:8}' "
    "'--num_workers={num_workers:12}' '--prefetch_factor={prefetch_factor:4}' "
    "'--persistent_workers={persistent_workers:true}' '--amp={amp:true}' --chunk_size=30 "
    "--epochs=80"
)
_TRAIN: Final = "examples/act/train.py --dataset=data/act-example"
_NETWORKS: Final = "python bench/seed_scripts/networks.py"
_MACHINES: Final = "tests/machines"
_CARDS: Final = (
    '"GTX 960 4GB" "RTX 3060 Laptop" "RTX 3060 8GB" "RTX 3060 12GB" "RTX 3060 Ti" "RTX 3070" T4'
)

_ALL: Final = (
    # The launch line, its memory and its speed.
    Command(
        "plan-act",
        'trainfit plan --gpu "RTX 4090" --cpu "cores=16,ghz=4,kind=12th gen" --probe-time 10 '
        "--remedies=freeze-backbone,checkpoint,lower-resolution,accumulate --output plan-act.json "
        f"-- {_ACT}",
    ),
    Command(
        "plan-colab",
        'trainfit plan --gpu "Colab T4" --no-remedies --probe-time 8 '
        f"-- python {_TRAIN} '--batch_size={{batch_size:8}}' '--num_workers={{num_workers:2}}'",
    ),
    Command(
        "gpus-for-act",
        f'trainfit gpus {_CARDS} "RTX 4090" --for plan-act.json',
        after=("plan-act",),
    ),
    *(
        Command(
            f"simulate-act-{batch}",
            f'trainfit simulate --gpu "RTX 4090" --output act{batch}.trainfit {_TRAIN} '
            f"--batch_size={batch} --amp=true",
        )
        for batch in (8, 16)
    ),
    Command(
        "memory-act",
        "trainfit memory act8.trainfit act16.trainfit",
        after=("simulate-act-8", "simulate-act-16"),
    ),
    Command("by-hand-act", "trainfit memory act8.trainfit --by-hand", after=("simulate-act-8",)),
    # The running DataLoader.
    *(
        Command(
            f"rehearse-{workers}",
            f"trainfit rehearse --step-time 15ms --duration 10s --num-workers {workers} "
            f"-- python {_TRAIN} --batch_size=1",
        )
        for workers in (1, 2)
    ),
    Command(
        "loader-blas",
        "trainfit loader --step-time 1ms --probe-time 10 -- python bench/seed_scripts/blas.py",
    ),
    # Inference at a fixed rate.
    Command(
        "plan-policy",
        'trainfit plan --gpu "RTX 4090" --cpu "cores=16,ghz=4,kind=12th gen" --no-loader '
        "--no-remedies -- python examples/act/policy.py",
    ),
    Command(
        "pace-here",
        "trainfit pace bench/seed_scripts/paced.py:act --setup bench/seed_scripts/paced.py:load "
        "--hz 30,60 --duration 4",
    ),
    Command("pace-article", "trainfit show pace-article.json"),
    # The machine.
    Command("doctor-machine", f"trainfit doctor --machine {_MACHINES}/workstation.json"),
    Command("doctor-cpu", f"trainfit doctor --cpu --machine {_MACHINES}/workstation.json"),
    Command(
        "doctor-script",
        "trainfit doctor --script bench/seed_scripts/habits.py "
        f"--machine {_MACHINES}/workstation.json --only threads,cores",
    ),
    *(
        Command(f"doctor-{name}", f"trainfit doctor --only gpu --machine {_MACHINES}/{name}.json")
        for name in ("cpu-only-torch", "version-mismatch", "no-driver")
    ),
    Command("doctor-server", f"trainfit doctor --machine {_MACHINES}/server-8gpu.json"),
    # GPUs by their figures.
    Command("gpus-t4", "trainfit gpus T4 --explain"),
    Command("gpus-4090", 'trainfit gpus "RTX 4090" --explain'),
    # Networks of the articles.
    Command(
        "simulate-vgg",
        'trainfit simulate --gpu "RTX 4090" --output vgg.trainfit '
        "bench/seed_scripts/networks.py --model=vgg16 --batch_size=32",
    ),
    Command("by-hand-vgg", "trainfit memory vgg.trainfit --by-hand", after=("simulate-vgg",)),
    Command(
        "simulate-forward",
        'trainfit simulate --gpu "RTX 4090" --output forward.trainfit '
        "bench/seed_scripts/forward.py",
    ),
    Command(
        "plan-vgg",
        "trainfit plan --gpu T4 --no-loader --output plan-vgg.json "
        "--remedies=global-pooling,inplace,lower-resolution,accumulate "
        f"-- {_NETWORKS} --model=vgg16 '--batch_size={{batch_size:32}}' '--amp={{amp:false}}'",
    ),
    Command("gpus-for-vgg", f"trainfit gpus {_CARDS} --for plan-vgg.json", after=("plan-vgg",)),
    Command(
        "plan-resnet152",
        'trainfit plan --gpu "RTX 3060 Laptop" --no-loader --remedies=smaller-model,accumulate '
        f"-- {_NETWORKS} --model=resnet152 '--batch_size={{batch_size:64}}'",
    ),
    Command(
        "plan-noise",
        'trainfit plan --gpu "RTX 4090" --no-loader --no-remedies --noise-scale 8 '
        f"-- {_NETWORKS} --model=resnet18 '--batch_size={{batch_size:64}}'",
    ),
    Command(
        "plan-leak",
        'trainfit plan --gpu "GTX 960 4GB" --no-loader --no-remedies '
        f"-- {_NETWORKS} --model=resnet18 --keep '--batch_size={{batch_size:64}}'",
    ),
    Command(
        "plan-evaluate",
        "trainfit plan --gpu T4 --no-loader --no-remedies "
        f"-- {_NETWORKS} --model=resnet18 --size=128 --evaluate '--batch_size={{batch_size:32}}'",
    ),
    Command(
        "plan-tiny",
        "trainfit plan --gpu T4 --no-loader --no-remedies --versus-cpu "
        "-- python bench/seed_scripts/tiny.py",
    ),
)

COMMANDS: Final = {command.name: command for command in _ALL}


def words(command: Command) -> list[str]:
    """What stands behind ``trainfit``, as the shell gives it to the program."""
    name, *rest = shlex.split(command.line)
    assert name == "trainfit", command.line
    return rest
