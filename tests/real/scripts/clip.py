"""open_clip: a small CLIP of its own building, its contrastive loss, in mixed precision."""

import open_clip
import torch
from common import device, options

args = options(16)
gpu = device()
model = open_clip.CLIP(
    embed_dim=128,
    vision_cfg={"image_size": 48, "layers": 3, "width": 192, "patch_size": 8, "head_width": 64},
    text_cfg={"context_length": 32, "vocab_size": 2000, "width": 128, "heads": 2, "layers": 3},
    output_dict=True,
).to(gpu)
loss_of = open_clip.ClipLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
data = torch.utils.data.TensorDataset(torch.rand(768, 3, 48, 48), torch.randint(1, 2000, (768, 32)))
for images, texts in torch.utils.data.DataLoader(data, args.batch_size, drop_last=True):
    optimizer.zero_grad()
    with torch.autocast(gpu.type, torch.bfloat16):
        loss = loss_of(**model(images.to(gpu), texts.to(gpu)))
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
