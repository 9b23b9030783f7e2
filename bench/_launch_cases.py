"""The eight scripts that launch.py plans: written as their users write them, each bound by
something else, and with a command line of its own style."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _loader_images import image_paths
from loader_workloads import BY_NAME, ROOT, NotInstalledError

SCRIPTS = ROOT / "bench" / "launch_scripts"
JPEGS = 256


def _nothing(_data: Path) -> list[str]:
    return []


def _jpegs(data: Path) -> list[str]:
    paths = image_paths(data, JPEGS, "jpg", 375, 500, quality=90)
    return [f"--data={Path(paths[0]).parent}"]


def _videos(data: Path) -> Path:
    case = BY_NAME["act_video"]
    return Path(case.dataset(data).root)  # type: ignore[attr-defined]


def _recording(data: Path) -> list[str]:
    case = BY_NAME["memmap"]
    return [str(case.dataset(data).path)]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    """A script and its user's line: ``words`` follow what ``data`` gives (arguments that name the
    data, whose files it makes in a folder if they are absent).

    ``needs`` is a package that it imports, and ``install`` what pip calls that. ``decoder_threads``
    is the option for the threads that no variable of the environment sets.
    """

    name: str
    what: str
    script: Path
    words: tuple[str, ...]
    data: Callable[[Path], list[str]] = _nothing
    needs: str = ""
    install: str = ""
    decoder_threads: str = ""

    def command(self, folder: Path) -> list[str]:
        """The user's words; raises :class:`NotInstalledError`."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise NotInstalledError(f"not installed: pip install {self.install or self.needs}")
        return ["python", str(self.script), *self.data(folder), *self.words]


CASES: tuple[Case, ...] = (
    Case(
        "blas",
        "matrix products and SVD in the data set",
        SCRIPTS / "whiten.py",
        ("--batch-size=4", "--num-workers=2"),
    ),
    Case(
        "opencv",
        "JPEG, warp, blur and resize by OpenCV",
        SCRIPTS / "opencv_augment.py",
        ("--num-workers={num_workers:2}", "--prefetch-factor={prefetch_factor:2}"),
        _jpegs,
        needs="cv2",
        install="opencv-python-headless",
    ),
    Case(
        "video",
        "H.264 by PyAV with its own threads; nothing on the command line",
        SCRIPTS / "video_frames.py",
        (),
        lambda data: [str(_videos(data))],
        needs="av",
        decoder_threads="--decoder_threads",
    ),
    Case(
        "python",
        "text cut up in plain Python",
        SCRIPTS / "tokenise.py",
        ("-b", "16", "-j", "{num_workers:1}"),
    ),
    Case(
        "memmap",
        "windows of a NumPy memmap",
        SCRIPTS / "recording_windows.py",
        ("--workers={num_workers:0}", "--prefetch={prefetch_factor:2}"),
        _recording,
    ),
    Case(
        "gpu_bound",
        "a Transformer whose tokens are ready; settings in the script alone",
        SCRIPTS / "language_model.py",
        (),
    ),
    Case(
        "tiny",
        "steps of microseconds on a table in memory",
        SCRIPTS / "tiny_mlp.py",
        ("--num-workers=2",),
    ),
    Case(
        "act",
        "the ACT example: three cameras",
        ROOT / "examples" / "act" / "train.py",
        (
            *("--batch_size=8", "--image_scale=0.5", "--amp=true"),
            *("--num_workers={num_workers:4}", "--prefetch_factor={prefetch_factor:2}"),
        ),
        lambda data: [f"--dataset={_videos(data)}"],
        needs="av",
    ),
)
BY_CASE = {case.name: case for case in CASES}
QUICK = ("blas", "python", "tiny")
