"""Jobs that cannot be planned: one line says why."""

from corpus.family import Family

FAMILIES = (
    Family(
        name="torchrun-two-processes",
        about="torchrun with two processes on one machine",
        packages=("torch",),
        command="torchrun --nproc-per-node=2 {scripts}/vae.py --batch-size={batch}",
        hand=None,
        expected="refused",
        refusal=r"torchrun' starts 2 processes.* one GPU is simulated.*--nproc-per-node=1",
    ),
    Family(
        name="accelerate-two-processes",
        about="accelerate launch with two processes",
        packages=("accelerate", "torchvision"),
        command="accelerate launch --num_processes 2 {scripts}/accelerate_loop.py "
        "--batch-size={batch}",
        cpu_command="accelerate launch --num_processes 1 --cpu {scripts}/accelerate_loop.py "
        "--batch-size={batch}",
        hand=None,
        expected="refused",
        refusal=r"accelerate' starts 2 processes.* one GPU is simulated.*--num_processes 1",
    ),
    Family(
        name="too-few-samples",
        about="40 samples, batches of 64, drop_last: no step is made",
        packages=("torch",),
        command="python {scripts}/no_step.py few --batch-size={batch}",
        starts=(64, 128),
        hand=None,
        expected="refused",
        refusal=r"no optimizer step: the data set has 40 samples, fewer than one batch of 64",
    ),
    Family(
        name="dry-run",
        about="a dry run: forward and backward of one batch, then the script ends",
        packages=("torch",),
        command="python {scripts}/no_step.py dry --batch-size={batch}",
        hand=None,
        expected="refused",
        refusal=r"ended after .* without an optimizer step .*plan a command that trains",
    ),
)
