"""Stages of a pipeline that are simulated side by side, against real ranks by gloo on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import nn

import trainfit
from helpers_ranks import as_rank_0
from tests.simgpu.operators.gloo import real_ranks, recorded_ranks
from trainfit.hardware.gpu_topology import find_gpus
from trainfit.memory.replay import Stream, replay
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.side_by_side import pipeline_of
from trainfit.plan.runs.tracing import Tracer
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.stages import pipeline_step
from trainfit.speed.work import Work
from trainfit.torch_private import distributed as private

RANKS: Final = 2
#: One training, of no parameter.
JOBS: Final = (None,)
#: What stages tell each other of their shapes is smaller: it names the device.
_LEAST: Final = 1024

#: A schedule that needs what comes from the other rank before it begins: each has two stages.
TRAIN: Final = """
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

def train(device, job):
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    numbers = range(rank, 2 * ranks, ranks)
    parts = [nn.Linear(256, 256 if n < 2 * ranks - 1 else 10).to(device) for n in numbers]
    device = next(parts[0].parameters()).device
    stages = [PipelineStage(m, n, 2 * ranks, device) for m, n in zip(parts, numbers)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.Adam([each for part in parts for each in part.parameters()])
    for _ in range(3):
        given = (torch.randn(16, 256, device=device),) if rank == 0 else ()
        labels = torch.zeros(16, dtype=torch.long, device=device)
        schedule.step(*given, **({"target": labels} if rank == ranks - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
"""
SIMULATED: Final = """
import os
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
distributed.init_process_group("nccl")
train(f"cuda:{os.environ['LOCAL_RANK']}", None)
"""


@pytest.mark.slow
def test_real_ranks_send_what_is_recorded(tmp_path: Path) -> None:
    assert real_ranks(tmp_path, TRAIN, JOBS, RANKS) == recorded_ranks(TRAIN, JOBS, RANKS)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_stages_send_what_real_ranks_send(tmp_path: Path) -> None:
    real = recorded_ranks(TRAIN, JOBS, RANKS)
    script, gpu = tmp_path / "train.py", find_gpus(f"{RANKS}x RTX 4090")
    script.write_text(TRAIN + SIMULATED)
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}"]
    command = parse_command([*words, str(script)], several=True)
    with Tracer(command, gpu, steps=3) as tracer:
        tracer.company = tuple(range(RANKS))
        found = tracer.trace().ranks
    for rank, each in found.items():
        outcome, recording = each.outcome, each.recording
        assert outcome.status == "finished", f"{outcome.message}\n{each.output}"
        assert pipeline_of(outcome) == (0, 1)
        sent = [(met.kind, met.nbytes) for met in outcome.meetings if met.nbytes >= _LEAST]
        assert sent == [met for met in real[rank][0] if met[1] >= _LEAST]
        assert recording is not None and Stream.of(recording).gpus == (0,)
    peaks = [replay(Stream.of(each.recording)).peak_allocated for each in found.values()
             if each.recording is not None]  # fmt: skip
    assert len(peaks) == RANKS and all(peaks)
    works = {
        rank: Work.of_steady_step(each.recording) for rank, each in found.items() if each.recording
    }
    step = pipeline_step(works, machine_of(gpu))
    assert step is not None and step.seconds > max(step.computing_s.values())


def test_a_stage_lets_go_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since PyTorch 2.15, where its output is a plain tensor; others keep it until the backward."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.pipelining import stage as stages

    as_rank_0(monkeypatch, 4)
    kinds = private.releases_of_outputs(stages)
    assert bool(kinds) == (torch.torch_version.TorchVersion(torch.__version__) >= "2.15")
    with trainfit.simulate("4x H100 SXM"):
        torch.distributed.init_process_group("nccl")
        given = torch.zeros(1 << 10, 1 << 10, device="cuda")
        layer = nn.Linear(1 << 10, 1 << 10, bias=False).cuda()
        stage = PipelineStage(
            layer, 0, 4, torch.device("cuda", 0), input_args=(given,),
            output_args=(given.clone().requires_grad_(),),
        )  # fmt: skip
        for _, name in kinds:
            assert getattr(stage, name)(layer(given)) == (True, "")
            assert not getattr(stage, name)(3)[0]
        schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: output.mean())
        schedule.step(torch.zeros(4 << 10, 1 << 10, device="cuda"))
