"""Processors: /proc/cpuinfo, topology, NUMA nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parts import Files, Part, cpu_list, each, each_of, frequency

CPU = "/sys/devices/system/cpu"

#: Flags as published (see README.md, "Sources"); the long lists of servers are shortened.
I9_12900K_FLAGS = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush dts acpi mmx"
    " fxsr sse sse2 ss ht tm pbe syscall nx pdpe1gb rdtscp lm constant_tsc art arch_perfmon pebs"
    " bts rep_good nopl xtopology nonstop_tsc cpuid aperfmperf tsc_known_freq pni pclmulqdq dtes64"
    " monitor ds_cpl vmx smx est tm2 ssse3 sdbg fma cx16 xtpr pdcm pcid sse4_1 sse4_2 x2apic movbe"
    " popcnt tsc_deadline_timer aes xsave avx f16c rdrand lahf_lm abm 3dnowprefetch cpuid_fault epb"
    " ssbd ibrs ibpb stibp ibrs_enhanced tpr_shadow flexpriority ept vpid ept_ad fsgsbase"
    " tsc_adjust bmi1 avx2 smep bmi2 erms invpcid rdseed adx smap clflushopt clwb intel_pt sha_ni"
    " xsaveopt xsavec xgetbv1 xsaves split_lock_detect avx_vnni dtherm ida arat pln pts hwp"
    " hwp_notify hwp_act_window hwp_epp hwp_pkg_req hfi vnmi umip pku ospke waitpkg gfni vaes"
    " vpclmulqdq rdpid movdiri movdir64b fsrm md_clear serialize arch_lbr flush_l1d"
    " arch_capabilities"
)
I7_9700K_FLAGS = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush dts acpi mmx"
    " fxsr sse sse2 ss ht tm pbe syscall nx pdpe1gb rdtscp lm constant_tsc art arch_perfmon pebs"
    " bts rep_good nopl xtopology nonstop_tsc cpuid aperfmperf pni pclmulqdq dtes64 monitor ds_cpl"
    " vmx smx est tm2 ssse3 sdbg fma cx16 xtpr pdcm pcid sse4_1 sse4_2 x2apic movbe popcnt"
    " tsc_deadline_timer aes xsave avx f16c rdrand lahf_lm abm 3dnowprefetch cpuid_fault ssbd ibrs"
    " ibpb stibp tpr_shadow flexpriority ept vpid ept_ad fsgsbase tsc_adjust bmi1 avx2 smep bmi2"
    " erms invpcid mpx rdseed adx smap clflushopt intel_pt xsaveopt xsavec xgetbv1 xsaves dtherm"
    " ida arat pln pts hwp hwp_notify hwp_act_window hwp_epp vnmi md_clear flush_l1d"
    " arch_capabilities"
)
CLOUD_XEON_FLAGS = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse"
    " sse2 ss ht syscall nx pdpe1gb rdtscp lm constant_tsc rep_good nopl xtopology nonstop_tsc"
    " cpuid tsc_known_freq pni pclmulqdq ssse3 fma cx16 pcid sse4_1 sse4_2 x2apic movbe popcnt aes"
    " xsave avx f16c rdrand hypervisor lahf_lm abm 3dnowprefetch invpcid_single ssbd ibrs ibpb"
    " stibp fsgsbase tsc_adjust bmi1 hle avx2 smep bmi2 erms invpcid rtm rdseed adx smap xsaveopt"
    " arat md_clear arch_capabilities"
)
EPYC_FLAGS = (
    "fpu vme de pse tsc msr sse sse2 ht syscall nx mmxext rdtscp lm constant_tsc rep_good nopl"
    " nonstop_tsc cpuid extd_apicid aperfmperf rapl pni ssse3 fma sse4_1 sse4_2 x2apic movbe popcnt"
    " aes xsave avx f16c rdrand svm cpb hw_pstate bmi1 avx2 bmi2 arat"
)
WSL_RYZEN_FLAGS = (
    "fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse"
    " sse2 ht syscall nx mmxext fxsr_opt pdpe1gb rdtscp lm constant_tsc rep_good nopl tsc_reliable"
    " nonstop_tsc cpuid extd_apicid pni pclmulqdq ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes"
    " xsave avx f16c rdrand hypervisor lahf_lm cmp_legacy cr8_legacy abm sse4a misalignsse"
    " 3dnowprefetch osvw topoext ssbd ibrs ibpb stibp vmmcall fsgsbase bmi1 avx2 smep bmi2 erms"
    " rdseed adx smap clflushopt clwb sha_ni xsaveopt xsavec xgetbv1 xsaves clzero xsaveerptr arat"
    " umip vaes vpclmulqdq rdpid"
)


@dataclasses.dataclass(frozen=True)
class Thread:
    """One logical CPU: which core of which package it is, on which node, with which APIC id."""

    package: int
    core: int
    apic: int
    node: int = 0


@dataclasses.dataclass(frozen=True)
class Model:
    """The lines of /proc/cpuinfo that are the same for all CPUs."""

    vendor: str
    family: int
    number: int
    name: str
    stepping: int
    microcode: str
    cache_kib: int
    flags: str
    bogomips: str
    level: int
    bits: str
    bugs: str = "spectre_v1 spectre_v2 spec_store_bypass"


I9_12900K = Model(
    "GenuineIntel", 6, 151, "12th Gen Intel(R) Core(TM) i9-12900K", 2, "0x37", 30720,
    I9_12900K_FLAGS, "6374.40", 32, "39 bits physical, 48 bits virtual",
)  # fmt: skip
I7_9700K = Model(
    "GenuineIntel", 6, 158, "Intel(R) Core(TM) i7-9700K CPU @ 3.60GHz", 12, "0xf8", 12288,
    I7_9700K_FLAGS, "7200.00", 22, "39 bits physical, 48 bits virtual",
)  # fmt: skip
I7_1260P = Model(
    "GenuineIntel", 6, 154, "12th Gen Intel(R) Core(TM) i7-1260P", 3, "0x421", 18432,
    I9_12900K_FLAGS, "4992.00", 32, "39 bits physical, 48 bits virtual",
)  # fmt: skip
CLOUD_XEON = Model(
    "GenuineIntel", 6, 79, "Intel(R) Xeon(R) CPU @ 2.20GHz", 0, "0x1", 56320,
    CLOUD_XEON_FLAGS, "4399.99", 13, "46 bits physical, 48 bits virtual",
)  # fmt: skip
EPYC_7543 = Model(
    "AuthenticAMD", 25, 1, "AMD EPYC 7543 32-Core Processor", 1, "0xa0011d1", 512,
    EPYC_FLAGS, "5589.54", 16, "48 bits physical, 48 bits virtual",
)  # fmt: skip
EPYC_9334 = Model(
    "AuthenticAMD", 25, 17, "AMD EPYC 9334 32-Core Processor", 1, "0xa101144", 1024,
    EPYC_FLAGS, "5391.68", 16, "52 bits physical, 57 bits virtual",
)  # fmt: skip
RYZEN_5800X = Model(
    "AuthenticAMD", 25, 33, "AMD Ryzen 7 5800X 8-Core Processor", 0, "0xffffffff", 512,
    WSL_RYZEN_FLAGS, "7585.91", 13, "48 bits physical, 48 bits virtual",
)  # fmt: skip


def processor(model: Model, threads: Sequence[Thread], mhz: Sequence[float]) -> Part:
    """cpuinfo, topology and the full affinity of an x86 processor."""
    files = {"/proc/cpuinfo": _cpuinfo(model, threads, mhz)} | topology(threads)
    return {"files": files, "calls": {"affinity": cpu_list(range(len(threads)))}}


def _cpuinfo(model: Model, threads: Sequence[Thread], mhz: Sequence[float]) -> str:
    blocks = []
    for number, thread in enumerate(threads):
        in_package = [each for each in threads if each.package == thread.package]
        cores = len({each.core for each in in_package})
        blocks.append(
            f"processor\t: {number}\nvendor_id\t: {model.vendor}\ncpu family\t: {model.family}\n"
            f"model\t\t: {model.number}\nmodel name\t: {model.name}\n"
            f"stepping\t: {model.stepping}\nmicrocode\t: {model.microcode}\n"
            f"cpu MHz\t\t: {mhz[number % len(mhz)]:.3f}\ncache size\t: {model.cache_kib} KB\n"
            f"physical id\t: {thread.package}\nsiblings\t: {len(in_package)}\n"
            f"core id\t\t: {thread.core}\ncpu cores\t: {cores}\napicid\t\t: {thread.apic}\n"
            f"initial apicid\t: {thread.apic}\nfpu\t\t: yes\nfpu_exception\t: yes\n"
            f"cpuid level\t: {model.level}\nwp\t\t: yes\nflags\t\t: {model.flags}\n"
            f"bugs\t\t: {model.bugs}\nbogomips\t: {model.bogomips}\nclflush size\t: 64\n"
            f"cache_alignment\t: 64\naddress sizes\t: {model.bits}\npower management:\n\n"
        )
    return "".join(blocks)


def topology(threads: Sequence[Thread]) -> Files:
    """/sys/devices/system/cpu without frequency and idle states."""
    cores, packages = _siblings(threads, True), _siblings(threads, False)
    everyone = cpu_list(range(len(threads)))
    smt = any("," in core or "-" in core for core in cores)
    files: Files = {
        f"{CPU}/online": everyone,
        f"{CPU}/possible": everyone,
        f"{CPU}/present": everyone,
        f"{CPU}/offline": "",
        f"{CPU}/isolated": "",
        f"{CPU}/kernel_max": "8191",
        f"{CPU}/smt/active": "1" if smt else "0",
        f"{CPU}/smt/control": "on" if smt else "notsupported",
    }
    values = {
        "core_id": [str(thread.core) for thread in threads],
        "physical_package_id": [str(thread.package) for thread in threads],
        "die_id": ["0"] * len(threads),
        "thread_siblings_list": cores,
        "core_cpus_list": cores,
        "core_siblings_list": packages,
        "package_cpus_list": packages,
    }
    for name, each_cpu in values.items():
        files |= each(f"{CPU}/cpu{{}}/topology/{name}", each_cpu)
    return files | each_of(f"{CPU}/cpu{{}}/online", range(1, len(threads)), ["1"] * len(threads))


def _siblings(threads: Sequence[Thread], of_core: bool) -> list[str]:
    groups: dict[tuple[int, int], list[int]] = {}
    keys = [(thread.package, thread.core if of_core else -1) for thread in threads]
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return [cpu_list(groups[key]) for key in keys]


def nodes(cpus: Sequence[Sequence[int]], memory_kib: int, free_kib: int) -> Part:
    """NUMA nodes with their CPUs; the memory is shared out evenly."""
    folder, count = "/sys/devices/system/node", len(cpus)
    numbers = cpu_list(range(count))
    files: Files = {
        f"{folder}/{name}": numbers
        for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory")
    }
    files |= each(f"{folder}/node{{}}/cpulist", [cpu_list(each_node) for each_node in cpus])
    total, free = memory_kib // count, free_kib // count
    texts = [
        f"\nNode {node} MemTotal:       {total} kB\nNode {node} MemFree:        {free} kB\n"
        f"Node {node} MemUsed:        {total - free} kB\n"
        for node in range(count)
    ]
    distances = [
        " ".join("10" if node == other else "32" for other in range(count)) for node in range(count)
    ]
    files |= each(f"{folder}/node{{}}/meminfo", texts)
    return {"files": files | each(f"{folder}/node{{}}/distance", distances)}


# --- Whole processors -------------------------------------------------------------------------


def alder_lake(big: int, little: int, first_little: int) -> list[Thread]:
    """Performance cores with two threads each, then efficiency cores with one."""
    threads = [Thread(0, 4 * core, 8 * core + twin) for core in range(big) for twin in (0, 1)]
    return threads + [Thread(0, first_little + n, 2 * (first_little + n)) for n in range(little)]


def plain(cores: int) -> list[Thread]:
    """Cores with one thread each."""
    return [Thread(0, core, 2 * core) for core in range(cores)]


def twins_last(packages: int, cores: int) -> list[Thread]:
    """Cores with two threads, the second threads numbered after all first ones."""
    return [
        Thread(package, core, package * 128 + 2 * core + twin, node=package)
        for twin in (0, 1)
        for package in range(packages)
        for core in range(cores)
    ]


def twins_beside(cores: int) -> list[Thread]:
    """Cores with two threads side by side, as hypervisors number them."""
    return [Thread(0, core, 2 * core + twin) for core in range(cores) for twin in (0, 1)]


def i9_12900k() -> Part:
    """8 P-cores (two of them faster), 8 E-cores; `powersave` with HWP is its usual state."""
    threads = alder_lake(8, 8, 32)
    current = [*[1_724_880, 3_482_112] * 8, *[1_600_000, 2_318_447] * 4]
    fastest = [5_200_000 if 8 <= cpu < 12 else 5_100_000 for cpu in range(16)]
    part = processor(I9_12900K, threads, [khz / 1000 for khz in current])
    pstate = frequency.intel_pstate(
        "powersave", "balance_performance", 800_000,
        [3_200_000] * 16 + [2_400_000] * 8, [*fastest, *[3_900_000] * 8], current,
    )  # fmt: skip
    return _joined(
        part,
        pstate,
        frequency.idle(frequency.ALDER_LAKE, 24, "intel_idle"),
        _hybrid("0-15", "16-23"),
    )


def i7_1260p() -> Part:
    """A laptop's hybrid processor: 4 P-cores, 8 E-cores."""
    threads = alder_lake(4, 8, 16)
    current = [*[1_610_656, 962_113] * 4, *[1_100_042] * 8]
    part = processor(I7_1260P, threads, [khz / 1000 for khz in current])
    pstate = frequency.intel_pstate(
        "powersave", "balance_power", 400_000,
        [2_500_000] * 8 + [1_800_000] * 8, [4_700_000] * 8 + [3_400_000] * 8, current,
    )  # fmt: skip
    return _joined(
        part, pstate, frequency.idle(frequency.ALDER_LAKE, 16, "intel_idle"), _hybrid("0-7", "8-15")
    )


