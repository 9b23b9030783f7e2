"""torchvision's detectors: lists of images of different sizes, with boxes, masks or keypoints."""

import sys

import torch
import torchvision
from common import device, options

kind = sys.argv.pop(1)
args = options(2)
gpu = device()


class Scenes(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        make = torch.Generator().manual_seed(index)
        height, width = torch.randint(100, 140, (2,), generator=make).tolist()
        corner = torch.rand(3, 2, generator=make) * 60
        boxes = torch.cat([corner, corner + 20 + torch.rand(3, 2, generator=make) * 20], 1)
        target = {"boxes": boxes, "labels": torch.randint(1, 3, (3,), generator=make)}
        if kind == "mask":
            target["masks"] = torch.ones(3, height, width, dtype=torch.uint8)
        if kind == "keypoint":
            centre = (boxes[:, :2] + boxes[:, 2:]) / 2
            spots = torch.cat([centre, torch.ones(3, 1)], 1)
            target["keypoints"] = spots[:, None].repeat(1, 5, 1)
            target["labels"] = torch.ones(3, dtype=torch.long)
        return torch.rand(3, height, width, generator=make), target


models = torchvision.models.detection
sizes = {"weights": None, "weights_backbone": None, "min_size": 128, "max_size": 192}
# Few regions an image: without torchvision's extension the CPU takes seconds for each of them.
few = {"rpn_post_nms_top_n_train": 100, "box_batch_size_per_image": 32}
if kind == "box":
    model = models.fasterrcnn_mobilenet_v3_large_320_fpn(num_classes=3, **sizes)
elif kind == "mask":
    model = models.maskrcnn_resnet50_fpn(num_classes=3, **sizes, **few)
else:
    model = models.keypointrcnn_resnet50_fpn(num_classes=2, num_keypoints=5, **sizes)
model.to(gpu).train()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.005, momentum=0.9)
loader = torch.utils.data.DataLoader(
    Scenes(), args.batch_size, shuffle=True, collate_fn=lambda rows: tuple(zip(*rows, strict=True))
)
for images, targets in loader:
    images = [image.to(gpu) for image in images]
    targets = [{name: value.to(gpu) for name, value in each.items()} for each in targets]
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({name: round(value.item(), 3) for name, value in losses.items()})
