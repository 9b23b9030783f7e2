import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    def __len__(self):
        return 20000

    def __getitem__(self, index):
        signal = torch.rand(512, 512)
        return (signal @ signal.T @ signal)[:64, :64].contiguous()


def threads(worker):
    torch.set_num_threads(16)


def main():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Spectra(), batch_size=32, num_workers=8, worker_init_fn=threads, pin_memory=True
    )
    start = time.time()
    for x in loader:
        loss = model(x.cuda(non_blocking=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.time() - start > 4:
            break


if __name__ == "__main__":
    main()
