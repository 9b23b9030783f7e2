"""Facts of memory, storage, limits and surroundings; and that no reader ever raises."""

from __future__ import annotations

import base64
import dataclasses
import json
import resource
from collections.abc import Mapping
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_trees import (
    ROOT_MOUNT,
    V2_MOUNT,
    alder_lake,
    alder_lake_machine,
    cpuinfo,
    facts,
    machine,
    readings,
)
from trainfit.hardware.machine.files import RecordedFiles, expanded
from trainfit.hardware.machine.limits import THREAD_VARIABLES, read_limits, read_memory
from trainfit.hardware.machine.recorded import VARIABLES, RecordedSystem, RecordingSystem
from trainfit.hardware.machine.storage import mount_of, read_mounts, read_storage
from trainfit.hardware.machine.surroundings import read_surroundings
from trainfit.hardware.machine.system import System
from trainfit.results.files.decoding import decode
from trainfit.results.machine import Fact, Storage, Surroundings

# --- Memory -----------------------------------------------------------------------------------


def test_memory_and_swap_in_bytes() -> None:
    memory = read_memory(alder_lake_machine())
    assert memory.total_bytes.value == 65536000 * 1024
    assert memory.available_bytes.value == 60000000 * 1024
    assert memory.swap_total_bytes.value == 2097148 * 1024
    assert memory.swap_used_bytes.value == 97148 * 1024
    assert (memory.shm_total_bytes.value, memory.shm_free_bytes.value) == (32 << 30, 31 << 30)
    assert memory.limit_bytes.is_absent and memory.limit_used_bytes.is_absent


def test_without_swap_there_is_none_rather_than_0_bytes() -> None:
    files = {"/proc/meminfo": "MemTotal: 100 kB\nSwapTotal:       0 kB\nSwapFree:        0 kB\n"}
    memory = read_memory(machine(files))
    assert memory.swap_total_bytes.is_absent and memory.swap_used_bytes.is_absent
    # Linux before 3.14, or a container's own /proc/meminfo
    assert memory.available_bytes.state == "cannot_tell"
    assert memory.shm_total_bytes.is_absent


def test_the_limit_of_a_container_less_its_file_cache() -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/memory.max": f"{8 << 30}\n",
        "/sys/fs/cgroup/memory.current": f"{3 << 30}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\nactive_file 7\ninactive_file {1 << 30}\n",
    }
    memory = read_memory(machine(files))
    assert memory.limit_bytes.value == 8 << 30
    assert memory.limit_used_bytes.value == 2 << 30


def test_the_tightest_memory_limit_and_its_own_usage() -> None:
    slice_, own = "/sys/fs/cgroup/a", "/sys/fs/cgroup/a/b"
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/proc/self/mountinfo": V2_MOUNT,
        f"{slice_}/memory.max": "4000",
        f"{slice_}/memory.current": "3000",
        f"{slice_}/memory.stat": "inactive_file 500",
        f"{own}/memory.max": "9000",
        f"{own}/memory.current": "1000",
        f"{own}/memory.stat": "inactive_file 0",
    }
    memory = read_memory(machine(files))
    assert (memory.limit_bytes.value, memory.limit_used_bytes.value) == (4000, 2500)
    assert memory.limit_bytes.source == f"{slice_}/memory.max"


V1_MOUNT = "36 25 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def version_1(limit: int, stat: str) -> dict[str, Any]:
    return {
        "/proc/self/cgroup": "4:memory:/job\n1:name=systemd:/x\n",
        "/proc/self/mountinfo": V1_MOUNT,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{limit}\n",
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1000\n",
        "/sys/fs/cgroup/memory/job/memory.stat": stat,
    }


def test_version_1_has_no_limit_where_it_is_all_pages_there_could_be() -> None:
    stat = "total_inactive_file 100\nhierarchical_memory_limit 9223372036854771712\n"
    memory = read_memory(machine(version_1(9223372036854771712, stat)))
    assert memory.limit_bytes.is_absent
    # 64 KiB pages, as on some Arm servers
    memory = read_memory(machine(version_1(9223372036854710272, stat)))
    assert memory.limit_bytes.is_absent


