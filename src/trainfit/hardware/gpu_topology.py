"""Several GPUs by name ("8x H100 SXM"), of several machines, too, and the links between them."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Literal

from trainfit.hardware.gpu_figures import GpuNameError
from trainfit.hardware.gpu_lookup import find_gpu, find_rented
from trainfit.results.gpus import GpuSpec
from trainfit.results.text import byte_rate

_ASSUMED: Final = "assumed: "
#: GPUs that one machine has at most: HGX boards have 8, NVIDIA's DGX-2 16.
MOST_GPUS: Final = 16

#: Machines that a job has at most.
MOST_MACHINES: Final = 1024
#: "2x(8x H100 SXM), 400Gb/s", "4x(2x RTX 4090), 1x 10Gb/s": machines, what is in each, the network.
_MACHINES: Final = re.compile(
    r"\s*(\d+)\s*[x\u00d7]\s*\(([^()]+)\)\s*(?:,\s*(.*?)\s*)?", re.IGNORECASE | re.DOTALL
)
_NETWORK: Final = re.compile(
    r"(?:(\d+)\s*[x\u00d7]\s*)?(\d+(?:\.\d+)?)\s*(G|T)(bit/s|bps|b/s|B/s)", re.IGNORECASE
)
_EXAMPLE: Final = "2x(8x H100 SXM), 400Gb/s"

_COUNT: Final = re.compile(r"\s*(\d+)\s*[x\u00d7]\s*(.+)", re.IGNORECASE | re.DOTALL)
#: "2*T4", "2 T4", "T4 x2", "T4*2".
_OTHER_COUNT: Final = re.compile(
    r"\s*(?:(\d+)(?:\s*\*\s*|\s+)(\S.*?)|(\S.*?)(?<![a-z])\s*[x\u00d7*]\s*(\d+))\s*", re.IGNORECASE
)
_BETWEEN: Final = re.compile(r"[,;+&/]|\s+and\s+", re.IGNORECASE)


def named_count(name: str) -> int | None:
    """The number of GPUs that ``name`` says ("8x H100 SXM"); ``None``: it says none.

    A rented machine says how many it has.
    """
    if rented := find_rented(name):
        return rented.gpus if rented.gpus > 1 else None
    if _MACHINES.fullmatch(name):
        gpu = find_gpus(name)
        return gpu.count * gpu.machines
    match = _COUNT.match(name)
    return int(match[1]) if match else None


def find_gpus(name: str) -> GpuSpec:
    """The GPU that ``name`` means, with the ``count`` of them in each of the ``machines``.

    Raises:
        GpuNameError: as :func:`find_gpu` does, and for a number that no machine has, and for
            machines without the network between them.
    """
    if machines := _MACHINES.fullmatch(name):
        return _of_machines(name, int(machines[1]), find_gpus(machines[2]), machines[3])
    machine, _, network = (part.strip() for part in name.rpartition(","))
    if machine and _NETWORK.fullmatch(network):
        why = "a network is between machines: say how many there are, or leave it out"
        raise GpuNameError(name, why, (f"2x({machine}), {network}", machine))
    match = None if find_rented(name) else _COUNT.match(name)
    if match is None:
        _require_one(name)
        return find_gpu(name)
    count, each = int(match[1]), match[2]
    if "(" in each or _COUNT.match(each):
        raise GpuNameError(name, f"name machines and their network as in {_EXAMPLE}")
    if not 1 <= count <= MOST_GPUS:
        why = f"expected 1 to {MOST_GPUS} GPUs in a machine, not {count}"
        raise GpuNameError(name, why, (f"{MOST_GPUS // 2}x {each}",))
    return dataclasses.replace(find_gpu(each), count=count)


def _require_one(name: str) -> None:
    """Raise GpuNameError for several GPUs in another spelling than :func:`find_gpus` reads, some of
    which the look-up takes for one: "T4,T4", "T4 T4", "T4 x2", "2*T4"."""
    words = name.split()
    half = len(words) // 2
    named = [part.strip() for part in _BETWEEN.split(name) if part.strip()]
    if half and words[:half] == words[half:]:
        named = [" ".join(words[:half])] * 2
    if other := _OTHER_COUNT.fullmatch(name):
        named = [other[2] or other[3]] * int(other[1] or other[4])
    kinds = tuple(dict.fromkeys(named))
    if len(named) < 2 or not all(map(_is_gpu, kinds)):
        return
    if len({kind.lower() for kind in kinds}) > 1:
        why = "a machine with GPUs of different kinds is not simulated"
        raise GpuNameError(name, why, kinds)
    why = "several GPUs of a machine are written as their number and the name"
    raise GpuNameError(name, why, (f"{len(named)}x {kinds[0]}",))


def _is_gpu(name: str) -> bool:
    try:
        find_gpu(name)
    except GpuNameError as error:
        return error.is_ambiguous
    return True


def _of_machines(name: str, machines: int, gpu: GpuSpec, network: str | None) -> GpuSpec:
    if not 1 <= machines <= MOST_MACHINES:
        raise GpuNameError(name, f"expected 1 to {MOST_MACHINES} machines, not {machines}")
    if machines == 1:
        return gpu
    if not network:
        why = "say how fast the network between them is"
        raise GpuNameError(name, why, (f"{name.rstrip(', ')}, 400Gb/s",))
    match = _NETWORK.fullmatch(network)
    if match is None or not float(match[2]) or match[1] == "0":
        raise GpuNameError(
            name,
            f"{network!r} is no network: give the rate of each GPU's network card, or the cards of "
            "a machine and theirs",
            [f"{name[: name.rindex(')') + 1]}, {each}" for each in ("400Gb/s", "1x 100Gb/s")],
        )
    cards, number, prefix, unit = match.groups()
    each = float(number) * (1e9 if prefix.upper() == "G" else 1e12)
    rate = each if unit == "B/s" else each / 8
    return dataclasses.replace(
        gpu,
        machines=machines,
        network_bytes_per_s=rate,
        network_cards=int(cards) if cards else gpu.count,
    )


def network_words(gpu: GpuSpec) -> str:
    """The network between the machines, in words; empty for one machine."""
    if gpu.network_bytes_per_s is None:
        return ""
    cards = "for each GPU" if gpu.network_cards == gpu.count else f"x {gpu.network_cards}"
    rate = byte_rate(gpu.network_bytes_per_s)
    return f"between {gpu.machines} machines a network card of {rate} each way {cards}"


def with_ranks(gpu: GpuSpec, processes: int) -> GpuSpec:
    """``gpu`` in a machine that has one for each process; what is assumed is among its sources."""
    if gpu.count * gpu.machines >= processes:
        return gpu
    note = (
        f"{_ASSUMED}{processes} GPUs in one machine, one for each process ({processes}x {gpu.key})"
    )
    return dataclasses.replace(gpu, count=processes, sources={**gpu.sources, "count": note})


def assumed_count(gpu: GpuSpec) -> str:
    """What is assumed of the number of GPUs, in words; empty where it was named."""
    return gpu.sources.get("count", "").removeprefix(_ASSUMED)


# ---
# What connects the GPUs of a machine, by the card: where nothing else is said, as it is sold.


@dataclasses.dataclass(frozen=True)
class Link:
    """What the GPUs of a machine exchange data over.

    ``bytes_per_s`` is what one GPU sends at most while it receives as much. ``kind``: "nvlink",
    "pcie" from one GPU's memory to another's, or through the memory of a "host" of one or more
    sockets, or of a "desktop".
    ``reduces``: the switch adds up what passes (NVLink SHARP).
    """

    name: str
    kind: Literal["nvlink", "pcie", "host", "desktop"]
    bytes_per_s: float
    reduces: bool = False

    @property
    def words(self) -> str:
        """Its name and its rate."""
        return f"{self.name}, {byte_rate(self.bytes_per_s)} each way"


#: By the first figures of the compute capability: NVLink of cards on SXM boards, bytes a second in
#: one direction (NVIDIA's datasheets of P100, V100, A100, H100 and HGX B200, half of the sum).
_NVLINK: Final = {
    (6, 0): Link("NVLink 1", "nvlink", 80e9),
    (7, 0): Link("NVLink 2", "nvlink", 150e9),
    (8, 0): Link("NVLink 3", "nvlink", 300e9),
    (9, 0): Link("NVLink 4", "nvlink", 450e9, reduces=True),
    (10, 0): Link("NVLink 5", "nvlink", 900e9, reduces=True),
}
#: Those on SXM boards whose name does not say so.
_ON_BOARDS: Final = ("H200", "B200")
#: PCIe x16 by compute capability: GB/s of its generation 3, 4 and 5 in one direction.
_PCIE: Final = ((9, 0), 5, 63e9), ((8, 0), 4, 31.5e9), ((0, 0), 3, 15.75e9)


def link_of(gpu: GpuSpec) -> Link:
    """What connects the GPUs of the machine.

    GeForce cards reach each other through the host's memory (their driver offers no peer-to-peer
    over PCIe), as all do where the job sets ``NCCL_P2P_DISABLE=1``. Bridges between two cards are
    not assumed.
    """
    board = "SXM" in gpu.key or gpu.key.startswith(_ON_BOARDS)
    if board and gpu.peer_to_peer and (link := _NVLINK.get(gpu.capability)) is not None:
        return link
    number, rate = next((number, rate) for least, number, rate in _PCIE if gpu.capability >= least)
    if "GeForce" in gpu.name or not gpu.peer_to_peer:
        desktop = any(name in gpu.name for name in ("GeForce", "TITAN"))
        kind: Literal["host", "desktop"] = "desktop" if desktop else "host"
        return Link(f"PCIe {number} through the host's memory", kind, rate)
    return Link(f"PCIe {number} peer-to-peer", "pcie", rate)
