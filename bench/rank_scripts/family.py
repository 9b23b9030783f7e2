"""A small training of one of ten families, by plain DDP, Accelerate or Lightning.

family.py FAMILY torchrun|accelerate|lightning [GPUS]
"""

import os
import sys

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

BATCH, STEPS = 4, 100


def conv(a, b, stride=1):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
    )


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = conv(3, 64, 2), nn.Linear(512, 10)
        pairs = [(64, 64), (64, 128), (128, 256), (256, 512)]
        self.stages = nn.ModuleList(nn.Sequential(conv(a, b, 2), conv(b, b)) for a, b in pairs)
        self.skips = nn.ModuleList(nn.Conv2d(a, b, 1, 2) for a, b in pairs)

    def forward(self, x):
        x = self.stem(x)
        for stage, skip in zip(self.stages, self.skips, strict=True):
            x = stage(x) + skip(x)
        return self.head(x.mean((2, 3))).square().mean()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(conv(a, b, 2) for a, b in ((3, 64), (64, 128), (128, 256)))
        self.up = nn.ModuleList(conv(a, b) for a, b in ((256, 128), (256, 64), (128, 3)))

    def forward(self, x):
        seen = []
        for each in self.down:
            x = each(x)
            seen.append(x)
        x = seen.pop()
        for each in self.up:
            x = nn.functional.interpolate(each(x), scale_factor=2)
            x = torch.cat([x, seen.pop()], 1) if seen else x
        return x.square().mean()


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(2000, 256), nn.Linear(256, 2000)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True)

    def forward(self, x):
        found = self.head(self.lstm(self.words(x))[0])
        return nn.functional.cross_entropy(found.flatten(0, 1), x.flatten())


class Ranking(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(5000, 64, mode="sum") for _ in range(8))
        self.top = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, x):
        return self.top(torch.cat([table(x) for table in self.tables], 1)).square().mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.words, self.body = nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4)

    def forward(self, x):
        return self.body(self.words(x)).square().mean()


class Library(nn.Module):
    """A model of Transformers, with its loss."""

    def __init__(self, name, head, **sizes):
        super().__init__()
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        self.inner, self.name = getattr(transformers, f"{name}{head}")(config), name

    def forward(self, x):
        if self.name == "ViT":
            return self.inner(x)[0].square().mean()
        return self.inner(input_ids=x, labels=x)[0]


def picture():
    return torch.randn(3, 64, 64)


def tokens():
    return torch.randint(0, 1000, (64,))


SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 512}
FAMILIES = {
    "resnet": (ResNet, picture),
    "unet": (UNet, picture),
    "lstm": (Lstm, tokens),
    "ranking": (Ranking, tokens),
    "encoder": (Encoder, tokens),
    "gpt2": (
        lambda: Library("GPT2", "LMHeadModel", n_embd=256, n_layer=4, n_head=4, vocab_size=1000),
        tokens,
    ),
    "bert": (lambda: Library("Bert", "ForMaskedLM", vocab_size=1000, **SMALL), tokens),
    "t5": (
        lambda: Library(
            *("T5", "ForConditionalGeneration"),
            vocab_size=1000,
            d_model=256,
            d_ff=512,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        tokens,
    ),
    "vit": (
        lambda: Library("ViT", "ForImageClassification", image_size=64, patch_size=8, **SMALL),
        picture,
    ),
    "llama": (lambda: Library("Llama", "ForCausalLM", vocab_size=1000, **SMALL), tokens),
}


class Data(torch.utils.data.Dataset):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 8 * BATCH * STEPS

    def __getitem__(self, index):
        return self.sample()


def by_ddp(model, data):
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    model, sampler = model.cuda(), None
    if ranks > 1:
        distributed.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in DataLoader(data, BATCH, sampler=sampler):
        optimizer.zero_grad()
        model(batch.cuda()).backward()
        optimizer.step()


def by_accelerate(model, data):
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH))
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch))
        optimizer.step()


def by_lightning(model, data, gpus):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    own = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="gpu", devices=gpus, max_epochs=1, **own)
    trainer.fit(Module(), DataLoader(data, BATCH))


if __name__ == "__main__":
    family, launcher, *rest = sys.argv[1:]
    make, sample = FAMILIES[family]
    if launcher == "lightning":
        by_lightning(make(), Data(sample), int(rest[0]))
    else:
        {"torchrun": by_ddp, "accelerate": by_accelerate}[launcher](make(), Data(sample))
