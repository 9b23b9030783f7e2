"""Rows of the article on a rented T4: the card's figures."""

from __future__ import annotations

from _seeds import Answer, Row, Verdict, adds_to, agrees, condition, differs, gib, holds, near

ROWS: list[Row] = []
row = adds_to(ROWS, "t4")


def figure(card: Answer, name: str) -> float:
    value: float = card["gpus"][0][name]
    return value


# --- The card's figures -------------------------------------------------------------------------
@row("formula", "T4: Turing", "gpus-t4")
def turing(card: Answer) -> Verdict:
    name = card["gpus"][0]["architecture"]
    return agrees(f"{name}, compute capability 7.5") if name == "Turing" else differs(name)


@row("formula", "320 Tensor cores", "gpus-t4")
def tensor_cores(card: Answer) -> Verdict:
    return near(figure(card, "tensor_cores"), 320, 0, "", "another count")


@row("formula", "2560 CUDA cores; their number and clock set the arithmetic", "gpus-t4")
def cuda_cores(card: Answer) -> Verdict:
    rate = 2 * figure(card, "cuda_cores") * figure(card, "boost_clock_hz")
    return near(figure(card, "cuda_cores"), 2560, 0, f", x 2 x clock = {rate / 1e12:.2f} TFLOP/s",
                "another count")  # fmt: skip


@row("formula", "FP32 8.1 (TFLOP/s; the article says FLOPS)", "gpus-t4")
def fp32(card: Answer) -> Verdict:
    return near(figure(card, "fp32_flop_per_s") / 1e12, 8.1, 0.01, " TFLOP/s", "another rate")


@row("formula", "FP16 65 TFLOP/s", "gpus-t4")
def fp16(card: Answer) -> Verdict:
    rate = card["gpus"][0]["tensor_flop_per_s"]["float16"]
    return near(rate / 1e12, 65, 0.01, " TFLOP/s on the Tensor cores, for matmuls",
                "another rate")  # fmt: skip


@row("formula", "“Floating point performance” 7.76 TFLOP/s", "gpus-t4")
def second_rate(card: Answer) -> Verdict:
    clock = 7.76e12 / (2 * figure(card, "cuda_cores"))
    return holds(
        abs(figure(card, "fp32_flop_per_s") - 7.76e12) < 1e11,
        f"there is one FP32 peak, {figure(card, 'fp32_flop_per_s') / 1e12:.2f} at "
        f"{figure(card, 'boost_clock_hz') / 1e6:.0f} MHz; 7.76 is what {clock / 1e6:.0f} MHz give",
    )


@row("formula", "Memory bandwidth 320 GB/s, one of the most important figures", "gpus-t4")
def bandwidth(card: Answer) -> Verdict:
    balance = card["gpus"][0]["for_a_job"]["balance_flop_per_byte"]["float32"]
    return near(figure(card, "bandwidth_bytes_per_s") / 1e9, 320, 0.01,
                f" GB/s as sold, less with ECC; below {balance:.0f} FLOP a byte it sets the time",
                "another bandwidth")  # fmt: skip


@row("formula", "GDDR6", "gpus-t4")
def memory_type(card: Answer) -> Verdict:
    name = card["gpus"][0]["memory_type"]
    return agrees(name) if name == "GDDR6" else differs(name)


@row("formula", "16 GB, which bounds the batch size", "gpus-t4")
def memory(card: Answer) -> Verdict:
    usable, sold = (figure(card, name) for name in ("memory_bytes", "nominal_memory_bytes"))
    return condition(f"{gib(sold):g} GiB as sold, {gib(usable):.2f} usable, less the context")


@row("formula", "A bus of 256 bit: wider is faster", "gpus-t4")
def bus(card: Answer) -> Verdict:
    pins = card["gpus"][0]["for_a_job"]["pin_bits_per_s"]
    bits = figure(card, "bus_bits")
    return condition(
        f"{bits:g} bit at {pins / 1e9:g} Gbit/s a line are {bits * pins / 8e9:.0f} GB/s: only both "
        "together say something"
    )


@row("formula", "75 W", "gpus-t4")
def power(card: Answer) -> Verdict:
    return near(figure(card, "power_w"), 75, 0.01, " W", "what the slot may give is 75 W")
