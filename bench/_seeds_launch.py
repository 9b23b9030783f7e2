"""Rows of the ACT article: its launch command."""

from __future__ import annotations

import re
from collections.abc import Mapping

from _seeds import (
    Answer,
    Row,
    Verdict,
    adds_to,
    agrees,
    answered,
    condition,
    differs,
    holds,
    impossible,
    ms,
    percent,
)

ROWS: list[Row] = []
row = adds_to(ROWS, "act")


def part(plan: Answer, *names: str) -> Answer | None:
    """The part of the launch command of one of these names; plans before that lists had none."""
    found = [each for each in plan["launch_parts"] if each["name"] in names]
    return found[0] if found else None


def launch_part(plan: Answer, said: str, instead: Verdict, *names: str) -> Verdict:
    """Is it the article's value? ``instead`` is for a plan that does not list its parts."""
    found = part(plan, *names)
    if found is None:
        return instead
    value = found["value"] or found["present"]
    rests = f" ({found['evidence']})" if found["evidence"] else ""
    text = f"{found['status']} {value}".strip() + f": {found['reason']}{rests}"
    if found["status"] == "cannot tell":
        return impossible(text)
    same = value.casefold() == said.casefold() and found["status"] != "not set"
    return agrees(text) if same else differs(text)


def kept(plan: Answer, word: str, reason: str) -> Verdict:
    """A word that stays in the line because it is the user's."""
    if word not in plan["launch"]:
        return differs(f"{word} is not in the recommended line")
    return condition(f"kept: {reason}")


def tuned(plan: Answer) -> Answer:
    """What tuning the DataLoader found, on the machine that the bench runs on."""
    found: Answer = plan["loading"]["result"]
    return found


def predicted(found: Answer, **settings: object) -> float:
    """Batches a second that the model says of settings, at best."""
    return max(each["batches_per_s"] for each in asked(found) if _are(each, settings))


def asked(found: Answer) -> list[Answer]:
    """The settings that the model was asked about, those past the knee among them."""
    return [*found["candidates"], *found["too_many"]]


def rate(found: Answer, **settings: object) -> float:
    """Batches a second of settings: measured where they were, else predicted."""
    real = [each["measured_batches_per_s"] for each in found["confirmed"] if _are(each, settings)]
    known = [each for each in real if each is not None]
    return max(known) if known else predicted(found, **settings)


def _are(each: Answer, settings: Mapping[str, object]) -> bool:
    return all(each["settings"][name] == value for name, value in settings.items())


def some_workers(found: Answer) -> int:
    """The recommended number of workers, or the fastest other than none."""
    best: int = found["recommended"]["num_workers"]
    counts = {each["settings"]["num_workers"] for each in found["candidates"]} - {0}
    return best or max(counts, key=lambda count: predicted(found, num_workers=count))


def by_depth(found: Answer) -> str:
    """Predicted rates by the number of batches ahead, for the recommended number of workers."""
    workers = some_workers(found)
    depths = sorted(
        {
            each["settings"]["prefetch_factor"]
            for each in found["candidates"]
            if each["settings"]["num_workers"] == workers
        }
    )
    rates = (
        f"{depth}: {predicted(found, num_workers=workers, prefetch_factor=depth):.2f}"
        for depth in depths
    )
    return f"batches/s by batches ahead of each of {workers} workers: {', '.join(rates)}"


def argument(plan: Answer, name: str) -> str:
    """The value of an option in the launch line."""
    found = re.search(rf"--{name}=(\S+)", plan["launch"])
    if found is None:
        raise LookupError(f"no --{name} in the launch line")
    return found[1]


def cores(found: Answer) -> str:
    """The cores that a DataLoader was measured on."""
    return f"{found['machine']['usable_cores']:g} cores"


# --- The rows -------------------------------------------------------------------------
@row("practice", "ACCELERATE_MIXED_PRECISION=bf16 switches mixed precision on", "plan-act")
def accelerate(plan: Answer) -> Verdict:
    read = "Accelerate alone reads it; a script with autocast of its own, as here, does not"
    word = "ACCELERATE_MIXED_PRECISION=bf16"
    return launch_part(plan, "bf16", kept(plan, word, read), "ACCELERATE_MIXED_PRECISION")


@row("practice", "OMP_NUM_THREADS=1, with 12 workers", "plan-act")
def openmp(plan: Answer) -> Verdict:
    pools = tuned(plan)["probe"]["thread_pools"]
    reason = f"threads that a batch starts in a worker here: {pools or 'none'}"
    return launch_part(plan, "1", kept(plan, "OMP_NUM_THREADS=1", reason), "OMP_NUM_THREADS")


