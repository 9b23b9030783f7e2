"""timm's own model, optimizer, schedule and loss, with accumulated gradients."""

import argparse

import timm
import timm.loss
import timm.optim
import timm.scheduler
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="convnext_atto")
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--grad-accum-steps", type=int, default=2)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=10).to(device)
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, warmup_t=2)
criterion = timm.loss.LabelSmoothingCrossEntropy()
data = torch.utils.data.TensorDataset(torch.randn(1024, 3, 96, 96), torch.randint(10, (1024,)))
loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True, drop_last=True)
for epoch in range(2):
    for index, (images, labels) in enumerate(loader):
        loss = criterion(model(images.to(device)), labels.to(device)) / args.grad_accum_steps
        loss.backward()
        if (index + 1) % args.grad_accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    schedule.step(epoch + 1)
    torch.save(model.state_dict(), "last.pt")
