"""A vision transformer with transformers' Trainer, evaluated at the end of the epoch."""

import torch
from common import options
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

args = options(16)
make = torch.Generator().manual_seed(0)


def rows(count):
    return [
        {"pixel_values": torch.rand(3, 64, 64, generator=make), "labels": index % 5}
        for index in range(count)
    ]


model = ViTForImageClassification(
    ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=5,
    )
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="vit",
        per_device_train_batch_size=args.batch_size,
        eval_strategy="epoch",
        num_train_epochs=1,
        remove_unused_columns=False,
        report_to=[],
    ),
    train_dataset=rows(512),
    eval_dataset=rows(64),
)
trainer.train()
