from common import Images, batches, train

if __name__ == "__main__":
    train(batches(Images(), num_workers=1), rate=0.0)
