"""Jobs that cannot be planned: one line says why."""

from corpus.family import Family

FAMILIES = (
    Family(
        name="torchrun-two-machines",
        about="torchrun with two processes on each of two machines",
        packages=("torch",),
        command="torchrun --nnodes=2 --nproc-per-node=2 {scripts}/vae.py --batch-size={batch}",
        hand=None,
        expected="refused",
        refusal=r"torchrun' starts processes on 2 machines.*--nnodes=1",
    ),
    Family(
        name="accelerate-two-machines",
        about="accelerate launch with a process on each of two machines",
        packages=("accelerate", "torchvision"),
        command="accelerate launch --num_machines 2 --num_processes 2 {scripts}/accelerate_loop.py "
        "--batch-size={batch}",
        cpu_command="accelerate launch --num_processes 1 --cpu {scripts}/accelerate_loop.py "
        "--batch-size={batch}",
        hand=None,
        expected="refused",
        refusal=r"accelerate' starts processes on 2 machines.*--num_machines 1",
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
