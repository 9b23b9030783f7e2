"""diffusers' text-to-image LoRA: a frozen UNet2DCondition in half precision, peft's adapter."""

import accelerate
import diffusers
import peft
import torch
from common import options

args = options(2)
accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
unet = diffusers.UNet2DConditionModel(
    sample_size=32,
    block_out_channels=(32, 64),
    layers_per_block=1,
    cross_attention_dim=64,
    attention_head_dim=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
unet.requires_grad_(False)
unet.add_adapter(
    peft.LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"])
)
trained = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
noise_of = diffusers.DDPMScheduler(num_train_timesteps=1000)
data = torch.utils.data.TensorDataset(torch.randn(256, 4, 32, 32), torch.randn(256, 16, 64))
loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
for latents, text in loader:
    with accelerator.accumulate(unet):
        noise = torch.randn_like(latents)
        times = torch.randint(0, 1000, (len(latents),), device=latents.device)
        guess = unet(noise_of.add_noise(latents, noise, times), times, text).sample
        accelerator.backward(torch.nn.functional.mse_loss(guess.float(), noise.float()))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
