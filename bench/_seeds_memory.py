"""Rows of the ACT article: its memory estimates, of ACT and of VGG16, and its checklist."""

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
    near,
    only,
    percent,
    within,
)

ROWS: list[Row] = []
row = adds_to(ROWS, "act")

#: The article's sizes: batch, heads, width of the model and of its feed-forward layers, layers.
BATCH, HEADS, WIDTH, FFN, LAYERS = 8, 8, 512, 3200, 4


def per_layer(hand: Answer) -> int:
    """Results a sample and layer of the main encoder, counted operator by operator."""
    nbytes = only(hand["parts"], path="ACTPolicy.encoder")["by_hand_bytes"]
    count, rest = divmod(nbytes, hand["activation_bytes"] * BATCH * LAYERS)
    assert rest == 0, nbytes
    return int(count)


def tokens(hand: Answer) -> int:
    """S, of which the counted results are 11 S D + 2 H S^2 + 2 S FFN exactly."""
    count = per_layer(hand)
    for found in range(1, 10_000):
        if 11 * found * WIDTH + 2 * HEADS * found**2 + 2 * found * FFN == count:
            return found
    raise LookupError(f"no number of tokens makes {count} results")


def modules(memory: Answer, *names: str) -> float:
    """GiB at the peak of parts of the policy, with their parameters."""
    found = memory["peak"]["by_module_bytes"]
    return gib(sum(found[f"ACTPolicy.{name}"] for name in names))


def terms(hand: Answer) -> tuple[int, int, int]:
    """S x D, H x S^2 and S x FFN."""
    count = tokens(hand)
    return count * WIDTH, HEADS * count**2, count * FFN


# --- The whole formula --------------------------------------------------------------------------
@row("formula", "P x 16 + B x 2 x (results of CNN, Transformer, VAE and decoder) + 10 to 30%",
     "by-hand-act")  # fmt: skip
def whole(hand: Answer) -> Verdict:
    low, high = (gib(hand["by_hand_bytes"] + each) for each in hand["buffer_bytes"])
    text = f"{low:.2f} to {high:.2f} GiB by hand, {gib(hand['allocated_bytes']):.2f} simulated"
    inside = low <= gib(hand["allocated_bytes"]) <= high
    return condition(f"{text}: the sums agree, the parts do not") if inside else differs(text)


@row(
    "formula",
    "Transformer: L x (S D + H S^2 + S FFN) results a sample, the short form",
    "by-hand-act",
)
def short_form(hand: Answer) -> Verdict:
    short = 2 * BATCH * LAYERS * sum(terms(hand))
    kept = only(hand["parts"], path="ACTPolicy.encoder")["simulated_bytes"]
    return holds(
        short > 0.8 * kept,
        f"{gib(short):.2f} GiB, {gib(kept):.2f} kept at the peak: each of the three kinds of "
        "result is there several times, as the article's fuller form has it",
    )


@row("formula", "S = 842, with D = 512, H = 8, FFN = 3200, L = 4, B = 8", "by-hand-act")
def sizes(hand: Answer) -> Verdict:
    why = "another number of tokens"
    return near(tokens(hand), 842, 0, " tokens, by the results that were counted", why)


@row("formula", "P is about 52 million", "by-hand-act")
def parameters(hand: Answer) -> Verdict:
    return near(hand["parameters"] / 1e6, 52, 0.02, " million", "another network")


@row("formula", "Activations have 2 bytes under AMP", "by-hand-act")
def two_bytes(hand: Answer) -> Verdict:
    more = only(hand["causes"], name="precision")["nbytes"]
    return condition(
        f"{hand['activation_bytes']} bytes where autocast says so; softmax and batch "
        f"normalization stay in float32, {more / MIB:.0f} MiB more"
    )


@row("formula", "AdamW: about 16 bytes a parameter", "memory-act")
def sixteen(memory: Answer) -> Verdict:
    adamw = only(memory["optimizers"]["rows"], name="AdamW")
    trained = memory["optimizers"]["trained_bytes"]
    return condition(
        f"{4 * adamw['between_steps_bytes'] / trained:.1f} between steps, "
        f"{4 * adamw['peak_bytes'] / trained:.1f} while its foreach step runs; float32 weights"
    )


# --- Parameter state ----------------------------------------------------------------------------
@row("formula", "P x 16 = 832 MB = 0.77 GiB", "by-hand-act")
def parameter_state(hand: Answer) -> Verdict:
    return near(gib(16 * hand["parameters"]), 0.77, 0.02, " GiB", "another network")


