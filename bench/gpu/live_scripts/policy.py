import torch
from torch import nn


def load():
    torch.manual_seed(0)
    model = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 6)
        .cuda()
        .eval()
    )
    return model, torch.randn(1, 100, 512, device="cuda")


def act(loaded):
    model, x = loaded
    with torch.no_grad():
        return model(x)[:, -1].cpu()
