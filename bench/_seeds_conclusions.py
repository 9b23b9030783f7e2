"""Rows of the article of conclusions from training models."""

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

ROWS: list[Row] = []
row = adds_to(ROWS, "conclusions")


def cause(machine: Answer) -> Answer:
    """The verdict of `doctor` on why PyTorch sees no GPU."""
    return only(machine["checks"], name="gpu")


def finding(script: Answer, rule: str) -> Answer:
    """The first finding of a rule in the script."""
    found = [each for each in script["script"]["findings"] if each["kind"] == rule]
    return found[0]


# --- A GPU and its memory -----------------------------------------------------------------------
@row("practice", "Video memory: the more the better", "gpus-for-vgg")
def more_memory(cards: Answer) -> Verdict:
    large, small = (only(cards["gpus"], gpu=name) for name in ("RTX 3060 12GB", "RTX 3070"))
    rates = [each["at_saturation"]["samples_per_s"] for each in (large, small)]
    return condition(
        f"for what fits, not for speed: VGG16 {rates[0]:.0f} samples/s on the 3060 with 12 GB, "
        f"{rates[1]:.0f} on the 3070 with 8"
    )


@row("symptom", "What is the upper limit of a GPU?", "plan-vgg")
def upper_limit(plan: Answer) -> Verdict:
    now = plan["speed"]["now"]
    return answered(
        f"of each job: VGG16 on a T4 is bound by {now['bound']}, at "
        f"{percent(plan['speed']['mfu'])} of the peak arithmetic"
    )


@row("symptom", "torch.cuda.device_count() is 0", "doctor-cpu-only-torch", "doctor-no-driver",
     "doctor-version-mismatch")  # fmt: skip
def none_seen(build: Answer, driver: Answer, mismatch: Answer) -> Verdict:
    names = ", ".join(cause(each)["kind"] for each in (build, driver, mismatch))
    return holds(
        len({cause(each)["kind"] for each in (build, driver, mismatch)}) == 3,
        f"each cause is told from the others: {names} (docs/checks.md has all)",
    )


@row("command", "nvidia-smi, then another PyTorch", "doctor-cpu-only-torch",
     "doctor-version-mismatch")  # fmt: skip
def reinstall(build: Answer, mismatch: Answer) -> Verdict:
    fixes = [cause(each)["fixes"][0]["action"].split(" --index")[0] for each in (build, mismatch)]
    return condition(f"only where the build is the cause: `{fixes[0]}`; where the driver is, "
                     f"`{fixes[1]}`")  # fmt: skip


@row("symptom", "“CUDA out of memory”: model and data exceed the memory", "plan-resnet152")
def out_of_memory(plan: Answer) -> Verdict:
    now = plan["now"]
    low, high = (gib(each) for each in now["memory"]["device_range_bytes"])
    return holds(
        not now["fits"],
        f"ResNet-152 at 64 on a laptop's 3060: {low:.1f} to {high:.1f} GiB of "
        f"{gib(plan['gpu_memory_bytes']):.2f}, said before it runs",
    )


@row("practice", "A smaller model: ResNet-50 in place of ResNet-152", "plan-resnet152")
def smaller_model(plan: Answer) -> Verdict:
    found = only(plan["remedies"]["items"], name="smaller-model")
    before = plan["remedies"]["before"]["device_bytes"]
    after = found["memory"]["device_bytes"]
    name = found["launch"].split("--model=")[1].split()[0]
    fits = "fits" if found["fits"] else "does not fit yet"
    return condition(
        f"the next smaller of the family, {name}: {gib(before):.2f} to {gib(after):.2f} GiB, which "
        f"{fits}; a smaller batch keeps the model"
    )


@row("practice", "A smaller batch, though the result suffers", "plan-resnet152")
def smaller_batch(plan: Answer) -> Verdict:
    found = only(plan["remedies"]["items"], name="accumulate")
    batch = found["launch"].split("--batch_size=")[1].split()[0]
    return condition(
        f"not with accumulation: micro-batches of {batch} take "
        f"{gib(found['memory']['device_bytes']):.2f} GiB and the effective batch stays "
        f"{plan['step']['effective_batch']}"
    )


# --- Batch size and memory ----------------------------------------------------------------------
@row("formula", "A smaller batch has less input", "memory-act")
def less_input(memory: Answer) -> Verdict:
    each = memory["batches"]["per_sample_by_kind_bytes"]["input"]
    return holds(each > 0, f"{each / MIB:.1f} MiB a sample (ACT)")


@row("formula", "… and less results, which are the main part", "memory-act")
def main_part(memory: Answer) -> Verdict:
    kinds = memory["batches"]["per_sample_by_kind_bytes"]
    share = kinds["activation"] / sum(kinds.values())
    return holds(share > 0.5, f"{percent(share)} of what a sample adds (ACT)")