@row("formula", "With temporary buffers 0.9 to 1.3 GiB", "memory-act", "by-hand-act")
def with_buffers(memory: Answer, hand: Answer) -> Verdict:
    step = gib(only(memory["optimizers"]["rows"], name="AdamW")["peak_bytes"])
    there = sum(
        memory["peak"]["by_kind_bytes"][kind]
        for kind in ("parameter", "gradient", "optimizer_state")
    )
    return condition(
        f"{step:.2f} GiB in AdamW's step; {gib(there):.2f} at the peak of the run, which is in the "
        "backward pass, where most gradients do not exist yet"
    )


# --- Main encoder -------------------------------------------------------------------------------
@row("formula", "S D = 431,104; H S^2 = 5,671,712; S FFN = 2,694,400", "by-hand-act")
def products(hand: Answer) -> Verdict:
    found = terms(hand)
    text = ", ".join(f"{each:,}" for each in found)
    return agrees(text) if found == (431_104, 5_671_712, 2_694_400) else differs(text)


@row("formula", "8 S D + 2 H S^2 + 2 S FFN = 20,181,056 results a sample and layer", "by-hand-act")
def full_form(hand: Answer) -> Verdict:
    width, attention, feed = terms(hand)
    said = 8 * width + 2 * attention + 2 * feed
    return condition(
        f"{said:,} by these sizes; counted operator by operator {per_layer(hand):,}: 11 S D, not 8"
    )


@row(
    "formula",
    "8 S D is Q, K, V, attention's output, projection, residuals, normalization; 2 H S^2 scores "
    "and probabilities; 2 S FFN hidden layer and dropout",
    "by-hand-act",
)
def meaning(hand: Answer) -> Verdict:
    scores = only(hand["rows"], name="attention scores, probabilities")
    freed = only(hand["causes"], name="not_kept")["rows"]["attention scores, probabilities"]
    return condition(
        f"scores and probabilities {gib(scores['by_hand_bytes']):.2f} GiB by hand: the scores are "
        f"freed at once ({freed / MIB:+.0f} MiB), the probabilities are kept in float32; casts and "
        "dropout's masks add to that"
    )


@row("formula", "Main encoder 1.20 GiB", "by-hand-act")
def encoder_by_hand(hand: Answer) -> Verdict:
    ours = gib(only(hand["parts"], path="ACTPolicy.encoder")["by_hand_bytes"])
    return near(ours, 1.20, 0.1, " GiB by hand", "others are counted")


@row("formula", "Main encoder 1.3 to 1.8 GiB with masks and buffers", "by-hand-act", "memory-act")
def encoder(hand: Answer, memory: Answer) -> Verdict:
    kept = gib(only(hand["parts"], path="ACTPolicy.encoder")["simulated_bytes"])
    whole = modules(memory, "encoder")
    return within(kept, 1.3, 1.8, f" GiB kept ({whole:.2f} with parameters and temporaries)",
                  "more is kept")  # fmt: skip


# --- The other parts ----------------------------------------------------------------------------
@row("formula", "CNN 1.5 to 2.5 GiB (ResNet-18, 640x360 and twice 640x480)", "memory-act")
def cnn(memory: Answer) -> Verdict:
    return within(modules(memory, "backbone", "final_conv"), 1.5, 2.5, " GiB", "other layers")


@row("formula", "A backbone that is not frozen is a main part of the memory", "memory-act")
def backbone(memory: Answer) -> Verdict:
    share = modules(memory, "backbone") * GIB / memory["peak"]["allocated_bytes"]
    return holds(share > 0.25, f"{percent(share)} of what is allocated at the peak")


@row("formula", "VAE encoder (32 tokens) 0.15 to 0.30 GiB", "memory-act")
def vae(memory: Answer) -> Verdict:
    return within(modules(memory, "vae_encoder"), 0.15, 0.30, " GiB", "other layers")


@row("formula", "Decoder (30 queries) 0.10 to 0.25 GiB", "memory-act")
def decoder(memory: Answer) -> Verdict:
    return within(modules(memory, "decoder"), 0.10, 0.25, " GiB",
                  "one layer whose gradients exist, but whose results the backward pass has used "
                  "up by the peak")  # fmt: skip


@row("formula", "Both 0.25 to 0.55 GiB", "memory-act")
def both(memory: Answer) -> Verdict:
    return within(modules(memory, "vae_encoder", "decoder"), 0.25, 0.55, " GiB", "other layers")


