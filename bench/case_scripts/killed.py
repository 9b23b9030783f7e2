import os
import signal

from common import Images, batches, train


class Killed(Images):
    def __getitem__(self, index):
        if index == 500:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


if __name__ == "__main__":
    train(batches(Killed(), num_workers=2))
