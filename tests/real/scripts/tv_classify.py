"""torchvision's classification training: SGD with momentum, a schedule, torchmetrics."""

import torch
import torchmetrics
import torchvision
from common import device, options

args = options(32)
gpu = device()
data = torchvision.datasets.FakeData(1024, (3, 80, 80), 10, torchvision.transforms.ToTensor())
loader = torch.utils.data.DataLoader(data, args.batch_size, shuffle=True)
model = torchvision.models.mobilenet_v3_small(num_classes=10).to(gpu)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
accuracy = torchmetrics.Accuracy("multiclass", num_classes=10).to(gpu)
for epoch in range(2):
    model.train()
    for images, labels in loader:
        images, labels = images.to(gpu, non_blocking=True), labels.to(gpu, non_blocking=True)
        output = model(images)
        loss = torch.nn.functional.cross_entropy(output, labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy.update(output, labels)
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy.compute():.3f}")
    accuracy.reset()
    schedule.step()