@row("formula", "Input images in float32: 81 MB = 0.075 GiB", "by-hand-act")
def images(hand: Answer) -> Verdict:
    nbytes = only(hand["rows"], name="input")["simulated_bytes"]
    return near(nbytes / 1e6, 81, 0.03, " MB, with state and actions", "other images")


@row("formula", "Input and temporaries 0.2 to 0.5 GiB", "memory-act")
def inputs(memory: Answer) -> Verdict:
    kinds = memory["peak"]["by_kind_bytes"]
    return within(gib(kinds["input"] + kinds["temporary"]), 0.2, 0.5, " GiB", "other temporaries")


@row("formula", "Workspaces, cache and optimizer's buffers 0.8 to 1.8 GiB", "memory-act")
def workspace(memory: Answer) -> Verdict:
    now, kinds = memory["memory"], memory["peak"]["by_kind_bytes"]
    cache = now["reserved_bytes"] - now["allocated_bytes"]
    found = kinds["workspace"] + cache + now["context_bytes"]
    parts = (
        f"workspaces {kinds['workspace'] / MIB:.0f} MiB, cache {cache / MIB:.0f}, context "
        f"{now['context_bytes'] / MIB:.0f}; cuDNN's benchmark trials would add to that"
    )
    return within(gib(found), 0.8, 1.8, " GiB", parts)


@row("formula", "Allocated 5.0 to 7.0 GiB in all", "memory-act")
def allocated(memory: Answer) -> Verdict:
    why = "below (docs/decisions/0005); the article's own parts add up to 4.95 to 8.45"
    return within(gib(memory["memory"]["allocated_bytes"]), 5.0, 7.0, " GiB", why)


@row("formula", "nvidia-smi, reserved: 6.5 to 9.5 GiB", "memory-act")
def device(memory: Answer) -> Verdict:
    low, high = (gib(each) for each in memory["memory"]["device_range_bytes"])
    return within(gib(memory["memory"]["device_bytes"]), 6.5, 9.5,
                  f" GiB ({low:.2f} to {high:.2f})", "below (docs/figures.md)")  # fmt: skip


@row("formula", "Measured: 6.5 GiB", "memory-act")
def measured(memory: Answer) -> Verdict:
    low, high = (gib(each) for each in memory["memory"]["device_range_bytes"])
    return impossible(
        f"above the predicted {low:.2f} to {high:.2f} GiB; which cause makes the difference needs "
        "that GPU: `trainfit verify plan-act.json`. docs/figures.md has what could, each simulated"
    )


# --- VGG16 --------------------------------------------------------------------------------------
@row("formula", "Memory = parameters + results x batch size", "memory-act")
def law(memory: Answer) -> Verdict:
    batches = memory["batches"]
    base, slope = batches["allocated_base_bytes"], batches["allocated_per_sample_bytes"]
    return condition(
        f"allocated {base / MIB:.0f} MiB + batch x {slope / MIB:.0f} MiB, exactly; reserved goes "
        f"up in steps, the largest {gib(batches['largest_jump_bytes']):.2f} GiB, and the base is "
        "gradients and optimizer as well"
    )


@row("formula", "VGG16 has about 138 million parameters", "by-hand-vgg")
def vgg_parameters(hand: Answer) -> Verdict:
    return near(hand["parameters"] / 1e6, 138, 0.01, " million", "another network")


def vgg_results(hand: Answer) -> float:
    """Numbers that the layers of VGG16 make of one image."""
    names = ("activation functions", "convolutions", "pooling, resampling", "matmuls")
    by_name = {each["name"]: each["by_hand_bytes"] for each in hand["rows"]}
    return sum(by_name[name] for name in names) / (4 * 32)


@row("formula", "VGG16 makes about 96 million middle variables an image", "by-hand-vgg")
def vgg_middle(hand: Answer) -> Verdict:
    count = vgg_results(hand)
    return holds(
        0.9 < count / 96e6 < 1.1,
        f"{count / 1e6:.1f} million numbers, {4 * count / 1e6:.0f} MB in float32: 96 million are "
        "bytes, not numbers",
    )


@row("formula", "(0.138 x 4 + 0.096 x 2 x 32) x 4 = 6.4 GB at batch 32", "by-hand-vgg")
def vgg_sum(hand: Answer) -> Verdict:
    written, less = (0.138 * 4 + 0.096 * 2 * 32) * 4, 0.138 * 4 + 0.096 * 2 * 32
    low, high = (gib(hand["by_hand_bytes"] + each) for each in hand["buffer_bytes"])
    return holds(
        abs(written - 6.4) < 0.1,
        f"as written it is {written:.1f}, without the last factor {less:.1f}: it counts bytes "
        f"twice; by hand {low:.2f} to {high:.2f} GiB, simulated "
        f"{gib(hand['allocated_bytes']):.2f} allocated",
    )


