"""Make a small robot data set: synthetic scenes, real H.264 videos.

    python examples/act/make_dataset.py --out data/act --episodes 4 --frames 60 --fps 15

Each camera sees a red blob whose place is given by two numbers of the robot state; the head camera
also sees a green target that stands still for an episode. The action is a smooth function of the
state and of the target's place, so a policy can learn it. The same options give the same data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import av
import numpy as np
from dataset import (
    ACTION_DIM,
    CAMERAS,
    FORMAT,
    STATE_DIM,
    VERSION,
    DatasetError,
    episode_dir,
    read_meta,
    video_path,
)

RED, GREEN = (220, 40, 40), (40, 200, 60)
BLOB_RADIUS = 36  # pixels
KEYFRAME_EVERY = 2  # frames; LeRobot's choice, so that a random frame is quick to reach
# The two state numbers that give the blob's x and y in each camera's image.
BLOB_STATE = {"head": (0, 1), "wrist_left": (2, 3), "wrist_right": (4, 5)}


def blob_center(camera: str, state: np.ndarray) -> tuple[float, float]:
    """Pixel (x, y) of the red blob in a camera's image for a state (26,)."""
    width, height = CAMERAS[camera]
    column, row = BLOB_STATE[camera]
    return to_pixel(width, float(state[column])), to_pixel(height, float(state[row]))


def to_pixel(size: int, value: float) -> float:
    """Place of a value in [-1, 1] along an image side of `size` pixels; the whole blob fits."""
    return size / 2 + value * (size / 2 - BLOB_RADIUS - 4)


def make_states(rng: np.random.Generator, frames: int, fps: float) -> np.ndarray:
    """Smooth joint positions (T, 26) float32 in [-1, 1], without unit."""
    time = np.arange(frames)[:, None] / fps  # seconds
    hertz = rng.uniform(0.15, 0.4, STATE_DIM)
    phase = rng.uniform(0, 2 * np.pi, STATE_DIM)
    # A blob runs round an ellipse: its two numbers share a frequency, a quarter turn apart, so it
    # never stands still and each frame looks different from its neighbours.
    for column, row in BLOB_STATE.values():
        hertz[row] = hertz[column]
        phase[row] = phase[column] + np.pi / 2
    return (0.9 * np.sin(2 * np.pi * hertz * time + phase)).astype(np.float32)


