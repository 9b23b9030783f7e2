"""The recorded machines are whole, agree with their composing script, and are plausible."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from typing import Any

import pytest

import helpers_machines as helpers
from helpers_cases import some_of
from trainfit.hardware.machine.files import expanded
from trainfit.hardware.machine.recorded import VARIABLES, RecordedSystem, _numbers, read_machine

sys.path.insert(0, str(helpers.MACHINES))
import compose

ALL = helpers.names()
CPU = "/sys/devices/system/cpu"

#: doc of the decision table: its causes, and the machines that must show each.
CAUSES = {
    "cpu_only_torch", "masked", "no_gpu", "no_driver", "container_without_gpu",
    "container_lost_gpu", "version_mismatch", "driver_too_old", "fabric_manager_down",
    "no_kernel_image", "forked_after_cuda", "device_node", "mig_without_instances", "wsl_driver",
}  # fmt: skip
MISMATCHED = {"version-mismatch", "version-mismatch-after-upgrade"}


@functools.cache
def document(name: str) -> dict[str, Any]:
    return helpers.document(name)


@functools.cache
def files(name: str) -> dict[str, Any]:
    return dict(expanded(document(name)["files"]))


def having(path: str) -> list[str]:
    return [name for name in ALL if path in files(name)]


COMPOSED = [name for name in ALL if document(name)["origin"] == "composed"]


# --- Files, script, README --------------------------------------------------------------------


def test_files_and_script_agree() -> None:
    composed = {name: compose.text(each) for name, each in compose.documents().items()}
    written = {
        name: (helpers.MACHINES / f"{name}.json").read_text(encoding="utf-8") for name in COMPOSED
    }
    assert written.keys() == composed.keys()
    differing = [name for name in written if written[name] != composed[name]]
    assert not differing, f"run `python tests/machines/compose.py`: {differing}"


def test_readme_has_the_table_of_these_machines() -> None:
    readme = (helpers.MACHINES / "README.md").read_text(encoding="utf-8")
    assert compose.readme({name: document(name) for name in ALL}) == readme
    for name in ALL:
        assert f"| `{name}` |" in readme


def test_writes_the_same_bytes_as_a_command(tmp_path) -> None:
    """The script also works on its own, from any folder."""
    path = f"import sys; sys.path.insert(0, {str(helpers.MACHINES)!r})"
    words = f"{path}; import compose; print(len(compose.documents()))"
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == len(COMPOSED)


@pytest.mark.parametrize("name", ALL)
def test_states_what_it_is(name: str) -> None:
    found = read_machine(helpers.MACHINES / f"{name}.json")
    assert found["origin"] in ("recorded", "composed")
    assert found["provenance"].strip() and found["about"].strip()
    assert found["expected_cause"] in CAUSES | {""}
    assert set(found["environment"]) <= set(VARIABLES)


def test_every_cause_has_a_machine() -> None:
    assert {document(name)["expected_cause"] for name in ALL} == CAUSES | {""}
    assert "this-machine" in ALL and document("this-machine")["origin"] == "recorded"


# --- Replay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_replays(name: str) -> None:
    system = helpers.machine(name)
    for path, content in files(name).items():
        assert system.exists(path), path
        if isinstance(content, str):
            assert system.text(path).value == content.strip(" \t\r\n\0")
        elif "link" in content:
            assert system.link(path).value == content["link"]
    for probe, answer in document(name)["probes"].items():
        if "fails" not in answer:
            assert system.probe(probe, 1).value == answer
    assert system.affinity().is_known and system.limit("NOFILE").is_known
    assert system.space("/dev/shm").is_known and system.space("/").is_known


@pytest.mark.parametrize("name", COMPOSED)
def test_no_link_leads_nowhere(name: str) -> None:
    system = helpers.machine(name)
    for path, content in files(name).items():
        if isinstance(content, dict) and "link" in content:
            found = system.text(path).is_known or system.names(path).is_known
            assert found, f"{path} → {content['link']}"


# --- The processor ----------------------------------------------------------------------------


def _cpus(name: str) -> range:
    found = {
        int(match[1]) for path in files(name) if (match := re.match(rf"{CPU}/cpu(\d+)/", path))
    }
    assert found == set(range(len(found)))
    return range(len(found))


def _parsed(text: str) -> list[int]:
    return list(_numbers(text))


@pytest.mark.parametrize("name", ALL)
def test_cpus_are_the_same_everywhere(name: str) -> None:
    tree, cpus = files(name), _cpus(name)
    for listed in ("possible", "present", "online"):
        assert _parsed(tree[f"{CPU}/{listed}"].strip()) == list(cpus)
    processors = re.findall(r"^processor\s*: (\d+)$", tree["/proc/cpuinfo"], re.MULTILINE)
    assert [int(each) for each in processors] == list(cpus)
    affinity = _parsed(document(name)["calls"]["affinity"])
    assert set(affinity) <= set(cpus)
    status = re.search(r"^Cpus_allowed_list:\s*(\S+)$", tree["/proc/self/status"], re.MULTILINE)
    assert status and _parsed(status[1]) == affinity


@pytest.mark.parametrize("name", ALL)
def test_siblings_are_mutual_and_match_cpuinfo(name: str) -> None:
    tree, cpus = files(name), _cpus(name)
    blocks = tree["/proc/cpuinfo"].strip().split("\n\n")
    for cpu in cpus:
        place = f"{CPU}/cpu{cpu}/topology"
        for kind in ("thread_siblings_list", "core_siblings_list"):
            siblings = _parsed(tree[f"{place}/{kind}"].strip())
            assert cpu in siblings
            for other in siblings:
                assert _parsed(tree[f"{CPU}/cpu{other}/topology/{kind}"].strip()) == siblings
        for word, file in (("core id", "core_id"), ("physical id", "physical_package_id")):
            if found := re.search(rf"^{word}\s*: (\d+)$", blocks[cpu], re.MULTILINE):
                assert int(found[1]) == int(tree[f"{place}/{file}"])


@pytest.mark.parametrize("name", having(f"{CPU}/cpufreq/policy0/scaling_driver"))
def test_frequencies_are_consistent(name: str) -> None:
    tree = files(name)
    for cpu in _cpus(name):
        place = f"{CPU}/cpufreq/policy{cpu}"
        khz = {
            key: int(tree[f"{place}/{key}"])
            for key in (
                "cpuinfo_min_freq",
                "scaling_cur_freq",
                "scaling_max_freq",
                "cpuinfo_max_freq",
            )
        }
        assert 0 < khz["cpuinfo_min_freq"] <= khz["scaling_cur_freq"] <= khz["cpuinfo_max_freq"]
        assert khz["scaling_max_freq"] <= khz["cpuinfo_max_freq"]
        governors = tree[f"{place}/scaling_available_governors"].split()
        assert tree[f"{place}/scaling_governor"] in governors
        assert tree[f"{CPU}/cpu{cpu}/cpufreq"] == {"link": f"../cpufreq/policy{cpu}"}


@pytest.mark.parametrize("name", ALL)
def test_nodes_share_out_all_cpus_and_memory(name: str) -> None:
    tree = files(name)
    nodes = _parsed(tree["/sys/devices/system/node/online"].strip())
    cpus = [
        cpu
        for node in nodes
        for cpu in _parsed(tree[f"/sys/devices/system/node/node{node}/cpulist"].strip())
    ]
    assert sorted(cpus) == list(_cpus(name))
    if name not in COMPOSED:  # where memory came later (hot-plugged), the nodes may not show it
        return
    memory = 0
    for node in nodes:
        text = tree[f"/sys/devices/system/node/node{node}/meminfo"]
        memory += int(re.search(r"MemTotal:\s+(\d+) kB", text)[1])
    total = _meminfo(name)["MemTotal"]
    assert abs(memory - total) <= max(len(nodes), total // 100)


# --- Memory, mounts, cgroups ------------------------------------------------------------------


def _meminfo(name: str) -> dict[str, int]:
    lines = files(name)["/proc/meminfo"].strip().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


@pytest.mark.parametrize("name", ALL)
def test_memory_adds_up(name: str) -> None:
    memory = _meminfo(name)
    assert 0 < memory["MemFree"] <= memory["MemAvailable"] <= memory["MemTotal"]
    assert 0 <= memory["SwapFree"] <= memory["SwapTotal"]
    assert memory["MemFree"] + memory["Cached"] <= memory["MemTotal"]
    shm, free = document(name)["calls"]["spaces"]["/dev/shm"]
    assert 0 < free <= shm <= memory["MemTotal"] * 1024


@pytest.mark.parametrize("name", ALL)
def test_mounts_and_disks(name: str) -> None:
    tree = files(name)
    points = {}
    for line in tree["/proc/self/mountinfo"].strip().splitlines():
        left, right = line.split(" - ")
        fields, (kind, source, _) = left.split(), right.split(" ", 2)
        assert re.fullmatch(r"\d+:\d+", fields[2]) and fields[4].startswith("/")
        points[fields[4]] = kind
        if re.match(r"/dev/(nvme|sd|vd)", source) and kind in ("ext4", "xfs"):
            assert f"/sys/dev/block/{fields[2]}" in tree, line
            assert source in tree, line
    assert {"/", "/dev/shm", "/proc", "/sys"} <= set(points)
    whole = [path for path in tree if re.match(r"/sys/block/(nvme|sd|vd)", path)]
    assert whole
    system = helpers.machine(name)
    for path in (path for path in whole if path.count("/") == 3):
        assert system.text(f"{path}/queue/rotational").value in ("0", "1")


@pytest.mark.parametrize("name", ALL)
def test_cgroup_of_the_process_is_there(name: str) -> None:
    tree = files(name)
    for line in tree["/proc/self/cgroup"].strip().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers and len(tree["/proc/self/cgroup"].splitlines()) == 1:
            place = f"/sys/fs/cgroup{path}".rstrip("/")
            assert f"{place}/memory.max" in tree and f"{place}/cpu.max" in tree
            quota, period = tree[f"{place}/cpu.max"].split()
            assert quota == "max" or int(quota) > 0
            assert int(period) > 0


# --- The GPU's stack --------------------------------------------------------------------------


def _gpus(name: str) -> list[dict[str, Any]]:
    answer = document(name)["probes"]["nvml_gpus"]
    return answer.get("gpus", []) if isinstance(answer, dict) else []


def _library_versions(name: str) -> set[str]:
    found = (re.search(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.[\d.]+)$", path) for path in files(name))
    return {match[1] for match in found if match and match[1] != "1.1"}


@pytest.mark.parametrize("name", having("/proc/driver/nvidia/version"))
def test_versions_agree_where_they_should(name: str) -> None:
    text = files(name)["/proc/driver/nvidia/version"]
    version = re.search(r"  (\d+\.[\d.]+)  ", text)[1]
    assert files(name)["/sys/module/nvidia/version"] == version
    assert "nvidia " in files(name)["/proc/modules"]
    libraries = _library_versions(name)
    assert (libraries == {version}) is not (
        name in MISMATCHED or document(name)["expected_cause"] == "container_without_gpu"
    )
    nvml = document(name)["probes"]["nvml_gpus"]
    assert nvml.get("driver", version) == version


@pytest.mark.parametrize("name", ALL)
def test_bus_proc_nvml_and_nvidia_smi_name_the_same_gpus(name: str) -> None:
    tree, gpus = files(name), _gpus(name)
    command = document(name)["commands"].get("nvidia-smi -L")
    if gpus:
        assert command["code"] == 0
        assert re.findall(r"^GPU \d+: .* \(UUID: (\S+)\)$", command["stdout"], re.MULTILINE) == [
            gpu["uuid"] for gpu in gpus
        ]
    else:
        assert command is None or command["code"] != 0
    for gpu in gpus:
        if not isinstance(gpu["pci_address"], str) or "/dev/dxg" in tree:
            continue
        address = gpu["pci_address"][4:].lower()
        place = f"/sys/bus/pci/devices/{address}"
        assert tree[f"{place}/vendor"] == "0x10de"
        assert tree[f"{place}/current_link_width"] == str(gpu["pcie_width"])
        assert tree[f"{place}/max_link_width"] == str(gpu["pcie_width_max"])
        information = tree[f"/proc/driver/nvidia/gpus/{address}/information"]
        assert gpu["uuid"] in information and gpu["name"] in information


GPU_KEYS = """
    index name uuid capability memory_total memory_used memory_reserved utilisation_gpu
    utilisation_memory pci_address pcie_generation pcie_generation_max pcie_width pcie_width_max
    numa_node sm_mhz sm_max_mhz memory_mhz memory_max_mhz application_sm_mhz performance_state
    clock_reasons temperature_c slowdown_c power_mw power_limit_mw power_limit_default_mw
    persistence compute_mode ecc ecc_errors mig mig_instances processes