def test_version_1_limits_a_job() -> None:
    stat = "inactive_file 1\ntotal_inactive_file 100\nhierarchical_memory_limit 5000\n"
    memory = read_memory(machine(version_1(5000, stat)))
    assert (memory.limit_bytes.value, memory.limit_used_bytes.value) == (5000, 900)


def test_version_1_tells_of_a_limit_above_what_is_visible() -> None:
    stat = "total_inactive_file 100\nhierarchical_memory_limit 3000\n"
    memory = read_memory(machine(version_1(5000, stat)))
    assert memory.limit_bytes.value == 3000
    assert memory.limit_used_bytes.state == "cannot_tell"


# --- Mounts and storage -----------------------------------------------------------------------

MOUNTS = f"""\
{ROOT_MOUNT}
40 26 8:17 / /data rw - ext4 /dev/sdb1 rw
41 26 0:50 / /mnt/my\\040data rw - nfs4 server:/export rw,vers=4.2
42 26 0:51 / /dev/shm rw - tmpfs tmpfs rw
43 26 252:1 / /srv rw - xfs /dev/mapper/vg-srv rw
44 26 9:0 / /raid rw - xfs /dev/md0 rw
45 26 254:1 / /vm rw - ext4 /dev/vda1 rw
46 26 0:60 /@home /btrfs rw - btrfs /dev/sdb1 rw,subvol=/@home
47 26 0:61 / /zfs rw - zfs pool/data rw
48 26 0:62 / /s3 rw - fuse.gcsfuse bucket rw
49 26 259:9 / /ebs rw - xfs /dev/nvme9n1 rw
50 26 7:3 / /loop ro - squashfs /dev/loop3 ro
51 26 0:63 / /c rw - 9p C:\\134 rw
52 26 8:1 / /mixed rw - ext4 /dev/mapper/mixed rw
55 26 8:33 / /iscsi rw - ext4 /dev/sdc1 rw
short line
"""


SESSION = "platform/host3/session1/target3:0:0/3:0:0:1/block"


def disks() -> dict[str, Any]:
    def disk(name: str, where: str, number: str = "", **files: str) -> dict[str, Any]:
        link = {"link": f"../../devices/{where}/{name}"}
        tree: dict[str, Any] = {f"/sys/class/block/{name}": link}
        if number:
            tree[f"/sys/dev/block/{number}"] = link
        for path, text in files.items():
            tree[f"/sys/devices/{where}/{name}/{path.replace('__', '/')}"] = text
        return tree

    sata = "pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block"
    return {
        **disk("sdb", sata, queue__rotational="1\n", device__model="ST4000DM004"),
        **disk("sdb1", f"{sata}/sdb", "8:17", partition="1\n"),
        **disk("sda", sata, queue__rotational="0\n"),
        **disk("dm-0", "virtual/block", "252:1", dm__name="vg-srv\n", slaves__sdb1=""),
        **disk("dm-1", "virtual/block", dm__name="mixed\n", slaves__sdb1="", slaves__sda=""),
        **disk("md0", "virtual/block", "9:0", slaves__sda="", queue__rotational="1\n"),
        **disk("vda", "pci0000:00/0000:00:02.0/virtio1/block", queue__rotational="1\n"),
        **disk("vda1", "pci0000:00/0000:00:02.0/virtio1/block/vda", "254:1", partition="1"),
        **disk(
            "nvme9n1",
            "pci0000:00/nvme/nvme9",
            "259:9",
            device__model="Amazon Elastic Block Store  ",
        ),
        **disk("nvme0n1", "pci0000:00/nvme/nvme0", device__transport="pcie"),
        **disk("nvme0n1p2", "pci0000:00/nvme/nvme0/nvme0n1", "259:2", partition="2"),
        **disk("loop3", "virtual/block", "7:3", loop__backing_file="/data/image.squashfs"),
        **disk("sdc", SESSION, queue__rotational="1"),
        **disk("sdc1", f"{SESSION}/sdc", "8:33", partition="1"),
        "/dev/mapper/vg-srv": {"link": "../dm-0"},
        "/proc/self/mountinfo": MOUNTS,
    }


