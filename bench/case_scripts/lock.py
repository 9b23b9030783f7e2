import multiprocessing
import time

from common import Images, batches, train


class Locked(Images):
    def __init__(self):
        self.lock = multiprocessing.Lock()

    def __getitem__(self, index):
        with self.lock:
            time.sleep(0.003)
        return super().__getitem__(index)


if __name__ == "__main__":
    train(batches(Locked(), num_workers=2))