"""
TORCH_KEYS = """
    version cuda hip available devices error architectures capabilities kernel_error warnings
"""


@pytest.mark.parametrize("name", ALL)
def test_probes_have_the_agreed_shape(name: str) -> None:
    probes = document(name)["probes"]
    assert set(probes) == {"nvml_gpus", "cuda_driver", "torch_devices"}
    for gpu in _gpus(name):
        assert set(gpu) == set(GPU_KEYS.split())
        if isinstance(gpu["memory_total"], int) and isinstance(gpu["memory_used"], int):
            assert gpu["memory_used"] <= gpu["memory_total"]
    torch = probes["torch_devices"]
    assert set(torch) == set(TORCH_KEYS.split())
    assert torch["available"] == (torch["devices"] > 0) == (torch["error"] == "")
    assert len(torch["capabilities"]) == torch["devices"]
    assert (torch["kernel_error"] is None) == (torch["devices"] == 0)
    cuda = probes["cuda_driver"]
    assert "missing" in cuda or (cuda["code"] == 0) == (cuda["error"] == "")
    if torch["available"]:
        assert cuda["code"] == 0 and cuda["devices"] == torch["devices"]


@pytest.mark.parametrize("name", ALL)
def test_the_libcuda_that_was_asked_is_there(name: str) -> None:
    cuda = document(name)["probes"]["cuda_driver"]
    if "missing" in cuda:
        assert not [path for path in files(name) if re.search(r"/libcuda\.so", path)]
    else:
        assert cuda["path"] in files(name)


@pytest.mark.parametrize("name", ALL)
def test_wheels_files_say_what_the_probe_says(name: str) -> None:
    folder = document(name)["calls"]["packages"]["torch"]
    text = files(name)[f"{folder}/version.py"]
    torch = document(name)["probes"]["torch_devices"]
    assert f"__version__ = '{torch['version']}'" in text
    assert f"cuda: Optional[str] = {torch['cuda']!r}" in text


@pytest.mark.parametrize("name", ALL)
def test_works_exactly_where_no_cause_is_expected(name: str) -> None:
    torch = document(name)["probes"]["torch_devices"]
    works = torch["available"] and torch["kernel_error"] == ""
    cause = document(name)["expected_cause"]
    needs_none = torch["cuda"] is None and not cause  # no GPU, and a build for the CPU
    assert works == (cause in ("", "forked_after_cuda") and not needs_none)
    assert document(name)["calls"].get("bad_fork", False) == (cause == "forked_after_cuda")


# --- Mutations --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some_of(range(100), 10))
def test_mutations_replay_and_differ(seed: int) -> None:
    original = helpers.document(ALL[seed % len(ALL)])
    before = json.dumps(original)
    changed = helpers.mutated(original, seed)
    assert json.dumps(original) == before
    assert changed != original
    assert helpers.mutated(original, seed) == changed
    _ask_everything(RecordedSystem(changed), changed)


def _ask_everything(system: RecordedSystem, changed: dict[str, Any]) -> None:
    for path in dict(expanded(changed["files"])):
        system.text(path)
        system.names(path)
        system.accessible(path)
    for name in ("nvml_gpus", "cuda_driver", "torch_devices"):
        system.probe(name, 1)
    system.affinity(), system.limit("NOFILE"), system.space("/data"), system.packages()


def test_mutations_are_of_every_kind() -> None:
    found: set[str] = set()
    original = helpers.document("t4-vm")
    for seed in range(100):
        changed = helpers.mutated(original, seed)
        for content in dict(expanded(changed["files"])).values():
            found.add(
                content.get("error", next(iter(content))) if isinstance(content, dict) else ""
            )
        for kind in ("probes", "commands"):
            for each in changed[kind].values():
                found |= {"hangs", "fails"} & set(each)
    assert {"EACCES", "EIO", "base64", "folder", "link", "", "hangs", "fails"} <= found


def test_a_driver_may_hang() -> None:
    system = RecordedSystem(helpers.hanging(helpers.document("workstation")))
    assert system.probe("nvml_gpus", 3).reason == "no answer within 3 s"
    assert system.command(["nvidia-smi", "-L"], 3).reason == "no answer within 3 s"
