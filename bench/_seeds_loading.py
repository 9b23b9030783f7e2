"""Rows of the article on GPU memory, utilisation, batch size and workers."""

from __future__ import annotations

from _seeds import (
    MIB,
    Answer,
    Row,
    Verdict,
    adds_to,
    agrees,
    answered,
    changes,
    condition,
    differs,
    gib,
    holds,
    impossible,
    ms,
    only,
    percent,
)
from _seeds_launch import asked, cores, predicted, some_workers, tuned

ROWS: list[Row] = []
row = adds_to(ROWS, "utilisation")


def device(memory: Answer, batch: int) -> float:
    """GiB of the device at a batch size."""
    return gib(only(memory["batches"]["points"], batch_size=batch)["device_bytes"])


def by_batch(plan: Answer) -> dict[int, float]:
    """Samples a second by batch size."""
    return {each["batch_size"]: each["samples_per_s"] for each in plan["speed"]["curve"]}


# --- What the terms mean ------------------------------------------------------------------------
@row("practice", "A GPU's memory depends on model, batch size and dtype", "plan-vgg")
def depends(plan: Answer) -> Verdict:
    kinds = plan["now"]["by_kind_bytes"]
    model = sum(kinds[kind] for kind in ("parameter", "gradient", "optimizer_state"))
    on, off = (plan[name]["memory"]["allocated_bytes"] for name in ("other_amp", "now"))
    return holds(
        on < off,
        f"VGG16, batch 32: {gib(model):.2f} GiB of weights, gradients and Adam; "
        f"{gib(off):.2f} in all, {gib(on):.2f} with AMP",
    )


@row("formula", "4 GB at batch 32 make 8 GB at batch 64", "memory-act")
def doubling(memory: Answer) -> Verdict:
    once, twice = device(memory, 16), device(memory, 32)
    return holds(
        twice > 1.95 * once,
        f"a part does not grow: ACT uses {once:.2f} GiB at 16 and {twice:.2f} at 32, "
        f"{twice / once:.2f} times",
    )


@row("practice", "GPU utilisation is how busy the GPU is", "doctor-machine")
def utilisation(machine: Answer) -> Verdict:
    (gpu,) = machine["machine"]["gpus"]["value"]
    return condition(
        f"the share of time with a kernel running ({gpu['utilisation']['source']}), as `doctor` "
        "says: one small kernel counts as 100%"
    )


@row("symptom", "One GPU at 90%, the other at 50%: an uneven load", "doctor-server")
def uneven(machine: Answer) -> Verdict:
    count = len(machine["machine"]["gpus"]["value"])
    shared = [each for each in machine["checks"] if each["kind"] == "gpu_shared"]
    narrow = [each for each in machine["checks"] if each["kind"] == "pcie_width_reduced"]
    return condition(
        f"`doctor` finds what makes one of {count} GPUs slower ({shared[0]['title']}; "
        f"{narrow[0]['title']}); an uneven load of the script itself needs the GPUs"
    )


@row("practice", "A larger batch is faster, for more memory", "plan-act", "memory-act")
def larger(plan: Answer, memory: Answer) -> Verdict:
    curve = by_batch(plan)
    return condition(
        f"up to the saturation: ACT {curve[1]:.0f} samples/s at 1, {curve[8]:.0f} at 8, "
        f"{curve[32]:.0f} at 32, for {device(memory, 8):.1f} and {device(memory, 32):.1f} GiB"
    )


@row("symptom", "Out of memory: a smaller batch, or more GPUs", "plan-resnet152")
def out_of_memory(plan: Answer) -> Verdict:
    now = plan["now"]
    return holds(
        not now["fits"] and 0 < now["largest_batch"] < 64,
        f"ResNet-152 at 64 needs {gib(now['memory']['device_bytes']):.2f} of "
        f"{gib(plan['gpu_memory_bytes']):.2f} GiB: largest batch {now['largest_batch']}, or "
        f"{', '.join(plan['other_gpus'][:2])}; more GPUs of 1/n of the batch each: the same figure",
    )


