"""segmentation-models-pytorch: a Unet with a ResNet-18, its Dice loss and its metrics."""

import segmentation_models_pytorch as smp
import torch
from common import device, options

args = options(8)
gpu = device()
model = smp.Unet("resnet18", encoder_weights=None, classes=3).to(gpu)
loss_of = smp.losses.DiceLoss("multiclass")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
data = torch.utils.data.TensorDataset(
    torch.rand(512, 3, 96, 96), torch.randint(0, 3, (512, 96, 96))
)
for images, masks in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    images, masks = images.to(gpu), masks.to(gpu)
    logits = model(images)
    loss = loss_of(logits, masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found = logits.argmax(1)
    counts = smp.metrics.get_stats(found, masks, mode="multiclass", num_classes=3)
    print(loss.item(), smp.metrics.iou_score(*counts, reduction="micro").item())
