"""The RAM that runs at larger values would take, and a search that it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers_cli import trainfit
from trainfit.plan.sizing import lengths
from trainfit.plan.sizing.lengths import HostRam

MIB, GIB = 1 << 20, 1 << 30

#: Its model is made on the CPU.
WIDE = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch_size", type=int, default=4)
options = parser.parse_args()
model = torch.nn.Linear(options.width, options.width).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(10):
    model(torch.randn(options.batch_size, options.width, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_growth_is_told_from_the_runs_so_far() -> None:
    ram = HostRam(lambda: 10 * GIB)
    assert ram.shortage(1 << 40) is None  # nothing was run yet
    ram.learn(1024, GIB)
    assert ram.shortage(2048) is None and ram.shortage(4096) is not None
    ram.learn(2048, GIB)
    assert ram.shortage(1 << 20) is None, "it has no effect on RAM"
    ram.learn(2048, 2 * GIB)
    short = ram.shortage(8192)
    assert short is not None and short.need_bytes == 22 * GIB
    assert "a run at 8,192 would need about 22.00 GiB of RAM here, 10.00 GiB" in str(short)
    ram.learn(3072, 3 * GIB)
    line = ram.shortage(16384)
    assert line is not None and abs(line.need_bytes - 16 * GIB) < MIB
    assert ram.shortage(ram.most(16384, 64)) is None
    assert abs(ram.most(16384, 64) - 8192) <= 64
    assert HostRam(lambda: None).shortage(8) is None


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_search_ends_before_the_ram_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    monkeypatch.setattr(lengths, "HostRam", lambda: HostRam(lambda: 400 * MIB))
    said = trainfit(
        *("plan", "--gpu", "H100 SXM", "--no-remedies", "--json", "--solve", "width"),
        *("--", "python", "wide.py"),
        cwd=tmp_path,
    )
    assert said.stdout, said.stderr
    sizes = json.loads(said.stdout)["sizes"]
    assert sizes["too_large"] is None and sizes["limit"] == sizes["largest"]
    assert 1024 < sizes["largest"] < 20_000  # the GPU alone has room for more than 90,000
    assert "of RAM here, 400 MiB are free" in sizes["limit_reason"]