@pytest.mark.parametrize(
    ("path", "point", "filesystem", "device", "kind"),
    [
        ("/home/x", "/", "ext4", "/dev/nvme0n1p2", "nvme"),
        ("/data/images", "/data", "ext4", "/dev/sdb1", "hdd"),
        ("/database", "/", "ext4", "/dev/nvme0n1p2", "nvme"),
        ("/mnt/my data/a", "/mnt/my data", "nfs4", "server:/export", "network"),
        ("/dev/shm/x", "/dev/shm", "tmpfs", "tmpfs", "memory"),
        ("/srv", "/srv", "xfs", "/dev/mapper/vg-srv", "hdd"),
        ("/raid/a", "/raid", "xfs", "/dev/md0", "ssd"),
        ("/vm", "/vm", "ext4", "/dev/vda1", "virtual"),
        ("/btrfs", "/btrfs", "btrfs", "/dev/sdb1", "hdd"),
        ("/zfs", "/zfs", "zfs", "pool/data", None),
        ("/s3", "/s3", "fuse.gcsfuse", "bucket", "network"),
        ("/ebs", "/ebs", "xfs", "/dev/nvme9n1", "virtual"),
        ("/loop", "/loop", "squashfs", "/dev/loop3", "hdd"),
        ("/c/Users", "/c", "9p", "C:\\", "network"),
        ("/mixed", "/mixed", "ext4", "/dev/mapper/mixed", None),
        ("/iscsi", "/iscsi", "ext4", "/dev/sdc1", "network"),
    ],
)
def test_what_a_path_lies_on(
    path: str, point: str, filesystem: str, device: str, kind: str | None
) -> None:
    storage = read_storage(machine(disks()), path)
    assert storage.path == path
    assert storage.mount_point.value == point
    assert storage.filesystem.value == filesystem
    assert storage.device.value == device
    assert storage.kind.value == kind
    assert storage.kind.state == ("known" if kind else "cannot_tell")


def test_the_last_mount_on_a_point_covers_those_before() -> None:
    lines = f"{ROOT_MOUNT}\n40 26 8:17 / /data rw - ext4 /dev/sdb1 rw\n"
    lines += "53 40 0:70 / /data rw - tmpfs tmpfs rw\n"
    storage = read_storage(machine({"/proc/self/mountinfo": lines}), "/data/a")
    assert (storage.filesystem.value, storage.kind.value) == ("tmpfs", "memory")


OVERLAY = "60 1 0:80 / / rw - overlay overlay rw,lowerdir=/var/l,upperdir=/var/lib/docker/o/diff\n"


def test_a_containers_overlay_says_what_can_be_said() -> None:
    hosts = "61 60 259:2 /c/hosts /etc/hosts rw - ext4 /dev/nvme0n1p2 rw\n"
    storage = read_storage(machine({"/proc/self/mountinfo": OVERLAY + hosts}), "/x")
    assert storage.kind.value == "overlay"
    assert storage.device.state == "cannot_tell"
    assert "/dev/nvme0n1p2" in storage.device.reason


def test_an_overlay_whose_layers_are_visible_is_its_disk() -> None:
    below = "62 60 8:17 / /var/lib rw - ext4 /dev/sdb1 rw\n"
    files = disks() | {"/proc/self/mountinfo": OVERLAY + below}
    files["/var/lib/docker/o/diff"] = {"folder": True}
    assert read_storage(machine(files), "/x").kind.value == "hdd"


def test_sizes_and_rates_of_the_largest_file() -> None:
    storage = read_storage(alder_lake_machine(), "/data")
    assert (storage.total_bytes.value, storage.free_bytes.value) == (10**12, 4 * 10**11)
    assert (storage.read_bytes_per_s.value, storage.cached_bytes_per_s.value) == (3e9, 9e9)
    assert storage.read_bytes_per_s.source == "/data/b.bin"


def test_no_rate_of_small_files_or_of_nothing() -> None:
    system = alder_lake_machine(sizes={"/data": {"/data/a": 100, "/data/b": 5000}})
    rate = read_storage(system, "/data").read_bytes_per_s
    assert (
        rate.reason == "the largest of 2 files has 4.9 KiB; measuring a rate needs at least 8 MiB"
    )
    assert read_storage(system, "/empty").read_bytes_per_s.reason == "it contains no files"
    nothing = read_storage(system, None)
    assert nothing.path == "/home/user"
    assert "no data given" in nothing.read_bytes_per_s.reason


