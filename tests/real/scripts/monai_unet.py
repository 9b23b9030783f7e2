"""MONAI: 3D U-Net on volumes that its dictionary transforms load (MetaTensors), Dice loss."""

import monai
import torch
from common import device, options
from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, RandSpatialCropd, ToTensord

args = options(2)
gpu = device()
monai.utils.set_determinism(0)
rows = [
    {"image": torch.rand(40, 40, 40), "label": (torch.rand(40, 40, 40) > 0.5).float()}
    for _ in range(64)
]
keys = ["image", "label"]
steps = Compose(
    [
        EnsureChannelFirstd(keys, channel_dim="no_channel"),
        RandSpatialCropd(keys, roi_size=(32, 32, 32), random_size=False),
        RandFlipd(keys, prob=0.5, spatial_axis=0),
        ToTensord(keys, track_meta=True),
    ]
)
loader = monai.data.DataLoader(monai.data.Dataset(rows, steps), batch_size=args.batch_size)
model = monai.networks.nets.UNet(
    spatial_dims=3,
    in_channels=1,
    out_channels=2,
    channels=(16, 32, 64),
    strides=(2, 2),
    num_res_units=1,
).to(gpu)
loss_of = monai.losses.DiceLoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _ in range(2):
    for batch in loader:
        images, labels = batch["image"].to(gpu), batch["label"].to(gpu)
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