@row("practice", "pin_memory fixes data in GPU memory; torch.cuda.pin_memory_device() sets it",
     "plan-act")  # fmt: skip
def pinned(plan: Answer) -> Verdict:
    found = tuned(plan)
    workers = some_workers(found)
    with_it, without = (
        predicted(found, num_workers=workers, pin_memory=pin) for pin in (True, False)
    )
    return differs(
        "it locks pages of the CPU's RAM, by DataLoader(pin_memory=True): "
        f"{with_it:.2f} batches/s with, {without:.2f} without (copies emulated: no GPU here)"
    )


@row("practice", "num_workers is the number of threads that load; more load faster", "plan-act")
def workers(plan: Answer) -> Verdict:
    found = tuned(plan)
    counts = sorted({each["settings"]["num_workers"] for each in found["candidates"]})
    shown = ", ".join(f"{n}: {predicted(found, num_workers=n):.2f}" for n in counts[:5])
    return condition(f"they are processes; up to the {cores(found)} (batches/s {shown})")


@row("practice", "Few CPU cores or little data: more workers gain nothing and waste", "plan-act")
def waste(plan: Answer) -> Verdict:
    found = tuned(plan)
    best, most = some_workers(found), most_workers(found)
    rates = [predicted(found, num_workers=count) for count in (best, most)]
    text = (
        f"{best} workers {rates[0]:.2f} batches/s and {ram(found, best):.0f} MiB of RAM, {most} "
        f"{rates[1]:.2f} and {ram(found, most):.0f} MiB, on {cores(found)}"
    )
    return agrees(text) if rates[1] < 1.05 * rates[0] else differs(text)


def most_workers(found: Answer) -> int:
    """The largest number of workers that the model was asked about."""
    return max(each["settings"]["num_workers"] for each in asked(found))


def ram(found: Answer, workers: int) -> float:
    """MiB that this many workers take, at the least."""
    return min(
        each["ram_bytes"] / MIB
        for each in asked(found)
        if each["settings"]["num_workers"] == workers
    )


@row("symptom", "One core at 90%, another at 50%: uneven preparation of data", "plan-act")
def uneven_cores(plan: Answer) -> Verdict:
    found = tuned(plan)
    workers = some_workers(found)
    busy = max(
        each["busy_cores"]
        for each in found["candidates"]
        if each["settings"]["num_workers"] == workers
    )
    return condition(
        "workers are moved between cores, so that a single core's share says little; `loader` "
        f"gives the cores kept busy: {busy:.1f} of {cores(found)} with {workers} workers"
    )


# --- The experiments ----------------------------------------------------------------------------
@row("formula", "Memory = model + batch size x memory of a sample", "memory-act")
def formula(memory: Answer) -> Verdict:
    batches = memory["batches"]
    off = [each["device_bytes"] / each["line_bytes"] - 1 for each in batches["points"]]
    return condition(
        f"for what is allocated, exactly (law: {batches['law']}); what nvidia-smi shows lies "
        f"{100 * min(off):+.1f} to {100 * max(off):+.1f}% from such a line"
    )


@row("formula", "At batch 1, 3 and 32 the memory is not in proportion to the batch", "memory-act")
def proportion(memory: Answer) -> Verdict:
    ratio = device(memory, 32) / device(memory, 1)
    return holds(ratio < 24, f"32 times the batch uses {ratio:.1f} times the memory (ACT)")


@row("symptom", "GPU-Util jumps between 0 and 99%, with pauses of 1 to 2 s", "rehearse-1")
def jumps(run: Answer) -> Verdict:
    shares = run["timeline"]["busy_shares"]
    longest = max((each["idle_s"] for each in run["dips"]), default=0.0)
    return holds(
        min(shares) < 0.2 and max(shares) > 0.8,
        f"rehearsed as nvidia-smi reads it: {percent(min(shares))} to {percent(max(shares))} of "
        f"{ms(run['timeline']['window_s'])} each, the longest dip {ms(longest)}, with its cause",
    )