def test_this_machines_file_is_read_from_its_storage(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("data")  # on a disk
    (tmp_path / "small").write_bytes(b"0" * 10)
    (tmp_path / "large").write_bytes(b"\1" * (9 << 20))
    storage = read_storage(System(), str(tmp_path))
    assert storage.total_bytes.value == psutil.disk_usage(str(tmp_path)).total
    point = storage.mount_point.value
    assert point is not None and str(tmp_path).startswith(point)
    rate = storage.read_bytes_per_s
    # Where the file system has no O_DIRECT the reason says so.
    assert rate.value is None or rate.value > 0
    assert rate.value is not None or rate.reason


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "/" + "x" * 5000, ""])
def test_a_path_that_is_none(path: str) -> None:
    assert isinstance(read_storage(System(), path), Storage)


# --- Limits -----------------------------------------------------------------------------------


def test_limits_and_what_is_unlimited() -> None:
    limits = read_limits(alder_lake_machine())
    assert (limits.open_files.value, limits.open_files_hard.value) == (1024, 1048576)
    assert limits.locked_memory_bytes.is_absent
    assert limits.locked_memory_bytes.reason == "unlimited"
    assert limits.processes.value == 255000


def test_thread_variables_are_among_those_that_recordings_hold() -> None:
    assert set(THREAD_VARIABLES) <= set(VARIABLES)


# --- Surroundings -----------------------------------------------------------------------------


def surroundings(
    files: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    **calls: Any,
) -> Surroundings:
    return read_surroundings(machine(files, environment, **calls))


BARE = {"/proc/self/mountinfo": ROOT_MOUNT, "/proc/cpuinfo": cpuinfo(1, "A processor")}


def test_a_workstation_is_no_container_and_no_virtual_machine() -> None:
    found = read_surroundings(alder_lake_machine())
    assert found.operating_system.value == "Ubuntu 24.04.1 LTS"
    assert found.kernel.value == "6.8.0-45-generic"
    for fact in (found.container, found.virtual_machine, found.wsl, found.scheduler):
        assert fact.is_absent
    assert found.scheduler_grant == {}


@pytest.mark.parametrize(
    ("files", "environment", "container"),
    [
        ({"/.dockerenv": "", "/proc/self/mountinfo": OVERLAY}, {}, "docker"),
        ({"/run/.containerenv": ""}, {"container": "oci"}, "podman"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"/.singularity.d": {"folder": True}}, {}, "apptainer"),
        ({}, {"container": "lxc"}, "lxc"),
        ({"/run/systemd/container": "systemd-nspawn\n"}, {}, "systemd-nspawn"),
        ({"/proc/self/cgroup": "4:cpu:/kubepods/burstable/pod1/2\n"}, {}, "kubernetes"),
        ({"/proc/self/cgroup": f"0::/system.slice/docker-{'a1' * 32}.scope"}, {}, "docker"),
        ({"/proc/self/cgroup": "3:cpu:/lxc/one\n"}, {}, "lxc"),
    ],
)
def test_containers(files: dict[str, Any], environment: dict[str, str], container: str) -> None:
    assert surroundings(BARE | files, environment).container.value == container


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"/proc/self/cgroup": "0::/system.slice/docker.service\n"}, "absent"),
        ({"/proc/self/mountinfo": OVERLAY}, "cannot_tell"),
        ({"/proc/self/mountinfo": "garbage"}, "cannot_tell"),
        # What `docker export` leaves in a virtual machine's image.
        ({"/.dockerenv": ""}, "cannot_tell"),
    ],
)
def test_signs_that_are_no_container(files: dict[str, Any], state: str) -> None:
    assert surroundings(BARE | files).container.state == state


