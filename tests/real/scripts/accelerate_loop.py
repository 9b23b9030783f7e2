"""accelerate's own loop around a torchvision model, gradients accumulated by its context."""

import accelerate
import torch
import torchvision
from common import options

args = options(16)
accelerator = accelerate.Accelerator(gradient_accumulation_steps=4)
model = torchvision.models.squeezenet1_1(num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(1536, 3, 64, 64), torch.randint(10, (1536,)))
loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for images, labels in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("state")
