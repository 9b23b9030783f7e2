"""Train a frame encoder on clips that PyAV decodes."""

import argparse
import random
from pathlib import Path

import av
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    """Some consecutive frames of a random place of a video."""

    def __init__(self, root, frames, size, samples, threads):
        self.videos = sorted(str(path) for path in Path(root).rglob("*.mp4"))
        if not self.videos:
            raise SystemExit(f"no *.mp4 below {root}")
        self.frames, self.size, self.samples, self.threads = frames, size, samples, threads

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        with av.open(self.videos[index % len(self.videos)]) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = self.threads
            last = max(0, stream.frames - self.frames - 1)
            seconds = random.randint(0, last) / float(stream.average_rate)
            container.seek(int(seconds / stream.time_base), stream=stream)
            clip = []
            for frame in container.decode(stream):
                picture = frame.reformat(width=self.size, height=self.size, format="rgb24")
                clip.append(picture.to_ndarray())
                if len(clip) == self.frames:
                    break
            while len(clip) < self.frames:
                clip.append(clip[-1])
        return torch.from_numpy(np.stack(clip)).permute(0, 3, 1, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root", help="folder with videos")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_workers", type=int, default=4)
    parser.add_argument("--prefetch_factor", type=int, default=2)
    parser.add_argument("--decoder_threads", type=int, default=0, help="of FFmpeg; 0: all CPUs")
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    opt = parser.parse_args()

    dataset = Clips(opt.root, opt.frames, opt.size, opt.samples, opt.decoder_threads)
    extra = {"prefetch_factor": opt.prefetch_factor} if opt.num_workers > 0 else {}
    loader = DataLoader(dataset, opt.batch_size, shuffle=True, num_workers=opt.num_workers, **extra)
    encoder = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=4, padding=3),
        nn.GELU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 128),
    ).to(opt.device)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-4)
    done = 0
    while done < opt.steps:
        for clips in loader:
            clips = clips.to(opt.device).float().div_(255)
            batch, frames = clips.shape[:2]
            embedded = encoder(clips.flatten(0, 1)).view(batch, frames, -1)
            # Neighbouring frames are near one another, those of other clips are not.
            now, then = (F.normalize(embedded[:, at], dim=-1) for at in (0, -1))
            loss = F.cross_entropy(now @ then.T / 0.1, torch.arange(batch, device=opt.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done >= opt.steps:
                break
    print("done", done, loss.item())


if __name__ == "__main__":
    main()
