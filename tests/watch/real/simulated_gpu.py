"""A training on the simulated CUDA device, whose kernels take real time that an option sets.

The device works behind the host, as a GPU does: work that is launched begins when the work before
it is done, and ``torch.cuda.synchronize`` waits for it.
"""

import argparse
import itertools
import os
from pathlib import Path
from time import monotonic, sleep  # the machine's: a simulation shows its own

import torch
from torch.utils.data import DataLoader, Dataset

import trainfit
from trainfit.results.runs.tables import GPUS, read_table
from trainfit.simgpu import cuda_clocks

MIB = 1 << 20
#: Seconds after which a sampler that has written too little is not waited for.
PATIENCE_S = 200.0


class RealClock:
    """The device's time: the machine's clock, or later while there is work."""

    free = 0.0

    def __init__(self, *_):
        pass

    def now(self, stream=None):
        return max(RealClock.free, monotonic())

    def host(self):
        return monotonic()

    def pause(self, seconds):
        pass


def launch(seconds):
    RealClock.free = max(RealClock.free, monotonic()) + seconds


class Net(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = torch.nn.Linear(64, 64), seconds

    def forward(self, samples):
        out = self.layer(samples)
        launch(self.seconds / 3)
        if out.requires_grad:
            out.register_hook(lambda _: launch(self.seconds * 2 / 3))
        return out


class Samples(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        sleep(self.seconds)
        return torch.ones(64)


def sampled(since):
    """How often the sampler has looked at the GPU since then, as far as it has written that."""
    began = float(os.environ["TRAINFIT_WATCH_STARTED"].split()[1])
    table = read_table(Path(os.environ["TRAINFIT_WATCH"], "gpus.bin"), GPUS)
    return int((table["time_s"] >= since - began).sum())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=0, help="of the GPU in training, at least")
    parser.add_argument("--gpu", type=float, default=0.03, help="seconds of kernels a step")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of a batch")
    parser.add_argument("--ahead", type=float, default=0.0, help="seconds that are not waited for")
    parser.add_argument("--leak", type=int, default=0, help="MiB of the GPU that a step keeps")
    parser.add_argument("--side-stream", action="store_true", help="copies in a stream of its own")
    options = parser.parse_args()
    simulation = trainfit.simulate("T4")
    cuda_clocks.use(RealClock)  # in place of the model's, which that has chosen
    with simulation:
        synchronize = torch.cuda.synchronize

        def wait(*words):
            sleep(max(0.0, RealClock.free - monotonic() - options.ahead))
            synchronize(*words)

        torch.cuda.synchronize = wait
        model = Net(options.gpu).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        kept = []
        side = torch.cuda.Stream() if options.side_stream else torch.cuda.current_stream()
        batches = iter(DataLoader(Samples(options.sleep), batch_size=1, pin_memory=True))
        began = monotonic()
        for done in itertools.count():
            if done >= options.steps and (
                not options.samples
                or sampled(began) >= options.samples
                or monotonic() - began > PATIENCE_S
            ):
                break
            samples = next(batches)
            with torch.cuda.stream(side):
                samples = samples.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            loss = model(samples).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if options.leak:
                kept.append(torch.zeros(options.leak * MIB, dtype=torch.uint8, device="cuda"))
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
