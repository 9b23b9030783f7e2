"""The CPU in the place of a GPU that a script asks for by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainfit.speed.cpu_run import cpu_for_cuda, on_cpu

CPU = torch.device("cpu")


@pytest.fixture
def stand_in() -> Iterator[None]:
    with cpu_for_cuda():
        yield


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0), 0])
def test_what_names_a_gpu_is_the_cpu(device: Any) -> None:
    assert on_cpu(device) == CPU


@pytest.mark.parametrize("other", ["cpu", "meta", torch.device("meta"), torch.float16, None, True])
def test_anything_else_stays(other: Any) -> None:
    assert on_cpu(other) is other


@pytest.mark.usefixtures("stand_in")
def test_every_way_to_ask_for_a_tensor_there() -> None:
    there = torch.device("cuda")
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0, 2.0], device=0),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:0", torch.float64, non_blocking=True),
        torch.ones(2).to(device=there),
        torch.ones(2).new_zeros(2, device=there),
        torch.randn(2, pin_memory=True).pin_memory().cuda(non_blocking=True),
        torch.randn(2, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda"),
        torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2, device="cuda").to("cuda", torch.float64).bias,
    ]
    with there:
        made.append(torch.empty(2))
    assert {each.device for each in made} == {CPU}
    assert made[3].dtype is made[9].dtype is torch.float64


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.usefixtures("stand_in")
def test_a_training_step_with_all_that_scripts_ask_of_a_gpu(tmp_path: Path) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    torch.cuda.set_device(0)
    torch.cuda.manual_seed_all(1)
    torch.cuda.reset_peak_memory_stats()
    model = torch.nn.Linear(4, 1).cuda()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cuda:0"))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    before = model.weight.detach().clone()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for (batch,) in DataLoader(TensorDataset(torch.randn(8, 4)), 4, pin_memory=True):
        begin.record()
        with torch.autocast("cuda"), torch.cuda.stream(torch.cuda.Stream()):
            loss = model(batch.cuda(non_blocking=True)).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 0
    assert not torch.equal(model.weight, before)
    assert torch.cuda.max_memory_allocated() == 0 < torch.cuda.mem_get_info()[0]
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]


def test_everything_is_put_back() -> None:
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    load, generator = torch.load, torch.Generator
    with pytest.raises(ValueError, match="the script's"), cpu_for_cuda():
        assert torch.cuda.is_available()
        raise ValueError("the script's")
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.load is load and torch.Generator is generator
