"""Rows of the article on a rented T4: the memory and the speed of jobs."""

from __future__ import annotations

from _seeds import (
    GIB,
    MIB,
    Answer,
    Row,
    Verdict,
    adds_to,
    agrees,
    answered,
    condition,
    differs,
    gib,
    holds,
    impossible,
    ms,
    only,
    percent,
)
from _seeds_memory import vgg_results

ROWS: list[Row] = []
row = adds_to(ROWS, "t4")


# --- Memory of a model --------------------------------------------------------------------------
@row("formula", "Memory is results with their gradients, and parameters with theirs", "by-hand-vgg")
def two_parts(hand: Answer) -> Verdict:
    shown = {each["name"]: each["simulated_bytes"] for each in hand["rows"]}
    rest = shown["temporaries, workspaces"]
    return condition(
        f"and temporaries and workspaces, {gib(rest):.2f} of {gib(hand['allocated_bytes']):.2f} "
        "GiB at VGG16's peak"
    )


def optimizer(memory: Answer, name: str, said: float) -> Verdict:
    rows, trained = memory["optimizers"]["rows"], memory["optimizers"]["trained_bytes"]
    found = only(rows, name=name)
    between, peak = (found[key] / trained for key in ("between_steps_bytes", "peak_bytes"))
    text = f"{between:.2f} x the parameters, said {said:g}"
    if abs(between - said) > 0.05:
        return differs(text)
    return agrees(text) if peak < 1.05 * between else condition(
        f"{text}; {peak:.2f} while its step runs (foreach)"
    )  # fmt: skip


@row("formula", "SGD: twice the parameters", "memory-act")
def sgd(memory: Answer) -> Verdict:
    return optimizer(memory, "SGD", 2)


@row("formula", "SGD with momentum: three times", "memory-act")
def momentum(memory: Answer) -> Verdict:
    return optimizer(memory, "SGD(momentum=0.9)", 3)


@row("formula", "Adam: four times", "memory-act")
def adam(memory: Answer) -> Verdict:
    return optimizer(memory, "Adam", 4)


@row("formula", "Training keeps the result of every layer", "by-hand-act")
def every_result(hand: Answer) -> Verdict:
    gone = only(hand["causes"], name="not_kept")["nbytes"]
    place = only(hand["causes"], name="in_place")["nbytes"]
    return holds(
        gone == 0 == place,
        f"ACT: {gib(-gone):.2f} GiB of results no backward formula needs are freed at once, "
        f"{gib(-place):.2f} GiB are computed in place",
    )


@row("formula", "… and the gradient of each result: twice the memory", "by-hand-act", "by-hand-vgg")
def twice(act: Answer, vgg: Answer) -> Verdict:
    return holds(
        act["most_temporaries_bytes"] > 0.5 * act["by_hand_bytes"],
        "the backward pass frees them as it goes: all its temporaries together have "
        f"{act['most_temporaries_bytes'] / MIB:.0f} MiB at most (ACT), "
        f"{vgg['most_temporaries_bytes'] / MIB:.0f} MiB (VGG16)",
    )


@row("formula", "Parameters' memory does not depend on the batch; results grow with it",
     "memory-act")  # fmt: skip
def independent(memory: Answer) -> Verdict:
    kinds = memory["batches"]["per_sample_by_kind_bytes"]
    grows = ", ".join(f"{kind} {nbytes / MIB:.0f} MiB" for kind, nbytes in kinds.items())
    fixed = {"parameter", "gradient", "optimizer_state"}
    return agrees(f"a sample adds {grows}") if not fixed & set(kinds) else differs(grows)


@row("formula", "A layer's result has B x C x H x W numbers", "memory-act")
def shape(memory: Answer) -> Verdict:
    found = max(
        each["nbytes"] for each in memory["peak"]["largest"] if "bn1" in each["module"]
    )  # fmt: skip
    numbers = 8 * 64 * 240 * 320
    return holds(
        found in (2 * numbers, 4 * numbers),
        f"ACT's first convolution at 640x480: 8 x 64 x 240 x 320 = {numbers:,} numbers; the "
        f"largest of its results has {found / numbers:.2f} bytes a number",
    )


@row("practice", "Predict under torch.no_grad()", "plan-evaluate")
def no_grad(plan: Answer) -> Verdict:
    found = plan["inference"]
    with_it, without = (
        gib(found[name]["device_bytes"]) for name in ("without_gradients", "with_gradients")
    )
    return holds(with_it < without, f"ResNet-18, batch 32: {without:.2f} to {with_it:.2f} GiB")


