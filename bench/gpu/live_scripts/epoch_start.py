import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def setup(worker):
    time.sleep(0.2)  # opens its index


def main():
    data = TensorDataset(torch.randn(640, 256), torch.randint(10, (640,)))
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        data, batch_size=32, shuffle=True, num_workers=4, worker_init_fn=setup, pin_memory=True
    )
    start = time.time()
    while time.time() - start < 4:
        for x, y in loader:
            loss = nn.functional.cross_entropy(
                model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
