"""The reference example: its data, its model, and that it trains on a machine without a GPU."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from helpers_cli import trainfit

torch = pytest.importorskip("torch")
pytest.importorskip("av")

EXAMPLE = Path(__file__).parents[1] / "examples" / "act"
MODULES = ("dataset", "model", "make_dataset", "train")
FRAMES = 32

# About 0.3 s a step on two slow cores; the backbone keeps its full width.
SMALL = "--image_scale=0.1 --dim=64 --heads=4 --ffn=128 --layers=2 --vae_layers=1 --chunk_size=8"


@pytest.fixture(scope="module")
def act() -> Iterator[dict[str, ModuleType]]:
    """The example's modules by name, kept out of sys.modules: their names are common ones."""
    saved = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(saved)


def run_script(name: str, options: str) -> subprocess.CompletedProcess[str]:
    """Run one of the example's scripts the way a user does."""
    return subprocess.run(
        [sys.executable, str(EXAMPLE / name), *options.split()],
        capture_output=True,
        text=True,
        timeout=400,
        # Two OpenMP threads that wait for each other crawl where other jobs hold the cores.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of one episode."""
    root = tmp_path_factory.mktemp("act") / "data"
    done = run_script("make_dataset.py", f"--out {root} --episodes 1 --frames {FRAMES}")
    assert done.returncode == 0, done.stderr
    return root


def test_the_example_does_not_know_trainfit() -> None:
    for path in EXAMPLE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert not any(name.split(".")[0] == "trainfit" for name in names), path


# The model ---------------------------------------------------------------------------------------


def test_size_is_that_of_lerobot(act: dict[str, ModuleType]) -> None:
    with torch.device("meta"):
        policy = act["model"].ACTPolicy()
    assert sum(p.numel() for p in policy.parameters()) == 51_602_330
    # Frozen batch norm holds buffers only.
    assert not any("bn" in name for name, _ in policy.named_parameters())


def test_full_size_shapes(act: dict[str, ModuleType]) -> None:
    with torch.device("meta"):
        policy = act["model"].ACTPolicy()
        batch = {
            name: torch.empty(8, 3, height, width)
            for name, (width, height) in act["dataset"].CAMERAS.items()
        }
        batch["state"] = torch.empty(8, 26)
        latent = torch.empty(8, 32)
    tokens, positions = policy.encoder_tokens(batch, latent)
    assert tokens.shape == (842, 8, 512)
    assert positions.shape == (842, 1, 512)
    assert policy.predict(batch, latent).shape == (8, 30, 26)


def test_padding_does_not_count(act: dict[str, ModuleType]) -> None:
    model = act["model"]
    torch.manual_seed(0)
    config = model.ACTConfig(
        cameras=("head",), chunk_size=4, dim=16, heads=2, ffn=16, layers=1, vae_layers=1, dropout=0
    )
    policy = model.ACTPolicy(config)
    batch = {
        "head": torch.rand(2, 3, 40, 64),
        "state": torch.randn(2, 26),
        "action": torch.randn(2, 4, 26),
        "is_pad": torch.tensor([[False, False, True, True]] * 2),
    }

    def loss() -> float:
        torch.manual_seed(1)
        return policy(batch)[0].item()

    before = loss()
    batch["action"][:, 2:] += 5
    assert loss() == pytest.approx(before, rel=1e-5)
    batch["action"][:, :2] += 5
    assert loss() != pytest.approx(before, rel=1e-2)


# The data ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples(act: dict[str, ModuleType], data: Path) -> None:
    dataset = act["dataset"].EpisodeDataset(data, chunk_size=30)
    assert len(dataset) == FRAMES
    sample = dataset[0]
    for name, (width, height) in act["dataset"].CAMERAS.items():
        assert sample[name].shape == (3, height, width)
        assert sample[name].dtype == torch.float32
        assert 0 <= sample[name].min() < sample[name].max() <= 1
    assert sample["state"].shape == (26,)
    assert sample["action"].shape == (30, 26)
    assert not sample["is_pad"].any()

    late = dataset[FRAMES - 3]
    assert late["is_pad"].tolist() == [False] * 3 + [True] * 27
    assert torch.equal(late["action"][:3], dataset.actions[0][-3:])
    assert torch.equal(late["action"][3], late["action"][29])
    with pytest.raises(IndexError):
        dataset[FRAMES]


def red_center(image: torch.Tensor) -> tuple[float, float]:
    """Pixel (x, y) of the middle of what is red in a (3, H, W) image."""
    red, green, blue = image
    ys, xs = torch.nonzero((red > 0.6) & (green < 0.4) & (blue < 0.4), as_tuple=True)
    return xs.float().mean().item(), ys.float().mean().item()


def test_each_frame_is_the_right_one(act: dict[str, ModuleType], data: Path) -> None:
    """In any order, each decoded image shows the blob where that frame's state puts it."""
    dataset = act["dataset"].EpisodeDataset(data, chunk_size=1)
    for camera in act["dataset"].CAMERAS:
        places = np.array(
            [act["make_dataset"].blob_center(camera, s.numpy()) for s in dataset.states[0]]
        )
        for index in np.random.default_rng(0).permutation(FRAMES):
            seen = red_center(dataset._image(0, camera, int(index)))
            distances = np.hypot(*(places - seen).T)
            assert distances.argmin() == index
            assert distances[index] < 1.5, "pixels"


def test_workers_open_their_own_videos(act: dict[str, ModuleType], data: Path) -> None:
    """Images are the same from forked workers, even if the parent had the videos open."""
    dataset = act["dataset"].EpisodeDataset(data, chunk_size=2, image_scale=0.2)
    direct = [dataset[index] for index in range(FRAMES)]
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)
    batches = list(loader)
    for name in direct[0]:
        expected = torch.stack([sample[name] for sample in direct])
        assert torch.equal(torch.cat([batch[name] for batch in batches]), expected), name