@row("formula", "Results of convolutions take most, parameters little", "by-hand-vgg")
def convolutions(hand: Answer) -> Verdict:
    results = 4 * 32 * vgg_results(hand)
    weights = 16 * hand["parameters"]
    return condition(
        f"by hand results {gib(results):.2f} GiB, parameters and Adam {gib(weights):.2f}; at the "
        "peak, late in the backward pass, little of the results is left"
    )


def remedy(plan: Answer, name: str) -> Answer:
    return only(plan["remedies"]["items"], name=name)


def wins(plan: Answer, name: str) -> bool:
    """Does a remedy save memory?"""
    return bool(remedy(plan, name)["saved_bytes"] > 0)


def saving(plan: Answer, name: str) -> str:
    found, before = remedy(plan, name), plan["remedies"]["before"]
    return f"{gib(before['device_bytes']):.2f} to {gib(found['memory']['device_bytes']):.2f} GiB"


@row("practice", "Save memory: global pooling instead of fully connected layers", "plan-vgg")
def pooling(plan: Answer) -> Verdict:
    return holds(
        wins(plan, "global-pooling"),
        f"{saving(plan, 'global-pooling')} (VGG16, T4); another head, to be trained",
    )


@row("practice", "Save memory: a smaller batch", "plan-vgg")
def batch(plan: Answer) -> Verdict:
    return holds(
        wins(plan, "accumulate"),
        f"{saving(plan, 'accumulate')} with half the micro-batch and two accumulated",
    )


@row("practice", "Save memory: pool, so that feature maps are smaller", "plan-vgg")
def smaller_maps(plan: Answer) -> Verdict:
    return holds(
        wins(plan, "lower-resolution"), f"{saving(plan, 'lower-resolution')} with half the pixels"
    )


@row("practice", "Save memory: in-place operations", "plan-vgg")
def inplace(plan: Answer) -> Verdict:
    found = remedy(plan, "inplace")
    return condition(f"{found['status']} to VGG16: {found['reason']}")


@row("formula", "Memory is not strictly in proportion to the batch", "plan-vgg")
def proportion(plan: Answer) -> Verdict:
    now = plan["now"]
    share = gib(now["memory"]["device_bytes"]) / gib(plan["gpu_memory_bytes"])
    even = int(now["batch_size"] / share)
    return holds(
        now["largest_batch"] != even,
        f"batch {now['batch_size']} uses {percent(share)} of the T4; in proportion {even} would "
        f"fit, {now['largest_batch']} do",
    )


# --- Speed --------------------------------------------------------------------------------------
@row("practice", "A larger batch is not always faster", "plan-vgg")
def not_always(plan: Answer) -> Verdict:
    chosen = plan["amp_choice"]["configuration"] or plan["now"]
    return holds(
        chosen["limits"]["knee"] < chosen["largest_batch"],
        f"saturation at {chosen['limits']['knee']}, largest {chosen['largest_batch']} (VGG16, "
        f"{chosen['amp']}, T4)",
    )


@row("formula", "At peak utilisation a batch twice as large needs twice the time", "plan-act")
def twice_as_long(plan: Answer) -> Verdict:
    curve = {each["batch_size"]: each["seconds"] for each in plan["speed"]["curve"]}
    past, before = curve[32] / curve[16], curve[2] / curve[1]
    text = f"{past:.2f} times from 16 to 32, past the saturation; {before:.2f} from 1 to 2 (ACT)"
    return agrees(text) if 1.9 < past < 2.1 else differs(text)


@row("formula", "FLOPS is a rate, FLOPs are an amount of work", "plan-vgg")
def flops(plan: Answer) -> Verdict:
    return holds(
        0 < plan["speed"]["mfu"] < 1,
        f"both are counted apart; together they are the MFU, {percent(plan['speed']['mfu'])} of "
        "the T4's peak for VGG16",
    )


@row("formula", "The more FLOPs, the longer a step", "plan-vgg")
def more_work(plan: Answer) -> Verdict:
    found = remedy(plan, "global-pooling")
    work, step = 100 * found["extra"]["flops_share"], 100 * found["step_change"]
    return condition(
        f"only where arithmetic bounds it: global pooling has {work:+.0f}% FLOPs and makes a step "
        f"{step:+.0f}%; the step is bound by {plan['speed']['now']['bound']}"
    )


# --- What the author met ------------------------------------------------------------------------
@row("symptom", "The same T4 is far slower on Colab: its CPU", "plan-colab")
def colab(plan: Answer) -> Verdict:
    loading, step = plan["loading"], plan["now"]["step_s"]
    most = loading["input_at_most"]
    text = (
        f"the GPU consumes {1 / step:.2f} batches/s of ACT, the {plan['cpu']['cores']:g} core of "
        f"{plan['cpu']['name'].split(' is ')[0]} gives {most:.2f} at most"
    )
    if most < 1 / step:
        return agrees(text)
    return condition(
        f"{text}: the CPU is the limit of a job whose batches cost it over {most * step:.1f} times "
        "as much next to the step"
    )


