"""A training script with costly habits, to be read by `trainfit doctor --script`; never run."""

import cv2
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        picture = cv2.resize(cv2.imread(f"{index}.jpg"), (224, 224))
        return torch.from_numpy(picture).permute(2, 0, 1).float().cuda(), index % 10


def evaluate(model, loader):
    model.eval()
    right = 0
    for images, labels in loader:
        right += (model(images.cuda()).argmax(1) == labels.cuda()).sum().item()
    return right


def main():
    model = nn.DataParallel(torchvision.models.resnet18()).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    training = DataLoader(Pictures(), batch_size=64, num_workers=12)
    validation = DataLoader(Pictures(), batch_size=64)
    total = 0.0
    for _ in range(80):
        for images, labels in training:
            loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        print(total, evaluate(model, validation))


if __name__ == "__main__":
    main()
