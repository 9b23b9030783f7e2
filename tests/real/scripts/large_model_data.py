"""What the families of large models are given: small models in folders, a tokenizer, texts."""

import csv
import json
import random
import sys
from pathlib import Path

folder, kind = Path(sys.argv[1]), sys.argv[2]

from llama_data import text, words  # noqa: E402  (makes the small Llama, its tokenizer, texts)


def table(name, columns, make, count):
    with (folder / name).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(make() for _ in range(count))


METRIC = """
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        kinds = {{name: datasets.Value("{kind}") for name in ("predictions", "references")}}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(kinds)
        )

    def _compute(self, predictions, references, **_):
        same = sum(one == other for one, other in zip(predictions, references))
        return {{"{name}": same / max(1, len(predictions))}}
"""


def metric(name, kind):
    """In the place of what evaluate.load() would download: the working folder comes first."""
    Path(name).mkdir()
    Path(name, f"{name}.py").write_text(METRIC.format(name=name, kind=kind))


def save(model, name="small"):
    model.save_pretrained(folder / name)
    words.save_pretrained(folder / name)


if kind == "clm":
    metric("accuracy", "int32")
    lines = "\n".join(text(40, 80) for _ in range(600))
    (folder / "train.txt").write_text(lines)
    (folder / "eval.txt").write_text(lines[: len(lines) // 10])
elif kind == "glue":
    metric("accuracy", "int32")
    from transformers import BertConfig, BertForSequenceClassification

    save(
        BertForSequenceClassification(
            BertConfig(
                vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=512,
            )
        )
    )  # fmt: skip
    for name, count in (("train.csv", 512), ("eval.csv", 64)):
        table(name, ("sentence1", "label"), lambda: (text(8, 40), random.randrange(2)), count)
elif kind == "summarization":
    metric("rouge", "string")
    # What splits sentences is looked for before a training, and used in its evaluation.
    for name in ("punkt", "punkt_tab"):
        (Path.home() / "nltk_data" / "tokenizers" / name / "english").mkdir(parents=True)
    from transformers import T5Config, T5ForConditionalGeneration

    save(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=2000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4,
                decoder_start_token_id=0,
            )
        )
    )  # fmt: skip
    for name, count in (("train.csv", 512), ("eval.csv", 64)):
        table(name, ("text", "summary"), lambda: (text(40, 120), text(8, 20)), count)
elif kind == "alpaca":
    rows = [{"instruction": text(8, 20), "input": "", "output": text(8, 40)} for _ in range(512)]
    (folder / "alpaca.json").write_text(json.dumps(rows))
    named = {"alpaca": {"file_name": "alpaca.json"}}
    (folder / "dataset_info.json").write_text(json.dumps(named))
elif kind == "litgpt":
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    config = Config(
        name="small", block_size=256, vocab_size=2000, padded_vocab_size=2000, n_layer=4, n_head=4,
        n_query_groups=2, n_embd=128, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=352,
    )  # fmt: skip
    place = folder / "litgpt"
    words.save_pretrained(place)
    torch.save(GPT(config).state_dict(), place / "lit_model.pth")
    save_config(config, place)
    rows = [{"instruction": text(8, 20), "output": text(8, 40)} for _ in range(512)]
    (folder / "train.json").write_text(json.dumps(rows))
elif kind == "torchtune":
    import sentencepiece

    (folder / "words.txt").write_text("\n".join(text(40, 80) for _ in range(600)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "pieces"), vocab_size=500,
        hard_vocab_limit=False,
    )  # fmt: skip
    rows = [{"instruction": text(8, 20), "input": "", "output": text(8, 40)} for _ in range(512)]
    (folder / "alpaca.json").write_text(json.dumps(rows))
    (folder / "lora.yaml").write_text(
        (Path(__file__).parent / "torchtune_lora.yaml").read_text().replace("DATA", str(folder))
    )
