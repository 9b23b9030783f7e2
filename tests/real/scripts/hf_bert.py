"""BERT text classification with transformers' Trainer; sentences of 8 to 120 words, padded."""

import argparse

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from words import tokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=2048)
args = parser.parse_args()

torch.manual_seed(0)
lengths = torch.randint(8, 121, (args.samples,)).tolist()
rows = [
    {"input_ids": torch.randint(4, 4000, (length,)).tolist(), "label": index % 2}
    for index, length in enumerate(lengths)
]
words = PreTrainedTokenizerFast(tokenizer_object=tokenizer(4000), pad_token="<pad>")
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=4000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
    )
)
Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=1,
        report_to=[],
        save_steps=2,
    ),
    train_dataset=rows,
    data_collator=DataCollatorWithPadding(words),
).train()