def test_open_videos_are_limited(
    act: dict[str, ModuleType], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act["dataset"], "MAX_OPEN_VIDEOS", 2)
    dataset = act["dataset"].EpisodeDataset(data, chunk_size=1, image_scale=0.2)
    first = dataset[3]["head"]
    assert len(dataset._readers) == 2
    assert torch.equal(dataset[3]["head"], first)


def test_the_same_options_make_the_same_data(
    act: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = act["make_dataset"].main
    options = ["--episodes=1", "--frames=6", "--seed=3"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["--out", str(one), *options]) == 0
    assert main(["--out", str(two), *options]) == 0
    files = [path.relative_to(one) for path in sorted(one.rglob("*")) if path.is_file()]
    assert len(files) == 5
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name

    video = one / "episode_000" / "head.mp4"
    written = video.stat().st_mtime_ns
    capsys.readouterr()
    assert main(["--out", str(one), *options]) == 0
    assert "already there" in capsys.readouterr().out
    assert video.stat().st_mtime_ns == written

    assert main(["--out", str(one), "--episodes=1", "--frames=7", "--seed=3"]) == 2
    assert "holds another data set (different: frames)" in capsys.readouterr().err

    video.unlink()
    assert main(["--out", str(one), *options]) == 0
    assert video.exists()


# Training ----------------------------------------------------------------------------------------


def logged(stdout: str) -> dict[str, list[float]]:
    """Figures of the log lines by name."""
    lines = [line for line in stdout.splitlines() if line.startswith("step ")]
    pairs = [pair for line in lines for pair in re.findall(r"([a-z_0-9]+) (\S+)", line)]
    figures: dict[str, list[float]] = {}
    for name, value in pairs:
        figures.setdefault(name, []).append(float(value))
    return figures


@pytest.mark.slow
def test_the_loss_falls(act: dict[str, ModuleType], data: Path, tmp_path: Path) -> None:
    options = f"--dataset={data} {SMALL} --steps=24 --batch_size=8 --log_every=1 --device=cpu"
    loader = "--num_workers=1 --prefetch_factor=3 --persistent_workers=true"
    rates = "--lr=1e-3 --lr_backbone=1e-4 --kl_weight=1 --dropout=0"
    done = run_script("train.py", f"{options} {loader} {rates} --output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    figures = logged(done.stdout)
    assert figures["step"] == list(range(1, 25))
    assert np.mean(figures["loss"][-4:]) < 0.1 * figures["loss"][0]
    # Not only the KL term: the actions are predicted better.
    assert np.mean(figures["l1"][-4:]) < 0.5 * figures["l1"][0]

    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    policy = act["model"].ACTPolicy(act["model"].ACTConfig(**saved["config"]))
    policy.load_state_dict(saved["model"])


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("--amp=true --optimizer=sgd", marks=pytest.mark.slow),
        "--amp=yes --amp_dtype=fp16 --freeze_backbone=1",
    ],
)
def test_amp_trains_on_the_cpu(
    act: dict[str, ModuleType],
    data: Path,
    precision: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = f"--dataset={data} {SMALL} --steps=2 --batch_size=2 --log_every=1 --device=cpu"
    assert act["train"].main([*options.split(), *precision.split()]) == 0
    figures = logged(capsys.readouterr().out)
    assert len(figures["loss"]) == 2
    assert np.isfinite(figures["loss"]).all()


def test_backbone_has_its_own_learning_rate(act: dict[str, ModuleType]) -> None:
    train = act["train"]
    with torch.device("meta"):
        policy = act["model"].ACTPolicy()
    options = train.parse_options(["--dataset=x", "--lr=1e-3", "--lr_backbone=1e-4"])
    rest, backbone = train.make_optimizer(policy, options).param_groups
    assert (rest["lr"], backbone["lr"]) == (1e-3, 1e-4)
    assert sum(p.numel() for group in (rest, backbone) for p in group["params"]) == 51_602_330
    policy.backbone.requires_grad_(False)
    assert len(train.make_optimizer(policy, options).param_groups) == 1


# Errors: one line, status 2 ----------------------------------------------------------------------


def test_missing_data_set_says_how_to_make_it(tmp_path: Path) -> None:
    done = run_script("train.py", f"--dataset={tmp_path / 'none'}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "make_dataset.py --out" in done.stderr


@pytest.mark.parametrize(
    ("script", "options", "line"),
    [
        ("train", "", "--dataset"),
        ("train", "--dataset=DATA --no_such=1", "--no_such"),
        ("train", "--dataset=DATA --batch=4", "--batch"),
        ("train", "--dataset=DATA --batch_size=0", "0 is not 1 or more"),
        ("train", "--dataset=DATA --batch_size=two", "'two' is not a number"),
        ("train", "--dataset=DATA --lr=nan", "nan is not 0.0 or more"),
        ("train", "--dataset=DATA --amp=maybe", "'maybe' is not true or false"),
        ("train", "--dataset=DATA --dim=100 --heads=8", "multiple of --heads 8"),
        ("train", "--dataset=DATA --batch_size=64", "more than the 32 samples"),
        ("train", "--dataset=DATA --device=abacus", "--device abacus"),
        ("train", "--dataset=DATA --device=cuda:99", "no such GPU"),
        ("make_dataset", "", "--out"),
        ("make_dataset", "--out=DATA --frames=0", "0 is not between 1 and"),
        ("make_dataset", "--out=DATA --fps=fast", "'fast' is not a whole number"),
        ("make_dataset", "--out=DATA/meta.json", "is not a directory"),
    ],
)
def test_bad_options(
    act: dict[str, ModuleType],
    data: Path,
    capsys: pytest.CaptureFixture[str],
    script: str,
    options: str,
    line: str,
) -> None:
    try:
        status = act[script].main(options.replace("DATA", str(data)).split())
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert line in error


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("meta.json", b"{"),
        ("meta.json", b'{"format": "act-example-dataset", "version": 99}'),
        ("episode_000/episode.npz", b"not an npz"),
        ("episode_000/wrist_left.mp4", None),
    ],
)
def test_damaged_data(
    act: dict[str, ModuleType], tmp_path: Path, name: str, content: bytes | None
) -> None:
    assert act["make_dataset"].main([f"--out={tmp_path}", "--episodes=1", "--frames=2"]) == 0
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(act["dataset"].DatasetError) as caught:
        act["dataset"].EpisodeDataset(tmp_path, chunk_size=1)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_a_slow_clock_costs_a_call_holds_what_was_measured(tmp_path: Path) -> None:
    """On a CPU of 4.0 GHz whose clock was 1.7 to 3.5 GHz at 30 Hz, a call took 7 to 8 ms more."""
    words = ("plan", "--gpu", "RTX 4090", "--cpu", "ghz=4", "--explain", "--output", "plan.json")
    done = trainfit(*words, "--", "python", EXAMPLE / "policy.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())["speed"]
    high, low = (each["seconds"] - found["now"]["seconds"] for each in found["paced"]["slowed"])
    assert 0 < high < 7e-3 and low > 8e-3
    assert "to 3.5 to 1.7 GHz instead of 4, expect" in " ".join(done.stdout.split())
