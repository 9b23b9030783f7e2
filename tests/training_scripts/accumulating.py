"""Loops that accumulate gradients in the ways that scripts do; ``--loop`` chooses one."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 64


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", required=True, choices=sorted(LOOPS))
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args()


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )


def batches(options, shuffle=False):
    data = TensorDataset(torch.randn(options.samples, WIDTH), torch.zeros(options.samples).long())
    return DataLoader(data, options.batch_size, shuffle, num_workers=options.workers)


def trained(options):
    model = network().cuda()
    return model, torch.optim.AdamW(model.parameters())


def loss_of(model, inputs, labels):
    return torch.nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda())


def plain(options):
    """Every so many batches; the last step of an epoch has fewer."""
    model, optimizer = trained(options)
    loader = batches(options)
    for _ in range(20):
        for number, (inputs, labels) in enumerate(loader, 1):
            (loss_of(model, inputs, labels) / options.accumulate).backward()
            if number % options.accumulate == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()


def evaluating(options):
    """An evaluation of the training data and of other data after each step."""
    model, optimizer = trained(options)
    loader, other = iter(batches(options)), batches(argparse.Namespace(**vars(options)))
    for _ in range(20):
        for _ in range(options.accumulate):
            (loss_of(model, *next(loader)) / options.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for number, (inputs, labels) in enumerate(other):
                loss_of(model, inputs, labels)
                if number == 2:
                    break
            next(loader)


def generated(options):
    """No DataLoader, as nanoGPT: batches are made where they are needed."""
    model, optimizer = trained(options)
    for _ in range(20):
        for _ in range(options.accumulate):
            inputs = torch.randn(options.batch_size, WIDTH)
            loss_of(model, inputs, torch.zeros(options.batch_size).long()).backward()
        optimizer.step()
        optimizer.zero_grad()


def pieces(options):
    """Each batch is cut into as many micro-batches."""
    model, optimizer = trained(options)
    for inputs, labels in batches(options):
        count = options.accumulate
        for part in zip(inputs.chunk(count), labels.chunk(count), strict=True):
            loss_of(model, *part).backward()
        optimizer.step()
        optimizer.zero_grad()


def ahead(options):
    """A loop that fetches a batch before it needs it."""
    model, optimizer = trained(options)
    loader = iter(batches(options))
    coming = next(loader)
    for number in range(1, 100):
        present, coming = coming, next(loader)
        loss_of(model, *present).backward()
        if number % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def summed(options):
    """One backward pass for the losses of several batches."""
    model, optimizer = trained(options)
    loader = iter(batches(options))
    for _ in range(20):
        sum(loss_of(model, *next(loader)) for _ in range(options.accumulate)).backward()
        optimizer.step()
        optimizer.zero_grad()


def views(options):
    """Two calls of the model with each batch; nothing is accumulated."""
    model, optimizer = trained(options)
    for inputs, labels in batches(options):
        (loss_of(model, inputs, labels) + loss_of(model, -inputs, labels)).backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerated(options):
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), batches(options)
    )
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()


def lightning(options):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()

        def training_step(self, batch, number):
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch, number):
            self.model(batch[0])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_epochs=2,
        accumulate_grad_batches=options.accumulate,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), batches(options), batches(options))


def trainer(options):
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.body = network()
            self.post_init()

        def forward(self, inputs=None, labels=None):
            logits = self.body(inputs)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"inputs": torch.randn(WIDTH), "labels": 0} for _ in range(options.samples)]
    arguments = TrainingArguments(
        output_dir="/tmp/step-trainer",
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        max_steps=20,
        report_to=[],
        save_strategy="no",
        dataloader_num_workers=options.workers,
    )
    Trainer(Model(PretrainedConfig()), arguments, train_dataset=data).train()


LOOPS = {
    each.__name__: each
    for each in (
        plain,
        evaluating,
        generated,
        pieces,
        ahead,
        summed,
        views,
        accelerated,
        lightning,
        trainer,
    )
}

if __name__ == "__main__":
    options = parse()
    LOOPS[options.loop](options)
