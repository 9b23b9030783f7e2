"""sentence-transformers: pairs of texts of varying length, MultipleNegativesRankingLoss."""

import random

from common import options
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from words import tokenizer

args = options(16)
random.seed(0)
BertModel(
    BertConfig(
        vocab_size=3000,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
    )
).save_pretrained("bert")
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer(3000), pad_token="<pad>", unk_token="<unk>", model_max_length=128
).save_pretrained("bert")
model = SentenceTransformer(modules=[(t := models.Transformer("bert")), models.Pooling(128)])


def text():
    return " ".join(f"w{random.randrange(4, 3000)}" for _ in range(random.randint(5, 100)))


pairs = Dataset.from_dict({name: [text() for _ in range(1024)] for name in ("anchor", "positive")})
SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="sentences", per_device_train_batch_size=args.batch_size, report_to=[]
    ),
    train_dataset=pairs,
    loss=losses.MultipleNegativesRankingLoss(model),
).train()