@row("practice", "MKL_NUM_THREADS=1, with 12 workers", "plan-act")
def mkl(plan: Answer) -> Verdict:
    pools = tuned(plan)["probe"]["thread_pools"]
    reason = f"MKL is {'' if 'mkl' in pools else 'not '}among the libraries that a batch uses here"
    return launch_part(plan, "1", kept(plan, "MKL_NUM_THREADS=1", reason), "MKL_NUM_THREADS")


@row("practice", "taskset -c 0-31 binds the job to 32 CPUs", "plan-act", "doctor-cpu")
def taskset(plan: Answer, machine: Answer) -> Verdict:
    there = machine["machine"]["cpu"]["logical_cpus"]["value"]
    reason = f"a 12th-generation Intel has {there} CPUs at most, so that 0-31 leaves out none"
    return launch_part(
        plan, "taskset -c 0-31", kept(plan, "taskset -c 0-31", reason),
        "taskset", "CPU affinity", "cpu affinity", "affinity", "numactl",
    )  # fmt: skip


@row("practice", "AMP on (use_amp=true)", "plan-act")
def amp(plan: Answer) -> Verdict:
    found = plan["amp_choice"]
    on = found["dtype"] != "off"
    return agrees(found["reason"]) if on else differs(found["reason"])


@row("practice", "batch_size=8", "plan-act")
def batch_size(plan: Answer) -> Verdict:
    best, limits = plan["now"]["recommended_batch"], plan["now"]["limits"]
    text = (
        f"{best} is recommended: 95% of the best samples/s; memory allows {limits['memory']}, "
        f"largest {plan['now']['largest_batch']}"
    )
    return agrees(text) if best == 8 else differs(text)


def setting(plan: Answer, name: str, said: str) -> Verdict:
    """What the launch line gives for a setting of the DataLoader, and where that is from."""
    found = tuned(plan)
    here, value = found["recommended"][name], argument(plan, name)
    text = f"{value} for the 16 cores that are planned for; {here} on the {cores(found)} here"
    instead = agrees(text) if value == said else differs(text)
    return launch_part(plan, said, instead, name)


@row("practice", "num_workers=12", "plan-act")
def num_workers(plan: Answer) -> Verdict:
    return setting(plan, "num_workers", "12")


@row("practice", "prefetch_factor=4", "plan-act")
def prefetch(plan: Answer) -> Verdict:
    said = setting(plan, "prefetch_factor", "4")
    return Verdict(said.outcome, f"{said.text} ({by_depth(tuned(plan))})")


@row("practice", "persistent_workers=true", "plan-act")
def persistent(plan: Answer) -> Verdict:
    return setting(plan, "persistent_workers", "true")


@row("practice", "chunk_size=30, n_action_steps=30: one call of the network for 30 actions",
     "plan-policy")  # fmt: skip
def chunk(plan: Answer) -> Verdict:
    now = plan["speed"]["now"]["seconds"]
    return answered(
        f"{ms(now)} a call of the network; at 30 Hz one falls due each second, and `trainfit pace` "
        "tells such calls from those that take from the queue"
    )


@row("practice", "video_backend=pyav: video is decoded in the workers", "plan-act")
def video(plan: Answer) -> Verdict:
    parts = {each["name"]: each["share"] for each in tuned(plan)["probe"]["parts"]}
    decode = parts["decode"]
    return holds(decode > 0.2, f"decoding is {percent(decode)} of a batch's time in a worker")


@row("practice", "image transforms in the workers", "plan-act")
def transforms(plan: Answer) -> Verdict:
    parts = {each["name"]: each["share"] for each in tuned(plan)["probe"]["parts"]}
    return answered(f"transforms are {percent(parts['transform'])} of a batch's time")


@row("practice", "epochs=80: how long does that take?", "plan-act")
def epochs(plan: Answer) -> Verdict:
    epoch = plan["speed"]["epoch_s"]
    return answered(f"{80 * epoch:.0f} s on the GPU: an epoch of our {plan['samples']} samples "
                    f"needs {epoch:.2f} s")  # fmt: skip


@row("practice", "Other arguments of the line (repository ids, folders, trackers)", "plan-act")
def others(plan: Answer) -> Verdict:
    assert "--chunk_size=30 --epochs=80" in plan["launch"]
    return answered(
        f"passed on untouched; what the run writes is kept away ({plan['protection']['kind']}), "
        "trackers are disabled in the simulation"
    )
