"""effdet: EfficientDet's training bench, with anchors matched to the boxes on the GPU."""

import effdet
import torch
from common import device, options

args = options(2)
gpu = device()
config = effdet.get_efficientdet_config("tf_efficientdet_d0")
config.update({"image_size": (128, 128), "num_classes": 3})
net = effdet.EfficientDet(config, pretrained_backbone=False)
model = effdet.DetBenchTrain(net, config).to(gpu)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
images, corner = torch.rand(128, 3, 128, 128), torch.rand(128, 4, 2) * 60
data = torch.utils.data.TensorDataset(
    images, torch.cat([corner, corner + 30], 2), torch.randint(1, 4, (128, 4)).float()
)
for images, boxes, labels in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    target = {"bbox": boxes.to(gpu), "cls": labels.to(gpu)}
    loss = model(images.to(gpu), target)["loss"]
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