@row("formula", "Gradients of parameters do not depend on the batch", "memory-act")
def gradients(memory: Answer) -> Verdict:
    kinds = memory["batches"]["per_sample_by_kind_bytes"]
    return agrees("no gradient in what a sample adds") if "gradient" not in kinds else differs(
        f"{kinds['gradient'] / MIB:.1f} MiB a sample"
    )  # fmt: skip


@row("formula", "A smaller batch lowers the memory in use", "memory-act")
def lowers(memory: Answer) -> Verdict:
    few, many = (
        gib(only(memory["batches"]["points"], batch_size=batch)["device_bytes"])
        for batch in (4, 32)
    )
    return holds(few < many, f"batch 32 needs {many:.2f} GiB, 4 needs {few:.2f} (ACT)")


@row("formula", "Beyond some batch size the job fails", "memory-act")
def beyond(memory: Answer) -> Verdict:
    largest = memory["batches"]["largest_batch"]
    points = {each["batch_size"]: each["fits"] for each in memory["batches"]["points"]}
    return holds(
        points[largest] and not points[largest + 1],
        f"{largest} fits an RTX 4090, {largest + 1} does not (ACT)",
    )


@row("practice", "Balance memory against efficiency", "plan-act")
def balance(plan: Answer) -> Verdict:
    best = plan["now"]["recommended_batch"]
    chosen = only(plan["speed"]["curve"], batch_size=best)
    return answered(
        f"batch {best}: the smallest with 95% of the best throughput, "
        f"{chosen['samples_per_s']:.0f} samples/s"
    )


# --- Utilisation --------------------------------------------------------------------------------
@row("symptom", "GPU-Util of 100% does not mean that all of the GPU is used", "doctor-machine",
     "plan-act")  # fmt: skip
def all_used(machine: Answer, plan: Answer) -> Verdict:
    (gpu,) = machine["machine"]["gpus"]["value"]
    now = plan["speed"]["now"]
    return holds(
        plan["speed"]["mfu"] < 0.5 < now["gpu_s"] / now["seconds"],
        f"`doctor` says so where it shows it ({percent(gpu['utilisation']['value'])} here), with "
        f"power as the better hint; ACT keeps the GPU busy "
        f"{percent(now['gpu_s'] / now['seconds'])} of a step at "
        f"{percent(plan['speed']['mfu'])} of its peak",
    )


@row("symptom", "Memory-Util is how busy reading and writing is", "doctor-machine")
def memory_util(machine: Answer) -> Verdict:
    (gpu,) = machine["machine"]["gpus"]["value"]
    assert gpu["memory_utilisation"]["value"] is not None
    return condition("the share of time with a read or write, not of the bandwidth; `doctor` says "
                     "both next to the figure")  # fmt: skip


@row("practice", "Keep GPU-Util high", "rehearse-2")
def keep_high(run: Answer) -> Verdict:
    return answered(
        f"the loader's part of it, rehearsed without a GPU: {percent(run['steady']['busy_share'])} "
        "after the start; `trainfit loader` finds the settings"
    )


@row("symptom", "Memory in use is space, utilisation is time", "doctor-server")
def space_and_time(machine: Answer) -> Verdict:
    gpus = machine["machine"]["gpus"]["value"]
    held = [each for each in gpus if each["used_bytes"]["value"] > 1 << 30]
    text = ", ".join(
        f"GPU {each['index']}: {gib(each['used_bytes']['value']):.0f} GiB, "
        f"{percent(each['utilisation']['value'])} busy"
        for each in held
    )
    return holds(bool(held), f"`doctor` says it of each GPU in words ({text})")


@row("symptom", "Little memory and a busy GPU, or much memory and an idle one", "plan-tiny",
     "plan-act")  # fmt: skip
def both_ways(tiny: Answer, act: Answer) -> Verdict:
    def words(plan: Answer) -> str:
        now = plan["speed"]["now"]
        return (
            f"{gib(plan['now']['memory']['device_bytes']):.2f} GiB, GPU busy "
            f"{percent(now['gpu_s'] / now['seconds'])} of a step"
        )

    return agrees(f"a tiny network {words(tiny)}; ACT {words(act)}")


# --- Batch size and learning --------------------------------------------------------------------
@row("practice", "A small batch learns more slowly and less steadily", "plan-noise")
def slow_learning(plan: Answer) -> Verdict:
    limits = plan["now"]["limits"]
    return impossible(
        "needs training runs: how the loss falls is not simulated. With the gradients' noise "
        f"scale, if it is known (--noise-scale {limits['noise_scale']:g}), the batch that learns "
        f"nearly fastest is {limits['trains']}; by throughput alone {limits['knee']}"
    )


@row("practice", "A large batch estimates the gradient better", "plan-noise")
def better_gradient(plan: Answer) -> Verdict:
    limits = plan["now"]["limits"]
    return condition(
        f"by 1/batch, until it is large next to the noise scale: for {limits['noise_scale']:g} "
        f"samples {limits['trains']} is recommended"
    )