@row("practice", "First what fits, then how fast it is", "plan-act")
def first_memory(plan: Answer) -> Verdict:
    limits = plan["now"]["limits"]
    return holds(
        limits["knee"] <= limits["memory"],
        f"memory allows {limits['memory']}, then the smallest with 95% of the best throughput, "
        f"{limits['knee']}",
    )


@row("symptom", "GTX 960, 4 GB: the model loads, but batch 4 is the most", "gpus-for-act")
def gtx_960(cards: Answer) -> Verdict:
    found = only(cards["gpus"], gpu="GTX 960 4GB")
    return answered(
        f"of a job of ours: ACT at batch {cards['batch_size']} needs "
        f"{gib(found['device_bytes']):.2f} GiB there, largest batch {found['largest_batch']}"
    )


@row("symptom", "Out of memory after 10 rounds, at a batch that fitted", "plan-leak")
def grows(plan: Answer) -> Verdict:
    pattern = plan["pattern"]
    return condition(
        "a job that is settled does not grow; one that keeps outputs does: "
        f"{pattern['growth_bytes_per_step'] / MIB:.0f} MiB a step, full after about "
        f"{pattern['steps_until_full']} steps, line {pattern['sources'][0]['line'].split(':')[-1]}"
    )


@row("symptom", "16 GB carry batch 32, but 16 is better: room, and no faster beyond",
     "gpus-for-act")  # fmt: skip
def better_16(cards: Answer) -> Verdict:
    found = only(cards["gpus"], gpu="T4")
    return holds(
        found["at_saturation"]["batch_size"] < found["largest_batch"],
        f"ACT on a T4: largest {found['largest_batch']}, saturation "
        f"{found['at_saturation']['batch_size']}",
    )


@row("formula", "12 GB at batch 16, 8 GB at batch 8, and 32 fits 16 GB", "plan-vgg")
def their_line(plan: Answer) -> Verdict:
    slope = (12 - 8) / (16 - 8)
    need = 8 + slope * (32 - 8)
    there = gib(plan["gpu_memory_bytes"])
    return holds(
        need <= there,
        f"on a line through the first two, batch 32 needs {need:.0f} GB of {there:.2f} GiB: one of "
        "them held cache beyond its need; `plan` gives reserved next to allocated",
    )


@row("practice", "Laptop 3060 too small; 3060 12GB, or 3060 Ti and 3070 with 8?", "gpus-for-vgg")
def which_card(cards: Answer) -> Verdict:
    shown = ", ".join(
        f"{each['gpu']} {best['samples_per_s']:.0f} at {best['batch_size']} "
        f"(largest {each['largest_batch']})"
        for each in cards["gpus"]
        for best in (each["at_saturation"],)
        if "30" in each["gpu"]
    )
    return answered(f"samples/s at the saturation batch size, VGG16: {shown}")


@row("practice", "32 GB of RAM make it faster too", "plan-colab")
def ram(plan: Answer) -> Verdict:
    need = [
        each["ram_bytes"]
        for each in plan["loading"]["result"]["candidates"]
        if each["settings"] == plan["loading"]["result"]["recommended"]
    ]
    ram_bytes = plan["cpu"]["ram_bytes"]
    return condition(
        f"where it holds what the loader needs ({max(need) / GIB:.2f} GiB with the settings "
        f"recommended) and the data set: {ram_bytes / GIB:.1f} GiB on Colab"
    )


@row("symptom", "Training on one's own PC occupies its CPU", "plan-colab")
def own_cpu(plan: Answer) -> Verdict:
    found = plan["loading"]["result"]
    busy = [
        each["busy_cores"]
        for each in found["candidates"]
        if each["settings"] == found["recommended"]
    ]
    return answered(
        f"the loader keeps {max(busy):.1f} of {found['machine']['usable_cores']:g} cores busy with "
        "the settings recommended; --max-workers bounds it"
    )


@row("practice", "Upload the project and its data by a file-transfer program", "gpus-t4")
def upload(card: Answer) -> Verdict:
    return impossible("not a question of the job: it needs the line to the server")


@row("symptom", "A rented server is much faster than an old card", "gpus-for-vgg")
def faster(cards: Answer) -> Verdict:
    old, new = (only(cards["gpus"], gpu=name)["at_saturation"] for name in ("GTX 960 4GB", "T4"))
    gain = new["samples_per_s"] / old["samples_per_s"]
    text = f"VGG16: {gain:.1f} times the samples/s of a GTX 960 (step {ms(new['seconds'])})"
    return agrees(text) if gain > 1.5 else differs(text)
