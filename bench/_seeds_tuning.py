"""Rows of the ACT article: its rules for tuning."""

from __future__ import annotations

from _seeds import (
    MIB,
    Answer,
    Row,
    Verdict,
    adds_to,
    agrees,
    condition,
    differs,
    gib,
    holds,
    impossible,
    ms,
    only,
    percent,
)
from _seeds_launch import by_depth, cores, predicted, rate, some_workers, tuned

ROWS: list[Row] = []
row = adds_to(ROWS, "act")


def remedy(plan: Answer, name: str) -> Answer:
    return only(plan["remedies"]["items"], name=name)


def wins(plan: Answer, name: str) -> bool:
    """Does a remedy save memory?"""
    return bool(remedy(plan, name)["saved_bytes"] > 0)


def saved(plan: Answer, name: str) -> str:
    """What a remedy saves of the device memory, and what it costs."""
    found, before = remedy(plan, name), plan["remedies"]["before"]["device_bytes"]
    if found["memory"] is None:
        raise LookupError(f"{name} {found['status']}: {found['reason']}")
    after = found["memory"]["device_bytes"]
    text = f"{gib(before):.2f} to {gib(after):.2f} GiB"
    if found["step_change"] is not None:
        text += f", a step {100 * found['step_change']:+.0f}%"
    return text


@row("practice", "Memory decides the batch size first: the largest that runs a whole epoch",
     "plan-act")  # fmt: skip
def largest(plan: Answer) -> Verdict:
    curve = {each["batch_size"]: each["samples_per_s"] for each in plan["speed"]["curve"]}
    most = plan["now"]["limits"]["memory"]
    gain = curve[most] / curve[8] - 1
    return condition(
        f"it sets the upper end, {most}; from 8 to {most} the samples/s grow by {percent(gain)}"
    )


@row("practice", "Watch max_memory_allocated() and nvidia-smi's figure", "plan-act")
def three_figures(plan: Answer) -> Verdict:
    now = plan["now"]["memory"]
    return holds(now["allocated_bytes"] <= now["reserved_bytes"] < now["device_bytes"],
        "three figures, told apart: "
        + ", ".join(f"{name} {gib(now[f'{name}_bytes']):.2f} GiB"
                    for name in ("allocated", "reserved", "device"))
    )  # fmt: skip


@row("practice", "Out of memory: a smaller batch comes first", "plan-act")
def smaller_batch(plan: Answer) -> Verdict:
    return condition(
        f"with accumulation, which keeps the effective batch: {saved(plan, 'accumulate')}; "
        f"checkpointing saves more here: {saved(plan, 'checkpoint')}"
    )


@row("practice", "Then: freeze the backbone", "plan-act")
def freeze(plan: Answer) -> Verdict:
    return holds(
        wins(plan, "freeze-backbone"),
        f"{saved(plan, 'freeze-backbone')}; it changes what is learned",
    )


@row("practice", "Then: gradient checkpointing", "plan-act")
def checkpointing(plan: Answer) -> Verdict:
    return holds(
        wins(plan, "checkpoint"), f"{saved(plan, 'checkpoint')}; the training stays the same"
    )


@row("practice", "Then: a lower input resolution", "plan-act")
def resolution(plan: Answer) -> Verdict:
    return holds(
        wins(plan, "lower-resolution"),
        f"{saved(plan, 'lower-resolution')}; small things in the images may be lost",
    )


@row("practice", "num_workers follows from what decoding and augmenting cost the CPU", "plan-act")
def workers_by_cost(plan: Answer) -> Verdict:
    found = tuned(plan)
    probe, step = found["probe"], found["step_s"]
    need = probe["fetch_s"] / step
    return agrees(
        f"a batch costs a worker {ms(probe['fetch_s'])}, a step the GPU at least {ms(step)}: "
        f"{need:.1f} workers' work"
    )


