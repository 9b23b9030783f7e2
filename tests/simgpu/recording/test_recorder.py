"""What a recording says of a run, to the byte, and its file."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainfit
from trainfit.memory.peak import by_kind, by_module
from trainfit.memory.replay import Stream, replay
from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs.recording import KINDS, PHASES, Recording
from trainfit.simgpu.operators import matmul
from trainfit.simgpu.session import Simulation

BATCH = 32
#: Linear(64, 128) and Linear(128, 10), in float32.
WEIGHTS = {"0.weight": 64 * 128 * 4, "0.bias": 128 * 4, "2.weight": 128 * 10 * 4, "2.bias": 40}
PARAMETERS = sum(-(-nbytes // 512) * 512 for nbytes in WEIGHTS.values())


def run_mlp(steps: int = 2, optimizer: str = "Adam", **options: Any) -> Simulation:
    with trainfit.simulate("RTX 4090") as sim:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
        update = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
        for _ in range(steps):
            x = torch.randn(BATCH, 64).cuda()
            update.zero_grad()
            loss = model(x).sum()
            loss.backward()
            update.step()
    return sim


@pytest.fixture(scope="module")
def recording() -> Recording:
    return run_mlp().recording


#: cuBLAS's workspaces on an RTX 4090; cuBLASLt in the script's thread has its own where the two
#: do not share one yet (PyTorch 2.8).
CUBLAS = [8_519_680, *([] if matmul._shares() else [1 << 20]), 8_519_680]


def rounded(recording: Recording, kind: str) -> int:
    """Bytes of all allocations of a kind, rounded as the allocator does."""
    chosen = recording.alloc_bytes[recording.alloc_kind == KINDS.index(kind)]
    return int((-(-chosen // 512) * 512).sum())


# What is what -------------------------------------------------------------------------------------


def test_parameters_gradients_and_states_to_the_byte(recording: Recording) -> None:
    assert rounded(recording, "parameter") == PARAMETERS
    assert rounded(recording, "gradient") == 2 * PARAMETERS, "new ones in each of two steps"
    assert rounded(recording, "optimizer_state") == 2 * PARAMETERS, "two moments; step on the host"
    assert rounded(recording, "buffer") == 0


def test_what_a_parameter_holds_next_to_its_elements_is_of_the_parameter() -> None:
    """bitsandbytes' 4-bit weights: absmax, and with double quantization that of absmax."""
    with trainfit.simulate("RTX 4090") as sim:
        model = nn.Linear(64, 128, bias=False).cuda()
        inner = SimpleNamespace(absmax=torch.zeros(4 * 128).cuda())
        state = SimpleNamespace(absmax=torch.zeros(1024).cuda(), state2=inner)
        model.weight.quant_state = state  # type: ignore[assignment]
        model.weight.main_grad = torch.zeros(256).cuda()  # type: ignore[assignment]
        model(torch.zeros(1, 64, device="cuda"))
    assert rounded(sim.recording, "parameter") == 64 * 128 * 4 + 1024 * 4 + 512 * 4


def test_activations_to_the_byte(recording: Recording) -> None:
    """Of each step remain for the backward pass: ReLU's result and the loss."""
    kind = KINDS.index("activation")
    activations = recording.alloc_bytes[recording.alloc_kind == kind].tolist()
    assert activations == [BATCH * 128 * 4, 4] * 2
    inputs = recording.alloc_bytes[recording.alloc_kind == KINDS.index("input")].tolist()
    assert inputs == [BATCH * 64 * 4] * 2


def test_workspace_of_the_matrix_products(recording: Recording) -> None:
    """cuBLAS's on an RTX 4090, for the script's thread and for autograd's; and copies.

    The gradient of ``sum()`` is one number, expanded: each product with it copies it.
    """
    every = recording.workspace_model.tolist(), recording.workspace_alloc.tolist()
    found = [(recording.strings[model], owner) for model, owner in zip(*every, strict=True)]
    found = [each for each in found if not each[0].startswith("reduction_")]
    models, owners = (list(each) for each in zip(*found, strict=True))
    assert models == ["cublas_workspace"] * len(CUBLAS) + ["contiguous_copy"] * 4
    assert recording.alloc_bytes[owners].tolist() == CUBLAS + [BATCH * 10 * 4] * 4
    assert recording.alloc_kind[owners].tolist() == [KINDS.index("workspace")] * len(models)


