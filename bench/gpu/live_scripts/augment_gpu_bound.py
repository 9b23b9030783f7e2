import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        image = torch.rand(3, 160, 160)
        if index % 2:
            image = image.flip(-1)
        image = (image - image.mean((1, 2), keepdim=True)) / image.std((1, 2), keepdim=True)
        return image[:, 8:136, 8:136].contiguous(), index % 10


def main():
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    blocks = [nn.Conv2d(3, 128, 3, padding=1)]
    for _ in range(10):
        blocks += [nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(inplace=True)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    model = model.cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    loader = DataLoader(
        Images(),
        batch_size=64,
        shuffle=True,
        num_workers=8,
        pin_memory=True,
        persistent_workers=True,
    )
    start = time.time()
    for _epoch in range(10):
        for x, y in loader:
            x = x.cuda(non_blocking=True).to(memory_format=torch.channels_last)
            y = y.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if time.time() - start > 5:
                return


if __name__ == "__main__":
    main()
