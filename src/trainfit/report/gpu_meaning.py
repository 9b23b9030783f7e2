"""What each of a GPU's own figures means for a job, one line a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainfit.results.gpus import GpuFigures, MeaningLine
from trainfit.results.text import (
    count,
    duration,
    percent,
    size,
    three_digits,
    times,
    with_prefix,
)

DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "tfloat32": "tf32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8": "fp8",
}

#: Tegra chips whose kernels only NVIDIA's own builds of PyTorch have: cubins of another card of
#: the same generation do not run on them (CUDA C++ Programming Guide, binary compatibility).
JETPACK = {(5, 3), (6, 2), (7, 2), (8, 7)}
#: A TF32 rate less than so much above the FP32 rate gains nothing noticeable.
_GAIN = 1.1
_PYTORCH_TABLE = "PyTorch 2.13: torch.cuda.PYTORCH_RELEASES_CODE_CC"


def explained(gpu: GpuFigures) -> tuple[MeaningLine, ...]:
    """The lines for one GPU, computed from its figures; figures not known have none."""
    makers = (
        _capability,
        _software,
        _tensor_cores,
        _tf32,
        _fp32,
        _sms,
        _bandwidth,
        _bus,
        _cache,
        _memory,
        _parameters,
        _power,
        _clock,
    )
    return tuple(line for make in makers for line in make(gpu))


def is_assumed(gpu: GpuFigures, field: str) -> bool:
    """Did nobody publish or measure this figure?"""
    return gpu.sources.get(field, "").startswith("assumed")


def _line(gpu: GpuFigures, figure: str, value: str, says: str, field: str) -> MeaningLine:
    source = gpu.sources.get(field, "")
    return MeaningLine(figure, value, says, source=source, assumed=is_assumed(gpu, field))


def _capability(gpu: GpuFigures) -> Iterator[MeaningLine]:
    value = f"{gpu.capability[0]}.{gpu.capability[1]}, {gpu.architecture}"
    yield _line(gpu, "capability", value, _switched_on(gpu), "capability")


def _switched_on(gpu: GpuFigures) -> str:
    """Each limit is PyTorch's own: `is_bf16_supported`, `sdp_utils.cpp`, Triton, `_scaled_mm`."""
    if gpu.capability < (7, 0):
        return (
            "no bf16, TF32 or flash attention, and torch.compile refuses it (Triton needs 7.0). "
            "Train in fp32; fp16 saves memory but hardly any time."
        )
    if gpu.capability < (8, 0):
        return (
            "no bf16 (torch.cuda.is_bf16_supported() says True for a slow emulation): use fp16 "
            "with a GradScaler. No TF32, no flash attention (memory-efficient kernels instead)."
        )
    text = "it has bf16 (needs no GradScaler), TF32, flash attention in fp16 and bf16"
    if gpu.capability >= (8, 9):
        return f"{text}, FP8 matmuls (with torchao or Transformer Engine, not with autocast)."
    return f"{text}. FP8 needs 8.9."


def _software(gpu: GpuFigures) -> Iterator[MeaningLine]:
    """Which builds of PyTorch have kernels for it; a test holds it against PyTorch's table."""
    source = _PYTORCH_TABLE
    if gpu.capability in JETPACK:
        value = "JetPack's build"
        says = (
            "the wheels on PyPI have no kernels for this chip; NVIDIA builds PyTorch for JetPack."
        )
        source = "CUDA C++ Programming Guide: binary compatibility does not extend to Tegra"
    elif gpu.capability < (7, 5):
        value = "CUDA 12.6 build"
        says = (
            "builds with CUDA 12.9 or later have no kernels for it: is_available() is True, and "
            'the first kernel fails with "no kernel image".'
        )
    elif gpu.capability == (11, 0):
        value, says = "CUDA 13.0 or later", "older builds have no kernels for it."
    elif gpu.capability >= (10, 0):
        value = "CUDA 12.8 or later"
        says = (
            "builds with CUDA 12.6 have no kernels for it: is_available() is True, and the "
            'first kernel fails with "no kernel image".'
        )
    else:
        value, says = "any build", "those with CUDA 12.6 and all later ones have kernels for it."
    yield MeaningLine("PyTorch", value, says, source=source)


