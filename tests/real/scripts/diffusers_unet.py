"""diffusers' unconditional training with accelerate: noise, a UNet2D, AdamW, EMA."""

import accelerate
import diffusers
import torch
from common import options
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

args = options(8)
accelerator = accelerate.Accelerator()
model = diffusers.UNet2DModel(
    sample_size=32,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
)
noise_of = diffusers.DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
images = torch.utils.data.TensorDataset(torch.rand(512, 3, 32, 32) * 2 - 1)
loader = torch.utils.data.DataLoader(images, args.batch_size, shuffle=True)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, 2 * len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
average = EMAModel(model.parameters(), decay=0.999)
average.to(accelerator.device)
for _ in range(2):
    for (clean,) in loader:
        noise = torch.randn_like(clean)
        times = torch.randint(0, 1000, (len(clean),), device=clean.device)
        noisy = noise_of.add_noise(clean, noise, times)
        with accelerator.accumulate(model):
            guess = model(noisy, times, return_dict=False)[0]
            accelerator.backward(loss := torch.nn.functional.mse_loss(guess, noise))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        average.step(model.parameters())
        print(loss.detach().item())