@row("practice", "A large batch ends in sharp minima, a small one regularizes", "plan-noise")
def minima(plan: Answer) -> Verdict:
    return impossible("needs training runs to the end, with several batch sizes and seeds")


@row("practice", "A large batch uses the GPU better; a small one badly", "plan-act")
def efficiency(plan: Answer) -> Verdict:
    curve = {each["batch_size"]: each for each in plan["speed"]["curve"]}
    return holds(
        curve[8]["samples_per_s"] > 1.5 * curve[1]["samples_per_s"],
        f"ACT: {curve[1]['samples_per_s']:.0f} samples/s at batch 1 ({curve[1]['bound']}), "
        f"{curve[8]['samples_per_s']:.0f} at 8 ({curve[8]['bound']}), "
        f"{curve[32]['samples_per_s']:.0f} at 32",
    )


@row("practice", "The best batch differs from task to task", "plan-act", "plan-vgg")
def task_by_task(act: Answer, vgg: Answer) -> Verdict:
    other = vgg["amp_choice"]["configuration"] or vgg["now"]
    return holds(
        act["now"]["recommended_batch"] != other["recommended_batch"],
        f"{act['now']['recommended_batch']} for ACT on an RTX 4090, {other['recommended_batch']} "
        "for VGG16 on a T4",
    )


@row("practice", "Utilisation as high as possible, but mind the heat", "doctor-machine")
def heat(machine: Answer) -> Verdict:
    found = only(machine["checks"], name="gpu-temperature")
    return holds(
        found["verdict"] == "good",
        f"checked: {found['title'].split(': ')[-1]}; clocks lowered by heat are a cause",
    )


# --- Where data go to the GPU -------------------------------------------------------------------
@row("practice", "Move data to the GPU right before the network", "doctor-script")
def right_before(script: Answer) -> Verdict:
    found = finding(script, "cuda-in-dataset")
    line = found["place"]["line"]
    return agrees(f"rule cuda-in-dataset finds a copy in the data set (line {line}) and "
                  "writes the move into the loop")  # fmt: skip


@row("practice", "Preprocessing on the GPU, where that is efficient", "plan-colab")
def on_the_gpu(plan: Answer) -> Verdict:
    advice = plan["loading"]["result"]["advice"]
    return condition(
        "where workers are the limit: changes beyond the settings are named, with their gain where "
        f"measured costs give it ({changes(advice) or 'none wins here'})"
    )


@row("practice", "The copy of a batch to the GPU may be the bottleneck", "plan-act")
def copies(plan: Answer) -> Verdict:
    now = plan["speed"]["now"]
    return holds(
        now["copies_s"] > 0.2 * now["seconds"],
        f"{ms(now['copies_s'])} of a step of {ms(now['seconds'])} (ACT, 20 GB/s over PCIe "
        f"assumed); what bounds the step is {now['bound']}",
    )


@row("practice", "Not the whole data set onto the GPU: its memory is too small", "plan-act",
     "memory-act")  # fmt: skip
def whole_set(plan: Answer, memory: Answer) -> Verdict:
    each = memory["batches"]["per_sample_by_kind_bytes"]["input"]
    return condition(
        f"a sample of ACT is {each / MIB:.1f} MiB on the GPU: our {plan['samples']} take "
        f"{gib(each * plan['samples']):.1f} GiB, 10,000 would take {gib(1e4 * each):.0f}; rule "
        "data-on-gpu-before-loop says so of a script"
    )


@row("practice", "tensor.to(device) rather than tensor.cuda()", "doctor-script")
def to_device(script: Answer) -> Verdict:
    found = [each for each in script["script"]["findings"] if each["kind"] == "hard-coded-cuda"]
    assert "torch.cuda.is_available()" in found[0]["fixes"][0]["action"]
    return agrees(f"rule hard-coded-cuda, {len(found)} lines, each with that rewrite")


@row("practice", "A small model gains little from a GPU", "plan-tiny")
def small_on_gpu(plan: Answer) -> Verdict:
    found = plan["versus_cpu"]
    fastest, (low, high) = min(found["step_seconds"]), found["gpu_range_s"]
    text = (
        f"a tiny network: {ms(fastest)} a step on this machine's CPU (the fastest of "
        f"{len(found['step_seconds'])}), {ms(low)} to {ms(high)} predicted on a T4"
    )
    return agrees(text) if fastest < 3 * high else differs(text)


@row("practice", "CUDA is the software, a GPU the hardware", "doctor-version-mismatch")
def layers(machine: Answer) -> Verdict:
    stack = machine["machine"]["cuda"]
    return answered(
        f"`doctor` asks each layer between them: kernel driver {stack['kernel_driver']['value']}, "
        f"libcuda {stack['library_versions']['libcuda']}, PyTorch's build, the GPUs on the bus"
    )