def make_actions(seed: int, states: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Actions (T, 26) float32 in [-1, 1] for states (T, 26) and the target's place (2,)."""
    # The rule belongs to the data set, not to the episode: it is what a policy learns.
    rng = np.random.default_rng([seed, 1])
    mix = rng.normal(0, 0.6 / np.sqrt(STATE_DIM), (STATE_DIM, ACTION_DIM))
    pull = rng.normal(0, 0.5, (2, ACTION_DIM))
    rest = rng.normal(0, 0.5, ACTION_DIM)
    return np.tanh(states @ mix + target @ pull + rest).astype(np.float32)


def make_background(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A dim, grainy gradient, (height, width, 3) uint8."""
    x = np.linspace(0, 70, width)[None, :, None]
    y = np.linspace(0, 70, height)[:, None, None]
    grain = rng.integers(0, 24, (height // 8, width // 8, 1)).repeat(8, 0).repeat(8, 1)
    return (40 + (x + y) / 2 + grain + np.zeros(3)).astype(np.uint8)


def draw_blob(image: np.ndarray, center: tuple[float, float], colour: tuple[int, ...]) -> None:
    """Paint a disc with a soft edge into (height, width, 3) uint8, in place."""
    cx, cy = center
    reach = BLOB_RADIUS + 2
    left, top = int(cx) - reach, int(cy) - reach
    patch = image[top : top + 2 * reach + 1, left : left + 2 * reach + 1]
    y = np.arange(top, top + patch.shape[0])[:, None] - cy
    x = np.arange(left, left + patch.shape[1])[None, :] - cx
    cover = np.clip(BLOB_RADIUS - np.hypot(x, y) + 0.5, 0, 1)[..., None]
    patch[:] = (patch * (1 - cover) + np.array(colour) * cover).astype(np.uint8)


def write_video(
    path: Path,
    camera: str,
    states: np.ndarray,
    target: np.ndarray,
    fps: int,
    background: np.ndarray,
) -> None:
    """Encode one camera's view of an episode as H.264 in an mp4 file."""
    width, height = CAMERAS[camera]
    scene = background.copy()
    if camera == "head":
        place = to_pixel(width, float(target[0])), to_pixel(height, float(target[1]))
        draw_blob(scene, place, GREEN)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        # A fixed number of threads: x264's output depends on it.
        stream.codec_context.thread_count = 2
        stream.options = {"preset": "veryfast", "crf": "23", "g": str(KEYFRAME_EVERY), "bf": "0"}
        for state in states:
            image = scene.copy()
            draw_blob(image, blob_center(camera, state), RED)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def write_episode(root: Path, episode: int, frames: int, fps: int, seed: int) -> None:
    """Write the videos and the tables of one episode."""
    folder = episode_dir(root, episode)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 2, episode])
    states = make_states(rng, frames, fps)
    target = rng.uniform(-0.8, 0.8, 2)
    actions = make_actions(seed, states, target)
    np.savez(folder / "episode.npz", states=states, actions=actions)
    for number, (camera, (width, height)) in enumerate(CAMERAS.items()):
        background = make_background(np.random.default_rng([seed, 3, number]), width, height)
        write_video(video_path(root, episode, camera), camera, states, target, fps, background)


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """What meta.json says about a data set made with these options."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "episodes": options.episodes,
        "frames": options.frames,
        "fps": options.fps,
        "seed": options.seed,
        "state_dim": STATE_DIM,
        "action_dim": ACTION_DIM,
        "cameras": {name: list(size) for name, size in CAMERAS.items()},
    }


def already_there(root: Path, meta: dict[str, Any]) -> bool:
    """True if `root` holds this data set, False if it holds none; an error if it holds another."""
    if root.exists() and not root.is_dir():
        raise DatasetError(f"{root} is not a directory")
    if not (root / "meta.json").exists():
        return False
    found = read_meta(root)
    if found != meta:
        differing = [key for key in meta if found.get(key) != meta[key]]
        raise DatasetError(
            f"{root} holds another data set (different: {', '.join(differing) or 'extra entries'});"
            " choose another --out or remove it"
        )
    return all(
        (episode_dir(root, episode) / "episode.npz").is_file()
        and all(video_path(root, episode, camera).is_file() for camera in CAMERAS)
        for episode in range(meta["episodes"])
    )


def make_dataset(root: Path, options: argparse.Namespace) -> bool:
    """Write the data set unless it is there; True if something was written."""
    meta = describe(options)
    if already_there(root, meta):
        return False
    root.mkdir(parents=True, exist_ok=True)
    for episode in range(options.episodes):
        write_episode(root, episode, options.frames, options.fps, options.seed)
    # Last and in one move: a data set with a meta.json is a whole one.
    partial = root / "meta.json.part"
    partial.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, root / "meta.json")
    return True


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number within limits."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked; leaves with status 2 and one line if they are wrong."""
    parser = OneLineParser(
        description="Make a small robot data set with H.264 videos.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--episodes", type=whole_number(1, 999), default=4, help="episodes")
    parser.add_argument("--frames", type=whole_number(1, 100_000), default=60, help="per episode")
    parser.add_argument("--fps", type=whole_number(1, 240), default=15, help="frames a second")
    parser.add_argument("--seed", type=whole_number(0, 2**31 - 1), default=0, help="random seed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for options or a directory that cannot be used."""
    options = parse_options(argv)
    try:
        written = make_dataset(options.out, options)
    except (DatasetError, OSError, av.error.FFmpegError) as error:
        print(f"make_dataset.py: error: {error}", file=sys.stderr)
        return 2
    frames = options.episodes * options.frames
    verb = "wrote" if written else "already there:"
    print(f"{verb} {options.out} ({options.episodes} episodes, {frames} frames a camera)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