def _tensor_cores(gpu: GpuFigures) -> Iterator[MeaningLine]:
    if not gpu.tensor_dtypes:
        says = (
            "matmuls run on the CUDA cores in every dtype: autocast saves memory and memory "
            "traffic, arithmetic does not become faster."
        )
        yield _line(gpu, "Tensor cores", "none", says, "tensor_flop_per_s")
        return
    if gpu.tensor_flop_per_s is None:
        return
    rates = {name: gpu.tensor_flop_per_s[name] for name in DTYPES if name in gpu.tensor_flop_per_s}
    value = ", ".join(f"{DTYPES[name]} {three_digits(r / 1e12)}" for name, r in rates.items())
    speedups = gpu.for_a_job.tensor_speedup
    gains = ", ".join(
        f"{DTYPES[name]} {times(speedups[name])}" for name in rates if name in speedups
    )
    against = f"{gains} the FP32 rate at best. " if gains else ""
    number = f"{gpu.tensor_cores} of them. " if gpu.tensor_cores else ""
    says = (
        f"{number}{against}For matmuls, convolutions and attention, under autocast or in a "
        "model of that dtype; norms, activations, softmax, losses and the optimizer do not use "
        f"them. Channels and features in {_multiples(gpu)} keep them busy."
    )
    yield _line(gpu, "Tensor cores", f"{value} TFLOP/s", says, "tensor_flop_per_s")


def _multiples(gpu: GpuFigures) -> str:
    """NVIDIA, Matrix Multiplication Background User's Guide, section 2.2: 16 bytes; 128 on A100."""
    if gpu.capability == (8, 0):
        return "multiples of 8 (best 64)"
    return "multiples of 8 (FP8: 16)" if "float8" in gpu.tensor_dtypes else "multiples of 8"


def _tf32(gpu: GpuFigures) -> Iterator[MeaningLine]:
    speedup = gpu.for_a_job.tensor_speedup.get("tfloat32")
    if speedup is None or gpu.tensor_flop_per_s is None:
        return
    value = with_prefix(gpu.tensor_flop_per_s["tfloat32"], "FLOP/s")
    gain = "" if speedup >= _GAIN else ": no gain in peak rate on this card"
    says = (
        'for float32 matmuls after torch.set_float32_matmul_precision("high") '
        f"(convolutions: by default). {times(speedup)} the FP32 rate{gain}; 10 bits of "
        "mantissa, not 23."
    )
    yield _line(gpu, "TF32", value, says, "tensor_flop_per_s")


def _fp32(gpu: GpuFigures) -> Iterator[MeaningLine]:
    if gpu.fp32_flop_per_s is None:
        return
    says = "the CUDA cores: float32 matmuls without TF32, and everything other than matmuls."
    share = gpu.for_a_job.addition_share
    if share is not None:
        reached = percent(share, decimals=2)
        says += f" c = a + b (1 FLOP per 12 bytes) reaches {reached} of it: bandwidth limits it."
    value = with_prefix(gpu.fp32_flop_per_s, "FLOP/s")
    yield _line(gpu, "FP32", value, says, "fp32_flop_per_s")


def _sms(gpu: GpuFigures) -> Iterator[MeaningLine]:
    sms, cores = gpu.sm_count, gpu.cuda_cores
    rows, elements = gpu.for_a_job.fill_rows, gpu.for_a_job.fill_elements
    if sms is None or cores is None or rows is None or elements is None:
        return
    says = (
        f"an SM without a thread block is idle. Each has one from {elements:,} elements on "
        f"(elementwise), or {rows} rows to 1024 features (a linear layer in tiles of 128 x 128); "
        f"64 rows fill {min(8, sms)} of {sms}."
    )
    yield _line(gpu, "CUDA cores", f"{cores} in {count(sms, 'SM')}", says, "sm_count")


def _bandwidth(gpu: GpuFigures) -> Iterator[MeaningLine]:
    job = gpu.for_a_job
    if gpu.bandwidth_bytes_per_s is None or job.read_memory_once_s is None:
        return
    half = "bfloat16" if "bfloat16" in job.balance_flop_per_byte else "float16"
    balances = " or ".join(
        f"{job.balance_flop_per_byte[name]:.0f} ({DTYPES[name]})"
        for name in ("float32", half)
        if name in job.balance_flop_per_byte
    )
    says = (
        f"reads all memory once in {duration(job.read_memory_once_s)}. It, not arithmetic, sets "
        f"the time below {balances} FLOP per byte: norms, activations, the optimizer"
    )
    if job.matmul_balance_size is not None:
        says += f", and 16-bit n x n matmuls up to n = {job.matmul_balance_size}"
    value = f"{three_digits(gpu.bandwidth_bytes_per_s / 1e9)} GB/s"
    if gpu.inline_ecc:
        says += "; with ECC on, as sold, about 83% of it is left"
    yield _line(gpu, "memory bandwidth", value, f"{says}.", "bandwidth_bytes_per_s")