@row("practice", "Start from half of the physical cores", "plan-act")
def half_the_cores(plan: Answer) -> Verdict:
    found = tuned(plan)
    half = max(1, found["machine"]["physical_cores"] // 2)
    best = found["recommended"]["num_workers"]
    least, most = rate(found, num_workers=half), rate(found, num_workers=best)
    text = f"{half} give {least:.1f} batches/s on {cores(found)}, the {best} recommended {most:.1f}"
    return agrees(text) if least >= 0.98 * most else differs(text)


@row("practice", "Watch whether GPU-Util still drops to zero at times", "rehearse-1")
def watch_dips(run: Answer) -> Verdict:
    low = sum(each < 0.5 for each in run["timeline"]["busy_shares"])
    return holds(
        bool(run["dips"]) and low > 0,
        f"the rehearsal shows that curve without a GPU, with a cause for each dip: {low} of "
        f"{len(run['timeline']['busy_shares'])} windows below 50%, {len(run['dips'])} dips",
    )


@row("practice", "prefetch_factor is batches ahead per worker, paid for in RAM", "plan-act")
def prefetch_ram(plan: Answer) -> Verdict:
    found = tuned(plan)
    by_prefetch = {
        each["settings"]["prefetch_factor"]: each["ram_bytes"] / MIB
        for each in found["candidates"]
        if each["settings"]["num_workers"] == 2 and each["ram_bytes"]
    }
    low, high = min(by_prefetch), max(by_prefetch)
    return holds(
        by_prefetch[low] < by_prefetch[high],
        f"with 2 workers {low} ahead take {by_prefetch[low]:.0f} MiB, {high} ahead "
        f"{by_prefetch[high]:.0f} MiB",
    )


@row("practice", "2 to 4 batches ahead are stable; more with many workers gain nothing",
     "plan-act")  # fmt: skip
def prefetch_range(plan: Answer) -> Verdict:
    found = tuned(plan)
    workers = some_workers(found)
    few, many = (predicted(found, num_workers=workers, prefetch_factor=depth) for depth in (2, 8))
    return agrees(by_depth(found)) if many <= 1.02 * few else differs(by_depth(found))


@row("practice", "persistent_workers saves starting workers at each epoch", "rehearse-1")
def persistent_epochs(run: Answer) -> Verdict:
    lost = run["idle_s"].get("epoch", 0.0)
    ends = sum(each["cause"] == "epoch" for each in run["dips"])
    if not ends:
        return impossible("no epoch ended while it ran; --duration makes it longer")
    return holds(
        lost > 0, f"without it the GPU is idle at each end of an epoch for {ms(lost / ends)}"
    )


@row("practice", "The gain is larger where the data set is slow to set up", "plan-act")
def slow_setup(plan: Answer) -> Verdict:
    start = tuned(plan)["probe"]["start_s"]
    return condition(
        "a forked worker inherits the data set and starts in "
        f"{ms(start['fork'])}; a spawned one sets it up again"
        + (f" ({ms(start['spawn'])})" if "spawn" in start else "")
    )


@row("practice", "AMP should be on in nearly every job", "plan-act", "plan-leak", "plan-tiny")
def amp_by_default(act: Answer, old: Answer, tiny: Answer) -> Verdict:
    def change(plan: Answer) -> str:
        now, other = plan["now"], plan["other_amp"]
        off, on = (now, other) if now["amp"] == "off" else (other, now)
        return f"{ms(off['step_s'])} to {ms(on['step_s'])}"

    return condition(
        f"it wins on ACT (4090: {change(act)}) and loses where there are no Tensor cores (GTX 960, "
        f"ResNet-18: {change(old)}) or launches bound the step (T4, a tiny network: {change(tiny)})"
    )


@row("practice", "AMP makes the activations of CNN and Transformer much smaller", "plan-act")
def amp_memory(plan: Answer) -> Verdict:
    on, off = (plan[name]["memory"]["allocated_bytes"] for name in ("now", "other_amp"))
    return holds(
        on < 0.8 * off,
        f"ACT: {gib(off):.2f} to {gib(on):.2f} GiB, {percent(1 - on / off)} less: softmax and "
        "batch normalization stay in float32, and the casts are kept for the backward pass",
    )


@row("practice", "AMP uses the Tensor cores better", "plan-act")
def amp_speed(plan: Answer) -> Verdict:
    on, off = (plan[name]["step_s"] for name in ("now", "other_amp"))
    return holds(
        on < off,
        f"a step {ms(off)} to {ms(on)} (predicted), {percent(plan['speed']['mfu'])} of the "
        "peak: memory bandwidth bounds most of it",
    )


@row("practice", "Under AMP mind loss scale and numeric stability", "gpus-t4", "plan-vgg")
def loss_scale(card: Answer, plan: Answer) -> Verdict:
    dtypes = card["gpus"][0]["tensor_dtypes"]
    dtype = plan["amp_choice"]["dtype"]
    text = f"a T4's Tensor cores have {', '.join(dtypes)} and no bfloat16: {dtype} is chosen"
    return agrees(f"{text}, which needs a GradScaler; bfloat16 needs none") if (
        dtype == "float16"
    ) else differs(text)  # fmt: skip


@row("practice", "Some custom operators do not support bf16 or fp16", "plan-act")
def custom_operators(plan: Answer) -> Verdict:
    return impossible(
        "whether a custom compiled kernel accepts a dtype shows only on the GPU: `trainfit "
        "verify plan-act.json` on the GPU. The simulation stops at one without shape function, by "
        "name and line"
    )


@row("practice", "OMP_NUM_THREADS=1 keeps workers from starting threads of their own",
     "loader-blas")  # fmt: skip
def thread_limit(found: Answer) -> Verdict:
    if not found["variables"]:
        return differs("no variable is recommended for a data set that calls BLAS")
    names = ", ".join(f"{each['name']}={each['value']}" for each in found["variables"])
    workers = found["present"]["num_workers"]
    text = f"{names} is recommended where a batch calls OpenBLAS in {workers} workers"
    if "OMP_NUM_THREADS" in names:
        return agrees(text)
    return condition(f"{text}: the variable of the library that starts them")


@row("practice", "Without a limit scheduling and context switches slow the CPU",
     "loader-blas", "doctor-script")  # fmt: skip
def oversubscribed(found: Answer, script: Answer) -> Verdict:
    present, best = found["present"], found["recommended"]
    before = rate(found, num_workers=present["num_workers"], library_threads=None)
    after = rate(found, num_workers=best["num_workers"],
                 library_threads=best["library_threads"])  # fmt: skip
    threads = only(script["checks"], name="threads")["title"]
    text = f"{before:.3g} to {after:.3g} batches/s with the limit ({cores(found)}); {threads}"
    return agrees(text) if after > 1.05 * before else differs(text)
