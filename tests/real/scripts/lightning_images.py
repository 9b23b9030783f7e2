"""A LightningModule with a ResNet, trained by Lightning's Trainer, gradients accumulated."""

import argparse

import lightning
import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)

    def training_step(self, batch, _):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(1280, 3, 64, 64), torch.randint(10, (1280,)))
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=args.accumulate)
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, args.batch_size, shuffle=True))