def test_everything_at_the_peak_has_a_kind_and_a_module(recording: Recording) -> None:
    stream = Stream.of(recording)
    outcome = replay(stream)
    kinds = by_kind(recording, stream, outcome)
    assert sum(kinds.values()) == outcome.peak_allocated
    assert kinds["parameter"] == kinds["gradient"] == PARAMETERS
    assert kinds["optimizer_state"] == 2 * PARAMETERS
    modules = by_module(recording, stream, outcome)
    assert sum(modules.values()) == outcome.peak_allocated
    first = sum(-(-WEIGHTS[f"0.{name}"] // 512) * 512 for name in ("weight", "bias"))
    assert modules["Sequential.0"] >= 4 * first


@pytest.mark.parametrize(
    ("optimizer", "options", "times"),
    [
        ("SGD", {}, 2),
        ("SGD", {"momentum": 0.9}, 3),
        ("Adam", {}, 4),
        ("AdamW", {"foreach": False}, 4),
        ("Adam", {"amsgrad": True}, 5),
    ],
)
def test_steady_state_is_a_multiple_of_the_parameters(
    optimizer: str, options: dict[str, Any], times: int
) -> None:
    sim = run_mlp(3, optimizer, **options)
    recording = sim.recording
    stream = Stream.of(recording)
    steps = np.flatnonzero(recording.events % 4 == 2)
    held = replay(stream).allocated_after[steps]
    assert held[1] == held[2]
    others = sum(CUBLAS) + BATCH * 64 * 4 + 512  # cuBLAS, the batch, the loss
    assert held[2] - others == times * PARAMETERS


def test_phases(recording: Recording) -> None:
    names = [recording.strings[name] for name in recording.op_name.tolist()]
    phases = [PHASES[phase] for phase in recording.op_phase.tolist()]
    for name, phase, step in zip(names, phases, recording.op_step.tolist(), strict=True):
        if name == "aten.addmm.default":
            assert phase == "forward"
        elif name == "aten.mm.default":
            assert phase == "backward"
        elif "_foreach_" in name:
            assert phase == "optimizer"
        elif name == "aten._to_copy.default" and step == 1:
            assert phase == "input"
    assert set(phases) >= {"input", "forward", "backward", "optimizer"}
    assert recording.steps == 2
    assert set(recording.op_step.tolist()) == {0, 1}


def _trained(train: Callable[[Any, Callable[[], Any]], Any]) -> list[Any]:
    """Operators of each phase, and bytes of activations."""
    with trainfit.simulate("A100 80GB") as simulation:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(512, 64).cuda()

        def computed() -> Any:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            train(optimizer, computed)
    recording = simulation.recording
    phases = recording.op_phase.tolist()
    counts = [(PHASES[phase], phases.count(phase)) for phase in sorted(set(phases))]
    return [*counts, rounded(recording, "activation")]


def test_what_a_closure_computes_is_no_part_of_the_optimizers_step() -> None:
    """Lightning computes model, loss and gradients in the closure of each step."""

    def apart(optimizer: Any, computed: Callable[[], Any]) -> None:
        computed()
        optimizer.step()

    found = _trained(apart)
    assert _trained(lambda optimizer, computed: optimizer.step(closure=computed)) == found
    assert _trained(lambda optimizer, computed: optimizer.step(computed)) == found


def test_operators_know_their_module_in_both_directions(recording: Recording) -> None:
    owners: dict[str, set[str]] = {}
    for name, module in zip(recording.op_name, recording.op_module, strict=True):
        owners.setdefault(recording.strings[name], set()).add(recording.strings[module])
    both = {"Sequential.0", "Sequential.2"}
    assert owners["aten.addmm.default"] == owners["aten.mm.default"] == both
    assert owners["aten.relu.default"] == {"Sequential.1"}
    assert owners["aten.threshold_backward.default"] == {"Sequential.1"}


def test_recomputed_activations_belong_to_their_module() -> None:
    with trainfit.simulate("RTX 4090") as sim:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda()
        x = torch.randn(4, 8, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    recording = sim.recording
    calls = [
        (PHASES[phase], recording.strings[module])
        for name, phase, module in zip(
            recording.op_name, recording.op_phase, recording.op_module, strict=True
        )
        if recording.strings[name] == "aten.addmm.default"
    ]
    assert calls == [("forward", "Sequential.0"), ("backward", "Sequential.0")]


def test_buffers_are_buffers() -> None:
    with trainfit.simulate("RTX 4090") as sim:
        model = nn.Sequential(nn.Conv2d(3, 256, 1), nn.BatchNorm2d(256)).cuda()
        model(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert rounded(sim.recording, "buffer") == 1024 + 1024 + 512


def test_what_is_there_before_the_training_and_all_through_it_is_data() -> None:
    with trainfit.simulate("RTX 4090") as sim:
        images = torch.zeros(100, 256, device="cuda")
        labels = torch.zeros(100, dtype=torch.long).cuda()
        first = torch.zeros(4, 256, device="cuda")  # is dropped
        model = nn.Linear(256, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            batch = images[step : step + 4] if step else first
            nn.functional.cross_entropy(model(batch), labels[:4]).backward()
            optimizer.step()
            optimizer.zero_grad()
            first = batch
    assert rounded(sim.recording, "data") == 100 * 256 * 4 + 1024
    assert rounded(sim.recording, "input") == 0


def test_weights_of_one_allocation_are_all_parameters() -> None:
    """cuDNN's recurrent layers keep all of their weights in one; tied weights are one parameter."""
    with trainfit.simulate("RTX 4090") as sim:
        embedding, lstm = nn.Embedding(50, 16).cuda(), nn.LSTM(16, 16, 2).cuda()
        out = nn.Linear(16, 50, bias=False).cuda()
        out.weight = embedding.weight
        model = nn.ModuleList([embedding, lstm, out])
        hidden, _ = lstm(embedding(torch.zeros(5, 3, dtype=torch.long, device="cuda")))
        out(hidden).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    found = sim.recording.parameters() or ()
    assert sum(prod(each.shape) for each in found) == 50 * 16 + 2 * 4 * 16 * (16 + 16 + 2)
    assert all(each.trained for each in found)


def test_the_replay_agrees_with_the_run() -> None:
    with trainfit.simulate("RTX 4090") as sim:
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.SiLU()).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(torch.randn(16, 3, 64, 64).cuda()).float().mean()
            loss.backward()
            optimizer.step()
        torch.cuda.empty_cache()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    outcome = replay(Stream.of(sim.recording))
    assert (outcome.peak_allocated, outcome.peak_reserved) == peaks


def test_the_header_describes_the_run(recording: Recording) -> None:
    header = recording.header
    assert header["torch"] == torch.__version__
    assert header["gpu_memory_bytes"] > 20 << 30
    assert header["limited"] is True
    assert header["assumptions"] == {}


# The file -----------------------------------------------------------------------------------------


def columns(recording: Recording) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(recording).items() if isinstance(value, np.ndarray)}


def test_saving_loses_nothing(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.trainfit"
    recording.save(path)
    loaded = Recording.load(path)
    assert loaded.strings == recording.strings
    assert dict(loaded.header) == dict(recording.header)
    for name, column in columns(recording).items():
        assert np.array_equal(getattr(loaded, name), column), name
        assert getattr(loaded, name).dtype == np.int64
    assert os.listdir(path.parent) == [path.name], "nothing half-written remains"


def test_a_recording_has_the_same_bytes_whenever_it_is_written(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = recording.to_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert recording.to_bytes() == now


def test_a_failed_save_leaves_the_old_file(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.trainfit"
    recording.save(path)
    before = path.read_bytes()
    broken = dataclasses.replace(recording, header={"unserializable": object()})
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def assert_one_clear_line(path: Path) -> None:
    with pytest.raises(ResultFileError) as caught:
        Recording.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert repr(str(path)) in message
    assert caught.value.exit_code == 2


def test_a_missing_file(tmp_path: Path) -> None:
    assert_one_clear_line(tmp_path / "none.trainfit")
    assert_one_clear_line(tmp_path)


@pytest.mark.parametrize("part", [0, 1, 100, 0.5, 0.9, -1])
def test_a_truncated_file(recording: Recording, tmp_path: Path, part: float) -> None:
    path = tmp_path / "run.trainfit"
    recording.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: part if isinstance(part, int) else int(len(data) * part)])
    assert_one_clear_line(path)


def test_flipped_bytes_never_load_as_something_else(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.trainfit"
    recording.save(path)
    data = path.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            loaded = Recording.load(path)
        except ResultFileError as error:
            assert "\n" not in str(error)
        else:  # a byte that means nothing, such as a date in the archive
            assert loaded.strings == recording.strings
            assert all(np.array_equal(getattr(loaded, n), c) for n, c in columns(recording).items())


def rewritten(path: Path, change: Callable[[dict[str, bytes]], Any]) -> None:
    """Change the archive's members by name."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def with_header(**values: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        header = json.loads(members["header.json"]) | values
        members["header.json"] = json.dumps(header).encode()

    return change


def as_npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


FOREIGN: dict[str, Callable[[dict[str, bytes]], Any]] = {
    "another format": with_header(format="another"),
    "no version": with_header(version=None),
    "version 0": with_header(version=0),
    "no header": lambda members: members.pop("header.json"),
    "a list for a header": lambda members: members.update({"header.json": b"[]"}),
    "not valid JSON": lambda members: members.update({"header.json": b"{"}),
    "a missing column": lambda members: members.pop("events.npy"),
    "a short column": lambda members: members.update({"op_phase.npy": as_npy(np.arange(3))}),
    "floats": lambda members: members.update({"events.npy": as_npy(np.zeros(3))}),
    "two dimensions": lambda members: members.update({"events.npy": as_npy(np.zeros((2, 2), int))}),
    "strings cut": with_header(strings=["one"]),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_or_damaged_file(
    recording: Recording, tmp_path: Path, change: Callable[[dict[str, bytes]], Any]
) -> None:
    path = tmp_path / "run.trainfit"
    recording.save(path)
    rewritten(path, change)
    assert_one_clear_line(path)


def test_a_file_of_a_newer_version_says_what_to_do(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.trainfit"
    recording.save(path)
    rewritten(path, with_header(version=99))
    with pytest.raises(ResultFileError, match=r"version 99 is newer.*upgrade trainfit"):
        Recording.load(path)


class Bomb:
    """Pickled data that would leave a mark if anything loaded it."""

    exploded = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "exploded", True)


def test_nothing_in_a_file_is_executed(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "run.trainfit"
    recording.save(path)
    bomb = as_npy(np.array([Bomb()], dtype=object))
    pickle.loads(bomb[bomb.index(b"\n") + 1 :])  # it works
    assert Bomb.exploded
    Bomb.exploded = False
    rewritten(path, lambda members: members.update({"events.npy": bomb}))
    assert_one_clear_line(path)
    path.write_bytes(pickle.dumps(Bomb()))
    assert_one_clear_line(path)
    assert not Bomb.exploded


def test_a_recording_can_be_taken_while_the_run_goes_on(tmp_path: Path) -> None:
    with trainfit.simulate("RTX 4090") as sim:
        kept = [torch.zeros(8, device="cuda")]
        early = sim.recording
        kept.append(torch.zeros(16, device="cuda"))
        late = sim.recording
    assert early.alloc_bytes.tolist() == [32]
    assert late.alloc_bytes.tolist() == [32, 64]


def test_a_step_that_ran_out_of_memory_is_over() -> None:
    """As finders of a batch size do it: they catch the error and go on with less."""
    with trainfit.simulate("custom:2GiB") as simulation, torch.device("cuda"):
        large = torch.nn.Linear(12_000, 12_000, bias=False)
        optimizer = torch.optim.AdamW(large.parameters())
        large(torch.randn(1, 12_000)).sum().backward()
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        before = simulation.recording.op_phase.size
        del large, optimizer
        small = torch.nn.Linear(100, 100)
        optimizer = torch.optim.AdamW(small.parameters())
        small(torch.randn(1, 100)).sum().backward()
        optimizer.step()
    phases = [PHASES[code] for code in simulation.recording.op_phase[before:].tolist()]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer"]
