"""A small training by the loop of a framework, which prints its losses to the last bit."""

import argparse
import logging
import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

# Lightning and Transformers import torchvision, which does not load where it is of another PyTorch.
define_torchvision_operators()

WIDTH, SAMPLES, BATCH = 16, 96, 8


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
    )


def loss_of(model, inputs, labels):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    if torch.is_grad_enabled():
        print(loss.item().hex(), flush=True)
    return loss


def data():
    return TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(0, 2, (SAMPLES,)))


def accelerated(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer, loader, other = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        DataLoader(data(), BATCH, shuffle=True, num_workers=1),
        DataLoader(data(), BATCH),
    )
    for _ in range(3):
        model.train()
        for inputs, labels in loader:
            accelerator.backward(loss_of(model, inputs, labels))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for inputs, labels in other:
                loss_of(model, inputs, labels)
        accelerator.save_state(f"{folder}/state")


def lightning(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()

        def training_step(self, batch, number):
            return loss_of(self.model, *batch)

        def validation_step(self, batch, number):
            loss_of(self.model, *batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Module(), DataLoader(data(), BATCH, shuffle=True), DataLoader(data(), BATCH))


def trainer(folder):
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.body = network()
            self.post_init()

        def forward(self, inputs=None, labels=None):
            return {"loss": loss_of(self.body, inputs, labels)}

    samples = [{"inputs": inputs, "labels": label} for inputs, label in data()]
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    arguments.prediction_loss_only = True
    Trainer(
        Model(PretrainedConfig()), arguments, train_dataset=samples, eval_dataset=samples
    ).train()


LOOPS = {each.__name__: each for each in (accelerated, lightning, trainer)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=sorted(LOOPS))
    parser.add_argument("folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(3)
    LOOPS[options.loop](options.folder)