@pytest.mark.parametrize(
    ("vendor", "product", "flags", "word"),
    [
        ("QEMU", "Standard PC (Q35 + ICH9, 2009)", "fpu hypervisor", "qemu"),
        ("Google", "Google Compute Engine", "fpu hypervisor", "google"),
        ("Amazon EC2", "g4dn.xlarge", "fpu hypervisor", "amazon-ec2"),
        ("Amazon EC2", "g5g.metal", "", None),
        ("Amazon EC2", "g5g.xlarge", "", "amazon-ec2"),
        ("Amazon EC2", "g4dn.metal", "fpu", None),
        ("Microsoft Corporation", "Virtual Machine", "fpu hypervisor", "hyper-v"),
        ("Microsoft Corporation", "Surface Laptop", "fpu", None),
        ("VMware, Inc.", "VMware Virtual Platform", "fpu hypervisor", "vmware"),
        ("Red Hat", "KVM", "fpu hypervisor", "kvm"),
        ("", "", "fpu hypervisor", "unnamed"),
        ("ASUS", "PRIME Z690", "fpu", None),
    ],
)
def test_virtual_machines(vendor: str, product: str, flags: str, word: str | None) -> None:
    files = BARE | {
        "/proc/cpuinfo": cpuinfo(1, "A processor", flags),
        "/sys/class/dmi/id/sys_vendor": f"{vendor}\n",
        "/sys/class/dmi/id/product_name": f"{product}\n",
    }
    fact = surroundings(files).virtual_machine
    assert (fact.value, fact.state) == (word, "known" if word else "absent")


def test_arm_boards_are_no_virtual_machines_unless_they_say_so() -> None:
    arm = BARE | {"/proc/cpuinfo": "processor: 0\nCPU part: 0xd40\n"}
    board = arm | {"/proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0"}
    assert surroundings(board).virtual_machine.is_absent
    guest = arm | {"/proc/device-tree/model": "linux,dummy-virt\0"}
    assert surroundings(guest).virtual_machine.state == "cannot_tell"
    said = guest | {"/proc/device-tree/hypervisor/compatible": "linux,kvm\0"}
    assert surroundings(said).virtual_machine.value == "linux,kvm"


@pytest.mark.parametrize(
    ("release", "files", "environment", "version"),
    [
        ("5.15.90.1-microsoft-standard-WSL2", {"/dev/dxg": ""}, {"WSL_INTEROP": "/run"}, 2),
        ("4.4.0-19041-Microsoft", {}, {"WSL_INTEROP": "/run"}, 1),
        ("6.6.0-custom", {"/dev/dxg": ""}, {"WSL_DISTRO_NAME": "Ubuntu"}, 2),
        ("5.15.0-1040-azure", {}, {}, None),
    ],
)
def test_wsl(
    release: str, files: dict[str, Any], environment: dict[str, str], version: int
) -> None:
    found = surroundings(BARE | files, environment, uname={"release": release})
    assert found.wsl.value == version
    assert found.wsl.is_absent == (version is None)


@pytest.mark.parametrize(
    ("environment", "scheduler", "grant"),
    [
        (
            {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "SLURM_MEM_PER_NODE": "65536"},
            "slurm",
            ["SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_MEM_PER_NODE"],
        ),
        ({"PBS_JOBID": "7.server", "SLURM_NTASKS": "1"}, "pbs", ["PBS_JOBID"]),
        ({"LSB_JOBID": "7"}, "lsf", ["LSB_JOBID"]),
        ({"JOB_ID": "7", "NSLOTS": "4"}, "sge", ["JOB_ID", "NSLOTS"]),
        ({"JOB_ID": "7"}, None, []),
    ],
)
def test_schedulers(environment: dict[str, str], scheduler: str | None, grant: list[str]) -> None:
    found = surroundings(BARE, environment)
    assert found.scheduler.value == scheduler
    assert sorted(found.scheduler_grant) == grant
    assert all(environment[name] == value for name, value in found.scheduler_grant.items())


# --- This machine -----------------------------------------------------------------------------


def test_this_machine_as_it_is() -> None:
    memory, limits = read_memory(System()), read_limits(System())
    assert memory.total_bytes.value == psutil.virtual_memory().total
    assert (memory.swap_total_bytes.value or 0) == psutil.swap_memory().total
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (limits.open_files.value, limits.open_files_hard.value) == (soft, hard)
    mounts = read_mounts(System()).value
    assert mounts is not None
    assert {(m.point, m.filesystem) for m in mounts} >= {
        (p.mountpoint, p.fstype) for p in psutil.disk_partitions(all=True)
    }
    root = mount_of("/", mounts)
    assert root is not None and root.point == "/"


