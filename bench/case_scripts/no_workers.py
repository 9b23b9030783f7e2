import time

from common import Images, batches, train


class Slow(Images):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


if __name__ == "__main__":
    train(batches(Slow(), num_workers=0))
