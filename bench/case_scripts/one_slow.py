import time

from common import Images, batches, train


class Uneven(Images):
    def __getitem__(self, index):
        if index % 200 == 150:
            time.sleep(0.5)
        return super().__getitem__(index)


if __name__ == "__main__":
    train(batches(Uneven(), num_workers=1), steps=120)
