"""A diffusion policy's training: a workspace that Hydra instantiates, with loaders for training and
validation, gradient accumulation, an average of the weights, and checkpoints."""

import copy
from pathlib import Path

import hydra
import torch
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(torch.nn.Module):
    def __init__(self, observation, action, horizon, width):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(observation + horizon * action + 1, width), torch.nn.Mish(),
            torch.nn.Linear(width, width), torch.nn.Mish(),
            torch.nn.Linear(width, horizon * action),
        )  # fmt: skip

    def forward(self, noisy, time, observation):
        return self.layers(torch.cat([noisy.flatten(1), time[:, None], observation], 1))


def loss_of(model, observation, action):
    noise = torch.randn_like(action)
    time = torch.rand(len(action), device=action.device)
    mix = time[:, None, None].cos()
    noisy = mix * action + (1 - mix**2).sqrt() * noise
    return torch.nn.functional.mse_loss(model(noisy, time, observation), noise.flatten(1))


def episodes(task, count):
    shape = task.horizon, task.action
    return TensorDataset(torch.randn(count, task.observation), torch.randn(count, *shape))


@hydra.main(version_base=None, config_path="hydra_config", config_name="workspace")
def main(cfg):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cfg.training.seed)
    model = Denoiser(cfg.task.observation, cfg.task.action, cfg.task.horizon, cfg.model.width)
    model.to(device)
    average = copy.deepcopy(model)
    optimizer = hydra.utils.instantiate(cfg.optimizer, params=model.parameters())
    train = DataLoader(episodes(cfg.task, cfg.task.samples), **cfg.dataloader)
    other = DataLoader(episodes(cfg.task, 256), **cfg.val_dataloader)
    every = cfg.training.gradient_accumulate_every
    for _ in range(cfg.training.num_epochs):
        model.train()
        for number, batch in enumerate(train, 1):
            (loss_of(model, *(each.to(device) for each in batch)) / every).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(now, 1 - cfg.training.ema)
        average.eval()
        with torch.no_grad():
            for batch in other:
                loss_of(average, *(each.to(device) for each in batch))
        Path("checkpoints").mkdir(exist_ok=True)
        torch.save(average.state_dict(), "checkpoints/latest.ckpt")


if __name__ == "__main__":
    main()