@row("symptom", "The GPU waits for the transfer; then it computes for half a second", "rehearse-1",
     "plan-act")  # fmt: skip
def transfer(run: Answer, plan: Answer) -> Verdict:
    now = plan["speed"]["now"]
    return holds(
        now["copies_s"] > 0.5 * now["seconds"],
        f"it waits {percent(run['overall']['waiting_share'])} of the time for batches to be made "
        f"({', '.join(run['idle_s'])}); copying one of ACT's costs {ms(now['copies_s'])} of a step "
        f"of {ms(now['seconds'])}",
    )


@row("practice", "The limit is RAM's bandwidth and the CPU: buy faster memory", "plan-act")
def faster_ram(plan: Answer) -> Verdict:
    found = tuned(plan)
    probe = found["probe"]
    busy = probe["fetch_cpu_s"] / probe["fetch_s"]
    return condition(
        f"measure first: limit here {found['limit']}, CPU time is {percent(busy)} of a batch's; "
        f"changes: {changes(found['advice'][:3]) or 'none needed'}"
    )


@row("symptom", "batch 1, 1 worker: GPU-Util is often 0", "rehearse-1")
def one_worker(run: Answer) -> Verdict:
    steady = run["steady"]
    waits = steady["waiting_share"]
    text = f"waits for data {percent(waits)} of the time, at a step of {ms(run['step_s'])}"
    return agrees(text) if waits > 0.02 else differs(text)


@row("symptom", "batch 1, 8 workers: rarely 0", "rehearse-1", "rehearse-2")
def more_workers(one: Answer, two: Answer) -> Verdict:
    before, after = (each["steady"]["busy_share"] for each in (one, two))
    text = f"busy {percent(before)} with 1, {percent(after)} with 2 workers, as many as cores here"
    return agrees(text) if after > before else differs(text)


@row("practice", "So workers raise GPU-Util and with it the speed", "rehearse-1", "rehearse-2")
def raises(one: Answer, two: Answer) -> Verdict:
    before, after = (each["steady"]["samples_per_s"] for each in (one, two))
    most = 1 / one["step_s"]
    text = f"{before:.1f} samples/s with 1 worker, {after:.1f} with 2, of at most {most:.1f}"
    return agrees(text) if after > before else differs(text)


@row("command", "lscpu: the number of CPUs", "doctor-cpu")
def lscpu(machine: Answer) -> Verdict:
    cpu = machine["machine"]["cpu"]
    return answered(
        f"{cpu['logical_cpus']['value']} CPUs of {cpu['physical_cores']['value']} cores; and those "
        f"that a job gets by affinity and quota ({cpu['usable_cores']['value']:g}), which lscpu "
        "does not say"
    )


@row("practice", "Set num_workers by the number of CPUs", "plan-act")
def by_cpus(plan: Answer) -> Verdict:
    found = tuned(plan)
    best = found["recommended"]["num_workers"]
    need = found["probe"]["fetch_s"] / found["step_s"]
    return condition(
        f"they are the upper end; what a batch costs decides: {need:.1f} workers' work a step, "
        f"{best} recommended on {cores(found)}"
    )


@row("symptom", "Too many workers: saving weights is very slow", "plan-act")
def saving(plan: Answer) -> Verdict:
    found = tuned(plan)
    alone = found["save_alone_s"]
    by_count = {each["settings"]["num_workers"]: each["save_s"] for each in asked(found)}
    most = max(count for count, seconds in by_count.items() if seconds is not None)
    return holds(
        by_count[most] > 1.2 * alone,
        f"a checkpoint needs {by_count[most] / alone:.1f} times as long with {most} workers as "
        f"without, on {cores(found)} (simulated)",
    )