@row("formula", "Parameters are a fixed cost; results grow with resolution, depth, precision and "
     "batch", "memory-act", "plan-vgg")  # fmt: skip
def fixed_cost(memory: Answer, plan: Answer) -> Verdict:
    slope = memory["batches"]["per_sample_by_kind_bytes"]
    assert not {"parameter", "gradient", "optimizer_state"} & set(slope)
    half = only(plan["remedies"]["items"], name="lower-resolution")["memory"]["allocated_bytes"]
    before = plan["remedies"]["before"]["allocated_bytes"]
    off, on = plan["now"]["memory"], plan["other_amp"]["memory"]
    return agrees(
        f"no parameter in what a sample adds ({slope['activation'] / MIB:.0f} MiB of it results); "
        f"VGG16: half the pixels {percent(1 - half / before)} less, AMP "
        f"{percent(1 - on['allocated_bytes'] / off['allocated_bytes'])} less"
    )


@row("command", "torchinfo's summary, and memory_allocated() before and after a forward pass of "
     "ResNet-18", "simulate-forward")  # fmt: skip
def forward(run: Answer) -> Verdict:
    kinds = run["by_kind_bytes"]
    return answered(
        f"the script runs as it is: {kinds['activation'] / MIB:.1f} MiB of results stay (in "
        f"training mode for the backward pass) and {kinds['workspace'] / MIB:.1f} MiB of "
        f"workspaces; `trainfit memory forward.trainfit` has them by module and line"
    )


# --- Checklist ----------------------------------------------------------------------------------
@row("symptom", "GPU-Util falls periodically: workers, prefetch, video backend, augmentation",
     "rehearse-1", "plan-act")  # fmt: skip
def periodic(run: Answer, plan: Answer) -> Verdict:
    idle = max(run["idle_s"], key=lambda cause: run["idle_s"][cause])
    parts = {each["name"]: each["share"] for each in plan["loading"]["result"]["probe"]["parts"]}
    most = max(parts, key=lambda name: parts[name])
    return holds(
        all(each["cause"] for each in run["dips"]),
        f"each dip has one cause (most idle time here: {idle}); of a batch's time {most} is "
        f"the largest part, {percent(parts[most])}",
    )


@row("symptom", "CPU full, GPU not: limit the threads of the workers", "loader-blas")
def cpu_full(found: Answer) -> Verdict:
    names = ", ".join(f"{each['name']}={each['value']}" for each in found["variables"])
    threads = found["probe"]["threads"]
    text = f"a batch kept {threads:.1f} threads busy; recommended: {names or 'nothing'}"
    return agrees(text) if names else differs(text)


@row("symptom", "Memory nearly full: batch, frozen backbone, resolution, checkpointing", "plan-act")
def nearly_full(plan: Answer) -> Verdict:
    before = plan["remedies"]["before"]["device_bytes"]
    items = plan["remedies"]["items"]
    order = sorted(items, key=lambda each: each["memory"]["device_bytes"])
    text = ", ".join(
        f"{each['name']} {percent(1 - each['memory']['device_bytes'] / before)}" for each in order
    )
    return holds(
        all(each["saved_bytes"] > 0 for each in items),
        f"all apply to ACT; each simulated, saved of the device's memory: {text}",
    )


@row("symptom", "Slow at a low rate: governor, MHz, C-states, Python, launches", "pace-article")
def slow_at_low_rate(pace: Answer) -> Verdict:
    arms = [each["arm"] for each in pace["attribution"]["arms"]]
    return holds(
        {"spin", "no_idle_states", "launching"} <= set(arms),
        f"each is tried on its own, in turns: {', '.join(arms[2:])}",
    )


@row("symptom", "nvidia-smi shows more than PyTorch: cache, workspaces, context", "memory-act")
def smi_shows_more(memory: Answer) -> Verdict:
    now = memory["memory"]
    cache = now["reserved_bytes"] - now["allocated_bytes"]
    return holds(
        cache + now["context_bytes"] > 0,
        f"{cache / MIB:.0f} MiB of cache and {now['context_bytes'] / MIB:.0f} MiB of context and "
        "libraries (assumed) here; workspaces count as allocated",
    )
