"""Robot episodes on disk: one mp4 a camera, and states and actions in an npz file.

Layout of a data set directory (written by make_dataset.py):

    meta.json                       format, version, fps, episodes, frames, cameras, ...
    episode_000/head.mp4            one video a camera
    episode_000/wrist_left.mp4
    episode_000/wrist_right.mp4
    episode_000/episode.npz         states (T, 26) float32, actions (T, 26) float32
"""

from __future__ import annotations

import json
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

FORMAT = "act-example-dataset"
VERSION = 1
STATE_DIM = 26
ACTION_DIM = 26
# Name -> (width, height) in pixels.
CAMERAS = {"head": (640, 360), "wrist_left": (640, 480), "wrist_right": (640, 480)}

# Videos that a worker process keeps open; a data set of many episodes would otherwise run out of
# file descriptors.
MAX_OPEN_VIDEOS = 48


class DatasetError(Exception):
    """A data set that is missing or cannot be used; the message is one line."""


class MissingDatasetError(DatasetError):
    """There is no data set at all."""


def read_meta(root: Path) -> dict[str, Any]:
    """The content of meta.json, checked for format and version."""
    path = root / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingDatasetError(f"no data set in {root} (meta.json not found)") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DatasetError(f"{path} does not describe a data set of this example")
    if meta.get("version") != VERSION:
        raise DatasetError(
            f"{path} has version {meta.get('version')}, this script reads version {VERSION}"
        )
    return meta


def episode_dir(root: Path, episode: int) -> Path:
    """Folder of one episode."""
    return root / f"episode_{episode:03d}"


def video_path(root: Path, episode: int, camera: str) -> Path:
    """One camera's video of one episode."""
    return episode_dir(root, episode) / f"{camera}.mp4"


class VideoReader:
    """Random access to the frames of one video."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.container = av.open(str(path))
        self.stream = self.container.streams.video[0]
        # One thread: the parallel work is the loader's, and a reader without threads of its own
        # can be dropped safely in a forked process.
        self.stream.codec_context.thread_count = 1

    def frame(self, index: int, width: int, height: int) -> np.ndarray:
        """Frame `index`, counted from 0, as (height, width, 3) uint8 RGB."""
        rate, time_base = self.stream.average_rate, self.stream.time_base
        if not rate or not time_base:
            raise DatasetError(f"{self.path} does not state its frame rate")
        wanted = (self.stream.start_time or 0) + round(index / rate / time_base)
        # A seek lands on the key frame at or before the wanted time; decode on from there.
        self.container.seek(wanted, stream=self.stream, backward=True)
        for frame in self.container.decode(self.stream):
            if frame.pts is not None and frame.pts >= wanted:
                return frame.to_ndarray(format="rgb24", width=width, height=height, threads=1)
        raise DatasetError(f"{self.path} has no frame {index}")


class EpisodeDataset(Dataset[dict[str, Tensor]]):
    """One sample for each frame of each episode.

    A sample holds, under each camera's name, a (3, H, W) float32 image in [0, 1]; `state` (26,)
    and `action` (K, 26), both float32 and without unit; `is_pad` (K,) bool, True for the steps of
    the chunk that lie after the end of the episode, where `action` repeats the last one.
    """

    def __init__(self, root: str | Path, chunk_size: int, image_scale: float = 1.0) -> None:
        self.root = Path(root)
        self.chunk_size = chunk_size
        self.meta = read_meta(self.root)
        try:
            # Name -> (width, height) of the images handed out.
            self.sizes = {
                name: (max(1, round(w * image_scale)), max(1, round(h * image_scale)))
                for name, (w, h) in self.meta["cameras"].items()
            }
            self.states, self.actions = self._load_tables(int(self.meta["episodes"]))
        except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
            raise DatasetError(f"data set {self.root} is damaged: {error!r}") from None
        for episode in range(len(self.states)):
            for name in self.sizes:
                if not (video := video_path(self.root, episode, name)).is_file():
                    raise DatasetError(f"data set {self.root} is damaged: no {video}")
        lengths = [len(states) for states in self.states]
        # First sample of each episode, and the number of all samples at the end.
        self.starts = np.concatenate(([0], np.cumsum(lengths)))
        self._readers: OrderedDict[tuple[int, str], VideoReader] = OrderedDict()
        self._owner = os.getpid()

    def _load_tables(self, episodes: int) -> tuple[list[Tensor], list[Tensor]]:
        """States and actions of each episode, (T, 26) float32."""
        states, actions = [], []
        for episode in range(episodes):
            with np.load(episode_dir(self.root, episode) / "episode.npz") as tables:
                states.append(torch.from_numpy(tables["states"]))
                actions.append(torch.from_numpy(tables["actions"]))
        return states, actions

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        episode = int(np.searchsorted(self.starts, index, side="right")) - 1
        step = index - int(self.starts[episode])
        sample = {name: self._image(episode, name, step) for name in self.sizes}
        sample["state"] = self.states[episode][step]
        sample["action"], sample["is_pad"] = self._chunk(episode, step)
        return sample

    def _image(self, episode: int, camera: str, step: int) -> Tensor:
        """(3, H, W) float32 in [0, 1]."""
        pixels = self._reader(episode, camera).frame(step, *self.sizes[camera])
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div_(255)

    def _chunk(self, episode: int, step: int) -> tuple[Tensor, Tensor]:
        """Actions (K, 26) from `step` on, and (K,) bool, True past the end of the episode."""
        actions = self.actions[episode]
        wanted = torch.arange(step, step + self.chunk_size)
        return actions[wanted.clamp(max=len(actions) - 1)], wanted >= len(actions)

    def _reader(self, episode: int, camera: str) -> VideoReader:
        """The open video; opened on first use, and never shared between processes."""
        if self._owner != os.getpid():
            # Opened before a fork: parent and child would move one shared file position.
            self._readers = OrderedDict()
            self._owner = os.getpid()
        key = (episode, camera)
        reader = self._readers.pop(key, None)
        if reader is None:
            reader = VideoReader(video_path(self.root, episode, camera))
        self._readers[key] = reader
        if len(self._readers) > MAX_OPEN_VIDEOS:
            _, oldest = self._readers.popitem(last=False)
            oldest.container.close()
        return reader

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned worker receives: everything but the open videos."""
        return {**self.__dict__, "_readers": OrderedDict()}