def _bus(gpu: GpuFigures) -> Iterator[MeaningLine]:
    if gpu.bus_bits is None or gpu.for_a_job.pin_bits_per_s is None:
        return
    says = (
        f"at {with_prefix(gpu.for_a_job.pin_bits_per_s, 'bit/s')} per line it gives the "
        "bandwidth above; alone it does not show speed."
    )
    kind = f", {gpu.memory_type}" if gpu.memory_type else ""
    yield _line(gpu, "memory bus", f"{gpu.bus_bits} bit{kind}", says, "bus_bits")


def _cache(gpu: GpuFigures) -> Iterator[MeaningLine]:
    if gpu.l2_bytes is None or gpu.for_a_job.l2_elements is None:
        return
    says = (
        f"holds {gpu.for_a_job.l2_elements / 1e6:.1f} million float32: up to that size, an "
        "operation can read the result of the one before from the cache. A benchmark that small "
        "measures the cache."
    )
    yield _line(gpu, "L2 cache", size(gpu.l2_bytes), says, "l2_bytes")


def _memory(gpu: GpuFigures) -> Iterator[MeaningLine]:
    least, most = gpu.context_range_bytes
    sold = gpu.nominal_memory_bytes
    says = "" if sold is None else f"usable of {size(sold)} as sold. "
    says += (
        f"Each process's CUDA context needs about {size(gpu.context_bytes)} (assumed; "
        f"{size(least)} to {size(most)}). Memory decides what fits, not how fast it runs."
    )
    yield _line(gpu, "memory", size(gpu.memory_bytes), says, "memory_bytes")
    if gpu.shared_memory:
        says = (
            "CPU and GPU share the memory: data sets, DataLoader workers and the desktop use it "
            "too; what is moved to the GPU is stored twice."
        )
        yield _line(gpu, "shared memory", "yes", says, "shared_memory")


def _parameters(gpu: GpuFigures) -> Iterator[MeaningLine]:
    job = gpu.for_a_job
    says = (
        "trained ones at 16 bytes (itself, gradient, AdamW's two moments) fill the memory without "
        "any activation"
    )
    if job.adamw_step_s_per_billion is not None:
        seconds = job.adamw_step_s_per_billion * job.adamw_parameters / 1e9
        says += f"; AdamW's step moves 28 bytes for each: {duration(seconds)}"
    value = f"{_parameter_count(job.adamw_parameters)} at most"
    source = "memory minus context, divided by 16 bytes"
    yield MeaningLine("fp32 parameters", value, f"{says}.", source=source, assumed=True)


def _power(gpu: GpuFigures) -> Iterator[MeaningLine]:
    if not gpu.power_w:
        return
    says = (
        f"the board's limit, {gpu.power_w / 1000:g} kWh an hour; the clock falls to stay below "
        "it. Energy per sample is power x step time / batch size"
    )
    if gpu.for_a_job.flop_per_joule is not None:
        says += f"; {gpu.for_a_job.flop_per_joule / 1e9:.0f} GFLOP per joule at best"
    says += "."
    if gpu.capability in JETPACK:
        says += " The power mode (nvpmodel) may set less."
    elif gpu.laptop:
        says += " The device's maker sets the limit: see `nvidia-smi -q -d POWER`."
    yield _line(gpu, "power", f"{gpu.power_w:g} W", says, "power_w")


def _clock(gpu: GpuFigures) -> Iterator[MeaningLine]:
    if gpu.boost_clock_hz is None:
        return
    says = (
        "the clock of the FP32 rate (Tensor rates of a data sheet may assume a lower one); long "
        "jobs run at the clock that power and temperature allow."
    )
    value = f"{gpu.boost_clock_hz / 1e6:.0f} MHz"
    yield _line(gpu, "boost clock", value, says, "boost_clock_hz")


def _parameter_count(number: int) -> str:
    if number >= 10**9:
        return f"{three_digits(number / 1e9)} billion"
    return f"{three_digits(number / 1e6)} million"
