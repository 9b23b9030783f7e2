"""Times of NCCL's collectives by bytes, ranks and the link between the GPUs.

A collective of S bytes passes w = S·2(n−1)/n bytes (all-reduce) or S·(n−1)/n (all-gather,
reduce-scatter, all-to-all) over each GPU's link. It takes

    latency + w/rate + fill · sqrt(w/rate)

The last term is what a pipeline of chunks needs to fill: with chunks of the best size it grows with
the square root of the time. Through the host's memory it takes instead

    latency + 2 w/rate            up to some bytes, by NCCL's protocol LL
    latency + start + w/rate      by its protocol Simple

LL sends a flag with each four bytes, which saves the waits for buffers, and is half as fast. The
rate is a share of what the link has. The shares, latencies and
fill are those of NCCL 2.27 on A100, H100, B200 and L40S, 2 and 8 GPUs, 512 B to 512 MiB
(ai-dynamo/aiconfigurator, Apache-2.0; ``bench/distributed_speed.py`` compares with its rows).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np

from trainfit.hardware.gpu_topology import Link, link_of
from trainfit.results.gpus import GpuSpec
from trainfit.results.runs.steps import COLLECTIVES, PEER_COPY, TRANSFERS
from trainfit.speed.work import CODES, Floats, Work

#: How much longer kernels take while a collective runs, for the multiprocessors and the bandwidth
#: that it has (2 to 10%: Echo, arXiv 2412.12487).
SLOWED_BY: Final = 0.05

#: By how much the same step differs between ranks (standard deviation, as a share), whom a
#: collective makes wait for the slowest: NVIDIA's float32 ResNet-50 on 8 GPUs, whose communication
#: is hidden, has 96.6% (DGX A100) and 97.2% (DGX-1) of 8 times one GPU's throughput.
_BETWEEN_RANKS: Final = 0.022

#: Bytes over a GPU's link for each of the collective's bytes, of n ranks.
_TWICE: Final = ("all_reduce",)
_WHOLE: Final = ("broadcast", "reduce", "send_receive")

#: Shares of an NVLink that collectives reach on large messages, with 2 GPUs and with 8.
_NVLINK_SHARES: Final = {
    "all_reduce": (0.73, 0.77),
    "all_gather": (0.61, 0.79),
    "reduce_scatter": (0.58, 0.78),
    "all_to_all": (0.63, 0.76),
}
#: Likewise of all-reduces that the switch adds up (NVLink SHARP), which send each byte once: of
#: what a ring would send, with 8 GPUs.
_SWITCH_SHARES: Final = {"NVLink 4": 1.10, "NVLink 5": 0.89}
#: Of PCIe from GPU to GPU, whatever their number.
_PCIE_SHARE: Final = 0.68
#: Through the host's memory, with 2 GPUs and with 8, which share that memory's bandwidth and the
#: link between its sockets; and of desktops (8 to 13 GB/s are reported over PCIe 4), whose boards
#: have one socket with 16 lanes, which two cards share.
_HOST_SHARES: Final = {"host": (0.66, 0.045), "desktop": (0.33, 0.25)}
#: Through the host's memory: the most bytes over a GPU's link that go by LL, and the seconds that
#: Simple takes to start.
_LL_BYTES, _SIMPLE_S = 440_000, 17e-6
#: Seconds of a small message between 2 GPUs, and what each doubling of their number adds.
#: (the processors next to H100 and L40S were the faster ones).
_BASE_S: Final = {"NVLink 4": 5.4e-6, "nvlink": 9.2e-6, "pcie": 5.5e-6}
_BASE_OF_OTHERS_S: Final = 5.5e-6
_DOUBLED_S: Final = {"all_reduce": 6e-6, "all_to_all": 1e-6}
_DOUBLED_OTHERS_S: Final = 3e-6
#: Of a network card, what large messages reach (45 GB/s a GPU over 400 Gb/s).
_NETWORK_SHARE: Final = 0.9
#: Seconds that each doubling of the machines adds to a small message, in one direction (assumed).
_NETWORK_S: Final = 10e-6
#: Square root of seconds.
_FILL: Final = {"NVLink 3": 0.0050, "NVLink 4": 0.0033, "nvlink": 0.0042, "pcie": 0.0026}


def collective_seconds(work: Work, gpu: GpuSpec) -> Floats:
    """Seconds of each kernel on the links between GPUs; 0 for those that do not use them."""
    seconds = np.zeros(len(work.table))
    chosen = np.flatnonzero(work.is_kind(*TRANSFERS))
    if not len(chosen):
        return seconds
    link = link_of(gpu)
    # A copy takes what NCCL's send and receive of as much take.
    names = {CODES[name]: name for name in COLLECTIVES} | {CODES[PEER_COPY]: "send_receive"}
    kinds, sizes, ranks, machines = (
        work.column(name)[chosen] for name in ("kind", "read", "rows", "columns")
    )
    ranks = np.where(kinds == CODES[PEER_COPY], 2, ranks)
    columns = (each.tolist() for each in (kinds, sizes, ranks, machines))
    seconds[chosen] = [
        one_collective(names[kind], size, count, link)
        if among < 2
        else among_machines(names[kind], size, count, among, gpu)
        for kind, size, count, among in zip(*columns, strict=True)
    ]
    return seconds


def slowest_of(work: Work) -> float:
    """What the slowest rank takes longer than the average one, as a share of the step: where ranks
    meet in collectives (else 0)."""
    meets = work.is_kind(*COLLECTIVES)
    ranks = int(work.column("rows")[meets].max()) if meets.any() else 1
    if ranks < 2:
        return 0.0
    # Blom's approximation of the largest of so many normal values.
    return _BETWEEN_RANKS * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def one_collective(kind: str, nbytes: int, ranks: int, link: Link) -> float:
    """Seconds of a collective of so many bytes, counted as nccl-tests do."""
    if ranks < 2:
        return 0.0
    doublings = math.log2(ranks / 2)
    wire = nbytes * (1 if kind in _WHOLE else (ranks - 1) / ranks) * (2 if kind in _TWICE else 1)
    passing = wire / (link.bytes_per_s * _share(kind, ranks, link))
    base = _BASE_S.get(link.name, _BASE_S.get(link.kind, _BASE_OF_OTHERS_S))
    latency = base + doublings * _DOUBLED_S.get(kind, _DOUBLED_OTHERS_S)
    if link.kind in _HOST_SHARES:
        return latency + (2 * passing if wire <= _LL_BYTES else _SIMPLE_S + passing)
    fill = _FILL.get(link.name) or _FILL[link.kind]
    return latency + passing + fill * math.sqrt(passing)


def among_machines(kind: str, nbytes: int, ranks: int, machines: int, gpu: GpuSpec) -> float:
    """Seconds of a collective of ranks on several machines.

    NCCL's rings go through all network cards of a machine that its ranks have: what passes over
    a GPU's link passes over the cards together as well. The slower of both decides; an all-to-all
    sends most of it to other machines. The latency is that of the machines' GPUs among each other
    and of the network, which comes in addition.
    """
    link, network = link_of(gpu), gpu.network_bytes_per_s
    assert network is not None
    of_each = max(1, ranks // machines)
    cards = 1 if kind == "send_receive" else max(1, min(gpu.network_cards, of_each))
    rate = network * _NETWORK_SHARE * cards
    if kind == "all_to_all":
        wire = nbytes * (ranks - of_each) / ranks * of_each
    else:
        whole = 1 if kind in _WHOLE else (ranks - 1) / ranks
        wire = nbytes * whole * (2 if kind in _TWICE else 1)
    waits = _NETWORK_S * math.log2(machines) * (2 if kind in _TWICE else 1)
    inside = one_collective(kind, nbytes, of_each, link)
    return max(inside, wire / rate) + waits


def _share(kind: str, ranks: int, link: Link) -> float:
    """The share of the link's rate that a large message reaches."""
    along = min(1.0, math.log2(ranks / 2) / 2)  # from 2 GPUs to 8
    if link.kind == "pcie":
        return _PCIE_SHARE
    if (shares := _HOST_SHARES.get(link.kind)) is not None:
        few, many = shares
        return few * math.pow(many / few, along)
    if kind == "all_reduce" and link.reduces and ranks > 2:
        few, many = _NVLINK_SHARES[kind][0], _SWITCH_SHARES[link.name]
    else:
        few, many = _NVLINK_SHARES.get(kind, _NVLINK_SHARES["all_gather"])
    return few + (many - few) * along