@row("symptom", "16 workers read faster than 32", "plan-act")
def sixteen(plan: Answer) -> Verdict:
    found = tuned(plan)
    best, most = some_workers(found), most_workers(found)
    rates = [predicted(found, num_workers=count) for count in (best, most)]
    text = (
        f"{best} workers {rates[0]:.2f} batches/s, {most} workers {rates[1]:.2f} ({cores(found)}; "
        "16 and 32 need a machine with as many)"
    )
    return agrees(text) if rates[1] <= 1.02 * rates[0] else differs(text)


@row("practice", "Workers are chosen together with the batch size", "plan-act")
def together(plan: Answer) -> Verdict:
    loading = plan["loading"]
    return holds(
        loading["batch_size"] == plan["now"]["recommended_batch"],
        f"`plan` tunes the DataLoader at the batch size recommended: {loading['batch_size']}",
    )


# --- The summary --------------------------------------------------------------------------------
@row("practice", "A small batch: much time goes into transfers, the GPU is used badly", "plan-act")
def small_batch(plan: Answer) -> Verdict:
    one = only(plan["speed"]["curve"], batch_size=1)
    return holds(
        one["copies_s"] > one["host_s"],
        f"it is launching kernels, not transfers: at batch 1 {ms(one['host_s'])} of launches and "
        f"{ms(one['copies_s'])} of copies in {ms(one['seconds'])}, {one['samples_per_s']:.0f} "
        "samples/s",
    )


@row("practice", "Several GPUs by DataParallel or DistributedDataParallel", "doctor-script")
def several(script: Answer) -> Verdict:
    found = only(script["script"]["findings"], kind="data-parallel")
    line, cause = found["place"]["line"], found["cause"].partition(":")[0]
    return condition(f"not DataParallel (line {line}): {cause}; "
                     "what several GPUs gain is not planned, one process is")  # fmt: skip


@row("practice", "An even load of several GPUs", "doctor-server")
def even(machine: Answer) -> Verdict:
    return impossible(
        "one process on one GPU is simulated; on the machine `trainfit doctor` and `nvidia-smi "
        "dmon` during a run with torchrun"
    )


@row("practice", "Pinned memory: mind its lifetime and how much of it there is", "plan-act")
def pinned_ram(plan: Answer) -> Verdict:
    found = tuned(plan)
    size = found["probe"]["batch_bytes"]
    return answered(
        f"{size / MIB:.0f} MiB a batch; the RAM of each setting is held against what is free "
        f"({gib(found['machine']['available_bytes']):.1f} GiB)"
    )


@row("practice", "Mixed precision lowers memory and raises utilisation", "plan-vgg")
def mixed(plan: Answer) -> Verdict:
    off, on = plan["now"], plan["other_amp"]
    return holds(
        on["memory"]["device_bytes"] < off["memory"]["device_bytes"],
        f"VGG16 on a T4: {gib(off['memory']['device_bytes']):.2f} to "
        f"{gib(on['memory']['device_bytes']):.2f} GiB, a step {ms(off['step_s'])} to "
        f"{ms(on['step_s'])}",
    )


@row("practice", "… as weights and gradients are kept in FP16", "plan-vgg")
def half_weights(plan: Answer) -> Verdict:
    off, on = (plan[name]["by_kind_bytes"] for name in ("now", "other_amp"))
    assert plan["other_amp"]["amp"] == "float16"
    less = ", ".join(
        f"{kind} {off[kind] / MIB:.0f} to {on[kind] / MIB:.0f} MiB"
        for kind in off
        if on[kind] < 0.9 * off[kind]
    )
    return holds(
        on["parameter"] < 0.6 * off["parameter"],
        f"weights stay in float32 under autocast ({off['parameter'] / MIB:.0f} and "
        f"{on['parameter'] / MIB:.0f} MiB); less at the peak: {less}",
    )


@row("practice", "Mixed precision may cost stability and accuracy", "plan-vgg")
def stability(plan: Answer) -> Verdict:
    return impossible(
        f"{plan['amp_choice']['dtype']} with a GradScaler is chosen for the T4; what it does to "
        "the loss shows in a training run: compare the first some hundred steps with `--amp=false`"
    )