def _hybrid(big: str, little: str) -> Part:
    return {
        "files": {
            "/sys/devices/cpu_core/cpus": big,
            "/sys/devices/cpu_core/type": "4",
            "/sys/devices/cpu_atom/cpus": little,
            "/sys/devices/cpu_atom/type": "10",
        }
    }


def i7_9700k() -> Part:
    """Eight plain cores at `performance`."""
    part = processor(I7_9700K, plain(8), [4600.012, 4599.874])
    pstate = frequency.intel_pstate(
        "performance", "performance", 800_000,
        [3_600_000] * 8, [4_900_000] * 8, [4_600_012, 4_599_874],
    )  # fmt: skip
    return _joined(part, pstate, frequency.idle(frequency.COFFEE_LAKE, 8, "intel_idle"))


def cloud_xeon(vcpus: int) -> Part:
    """A virtual machine's share of a Xeon: neither cpufreq nor C-states."""
    part = processor(CLOUD_XEON, twins_beside(vcpus // 2), [2199.998])
    return _joined(part, frequency.no_idle())


def epyc_7543() -> Part:
    """One socket, 32 cores, 64 threads, `schedutil`."""
    part = processor(EPYC_7543, twins_last(1, 32), [2794.770, 1500.000, 1498.112])
    freq = frequency.acpi_cpufreq("schedutil", 64, 2_800_000, 3_737_890, [2_794_770, 1_500_000])
    return _joined(part, freq, frequency.idle(frequency.AMD_SERVER, 64, "acpi_idle"))


def two_epyc_9334() -> Part:
    """Two sockets, 64 cores, 128 threads, `performance`."""
    part = processor(EPYC_9334, twins_last(2, 32), [3886.402, 3891.118, 2695.840])
    freq = frequency.acpi_cpufreq("performance", 128, 2_700_000, 3_910_253, [2_695_840, 2_700_000])
    return _joined(part, freq, frequency.idle(frequency.AMD_SERVER, 128, "acpi_idle"))


def wsl_ryzen() -> Part:
    """What a virtual machine of Hyper-V sees of a Ryzen."""
    part = processor(RYZEN_5800X, twins_beside(8), [3792.956])
    return _joined(part, frequency.no_idle())


def orin() -> Part:
    """12 Cortex-A78AE in three clusters, which Linux 5.15 takes for three packages."""
    threads = [Thread(cpu // 4, cpu % 4, cpu) for cpu in range(12)]
    features = (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc"
        " dcpop asimddp uscat ilrcpc flagm paca pacg"
    )
    cpuinfo = "".join(
        f"processor\t: {cpu}\nBogoMIPS\t: 62.50\nFeatures\t: {features}\n"
        "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd42\n"
        "CPU revision\t: 1\n\n"
        for cpu in range(12)
    )
    files = {"/proc/cpuinfo": cpuinfo} | topology(threads)
    files |= each(f"{CPU}/cpu{{}}/cpu_capacity", ["1024"] * 12)
    governors = "conservative ondemand userspace powersave performance schedutil"
    freq = frequency.cpufreq(
        "tegra194", "schedutil", governors, 115_200, [2_201_600] * 12, [729_600, 1_113_600]
    )
    calls = {"affinity": "0-11"}
    part: Part = {"files": files, "calls": calls}
    return _joined(part, freq, frequency.idle(frequency.TEGRA, 12, "psci_idle"))


def _joined(*parts: Part) -> Part:
    files: Files = {}
    for part in parts:
        files |= part["files"]
    return {"files": files, "calls": parts[0]["calls"]}
