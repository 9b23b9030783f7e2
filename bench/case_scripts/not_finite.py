from common import Images, batches, train


class Damaged(Images):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image / 0 if index == 500 else image), label


if __name__ == "__main__":
    train(batches(Damaged(), num_workers=1), steps=80)