def test_a_recording_of_this_machine_reads_as_it_did() -> None:
    recorder = RecordingSystem()
    before = readings(recorder, None)
    document = json.loads(json.dumps(recorder.document()))
    after = readings(RecordedSystem(document), None)
    for first, second in zip(before, after, strict=True):
        for name, fact in facts(first).items():
            again = facts(second)[name]
            if name in ("available_bytes", "current_hz", "limit_used_bytes", "policies"):
                assert again.state == fact.state  # these change between two readings
            else:
                assert again == fact


# --- Nothing ever raises ----------------------------------------------------------------------


class Listening(RecordedFiles):
    """Remembers which paths are asked for."""

    def __init__(self, files: dict[str, Any]) -> None:
        super().__init__(files)
        self.asked: set[str] = set()

    def _resolve(self, path: str) -> str:
        self.asked.add(path)
        return super()._resolve(path)


SMALL = dict(expanded(alder_lake(pairs=1, singles=2)))


def _asked_for() -> list[str]:
    files = Listening(SMALL)
    system = RecordedSystem({"calls": {"affinity": ""}})
    system._files = files
    readings(system)
    return sorted(files.asked)


ASKED = _asked_for()

WORDS = ["0", ":", "/", "-", "..", "\n", "cgroup", "cgroup2", "rw,cpu,memory", "8:1", "/dev/sda"]
GARBAGE = st.one_of(
    st.none(),  # missing
    st.just({"error": "EACCES"}),
    st.just({"folder": True}),
    st.binary(max_size=40).map(lambda content: {"base64": base64.b64encode(content).decode()}),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.sampled_from(["", "-1", "0", "max", "1e9", "nan", "9" * 400, "0-", "3-1", "\0", "½", ":::"]),
    st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join),
)


def test_the_readers_ask_for_the_files_that_are_spoiled_below() -> None:
    assert {"/proc/cpuinfo", "/proc/meminfo", "/proc/self/cgroup", "/etc/os-release"} < set(ASKED)
    assert len(ASKED) > 100


@given(st.dictionaries(st.sampled_from(ASKED), GARBAGE, min_size=1, max_size=12))
@settings(deadline=None, max_examples=2 * settings.default.max_examples)
def test_whatever_the_files_hold_no_reader_raises(changes: dict[str, Any]) -> None:
    whole = {path: content for path, content in SMALL.items() if path not in changes}
    spoiled = {path: content for path, content in changes.items() if content is not None}
    _valid(readings(machine(whole | spoiled)))


def test_of_an_empty_machine_nothing_is_known_but_limits_of_this_process() -> None:
    everything = readings(RecordedSystem({}))
    _valid(everything)
    known = {name for each in everything for name, fact in facts(each).items() if fact.is_known}
    assert known == set()


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=12), max_size=8))
@settings(deadline=None, max_examples=60)
def test_whatever_the_environment_holds_no_reader_raises(environment: dict[str, str]) -> None:
    _valid(readings(machine({}, environment)))


class Broken(System):
    """Every call fails in its own way."""

    def affinity(self) -> Fact[tuple[int, ...]]:
        raise OSError(1, "no")

    def space(self, path: str) -> Any:
        raise ValueError("embedded null byte")

    def limit(self, name: str) -> Any:
        raise ValueError("not allowed to raise maximum limit")

    def file_sizes(self, path: str, most: int) -> Any:
        raise FileNotFoundError(2, "gone")


def test_calls_that_fail_are_facts_that_cannot_be_told() -> None:
    everything = readings(Broken(files=RecordedFiles({})))
    _valid(everything)
    assert everything[0].affinity.state == "cannot_tell"
    assert everything[3].open_files.reason == "it failed (not allowed to raise maximum limit)"


def _valid(everything: list[Any]) -> None:
    """Every fact that is not known has a reason, and all of it survives being written as JSON."""
    for each in everything:
        for name, fact in facts(each).items():
            assert fact.is_known or fact.reason, (name, fact)
            assert fact.source, (name, fact)
        document = json.dumps(dataclasses.asdict(each), allow_nan=False)
        assert decode(type(each), json.loads(document)) == each
