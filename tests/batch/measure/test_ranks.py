"""Two ranks: their own gradients against the reduced one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers_noise import Known, samples
from trainfit.batch import NoiseScale
from trainfit.batch.estimate import Weights
from trainfit.results.batch import NoiseResult

RANKS = 2


def rank(number: int, folder: str, view: bool) -> None:
    """One process: a loop with a pass a step, then with two, of which the first is not reduced."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=number, world_size=RANKS
    )
    generator = torch.Generator().manual_seed(number)
    for accumulation in (1, 2):
        model = DistributedDataParallel(Known(), gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        noise = NoiseScale(model, 4, every=1)
        wanted = []
        for _ in range(30):
            optimizer.zero_grad()
            batches = [samples(4, 32.0, generator) for _ in range(accumulation)]
            for turn, batch in enumerate(batches):
                last = turn == accumulation - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    model(batch).mean().backward()
            reduced = sum(batch.mean(0) for batch in batches)
            dist.all_reduce(reduced)
            own, whole = batches[0].mean(0).square().sum(), (reduced / RANKS).square().sum()
            wanted.append([own.item(), whole.item()])
            optimizer.step()
        # The accumulation is known from the second step on.
        records = noise._records.read()[:29].sum(axis=2)
        numpy.testing.assert_allclose(records, wanted[1:], rtol=1e-5)
        assert noise._log.weights[0] == Weights(
            1.0, 1 / 4, accumulation**2, accumulation / 4 / RANKS
        )
        noise.save(Path(folder) / f"{number}-{accumulation}.json")
        noise.close()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("view", [False, True])
def test_a_rank_compares_its_own_gradient_with_that_of_all(view: bool, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank, (str(tmp_path), view), nprocs=RANKS)
    for number in range(RANKS):
        for accumulation in (1, 2):
            result = NoiseResult.load(tmp_path / f"{number}-{accumulation}.json")
            assert result.method == "ranks" and result.steps_used == 29
            assert result.batch_size == 4 * accumulation * RANKS
