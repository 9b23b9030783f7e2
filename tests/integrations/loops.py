"""A small training by the loop of a framework with trainfit's adapter; prints what came of it.

python loops.py LOOP FOLDER [--raise]
"""

import argparse
import atexit
import copy
import gc
import json
import os
import pickle
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

# Lightning and Transformers import torchvision, which does not load where it is of another PyTorch.
define_torchvision_operators()
# At the end PyTorch is not taken apart, which takes longer than the training.
atexit.register(gc.freeze)
torch.set_num_threads(1)  # the machine has other work

WIDTH, SAMPLES, BATCH, EPOCHS = 16, 240, 8, 2
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def network():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Linear(32, 2))


def data():
    return TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(0, 2, (SAMPLES,)))


def loss_of(model, inputs, labels, fails=False):
    if fails:
        raise ValueError("the user's own error")
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def lightning(namespace, folder, fails):
    if namespace == "pytorch_lightning":
        import pytorch_lightning as pl
        from pytorch_lightning.loggers.logger import Logger
    else:
        import lightning.pytorch as pl
        from lightning.pytorch.loggers.logger import Logger

    from trainfit.integrations import LightningCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()

        def training_step(self, batch, number):
            return loss_of(self.model, *batch, fails and number == 25)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    class Kept(Logger):
        logged = ()
        name = version = "kept"

        def log_metrics(self, metrics, step=None):
            self.logged = (*self.logged, (step, dict(metrics)))

        def log_hyperparams(self, *_, **__):
            pass

    logger, callback = Kept(), LightningCallback()
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=RANKS, logger=logger, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=callback,
    )  # fmt: skip
    copied = copy.deepcopy(trainer)
    assert type(copied.callbacks[0]) is LightningCallback
    again = pickle.loads(pickle.dumps(callback))
    assert type(again) is LightningCallback and isinstance(again, pl.Callback)
    loader = DataLoader(data(), BATCH, shuffle=True)
    caught = ""
    try:
        trainer.fit(Module(), loader)
    except ValueError as error:
        caught = str(error)
    # Not the callback itself: Lightning has bound the module's `log` to it, as to any other.
    assert pickle.loads(pickle.dumps(callback.training)).result == callback.training.result
    ours = [each for each in logger.logged if any("trainfit/" in key for key in each[1])]
    tell(callback.training, ours, caught)
    trainer.fit_loop.epoch_progress.reset()  # train once more
    fails = False
    trainer.fit(Module(), loader)
    tell(callback.training, [], "")


def transformers(_, folder, fails):
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )  # fmt: skip

    from trainfit.integrations import TransformersCallback

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.body = network()
            self.calls = 0
            self.post_init()

        def forward(self, inputs=None, labels=None):
            self.calls += 1
            return {"loss": loss_of(self.body, inputs, labels, fails and self.calls == 25)}

    class Reporter(TrainerCallback):
        """As those that Transformers has: its run is closed at the end of the training."""

        logged = ()
        is_open = False

        def on_train_begin(self, args, state, control, **_):
            self.is_open = True

        def on_train_end(self, args, state, control, **_):
            self.is_open = False

        def on_log(self, args, state, control, logs=None, **_):
            if any("trainfit/" in key for key in logs):
                assert self.is_open
                self.logged = (*self.logged, (state.global_step, dict(logs)))

    samples = [{"inputs": inputs, "labels": label} for inputs, label in data()]
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    reporter = Reporter()
    trainer = Trainer(
        Model(PretrainedConfig()), arguments, train_dataset=samples, callbacks=[reporter]
    )
    callback = TransformersCallback(trainer)
    trainer.add_callback(callback)
    assert type(copy.deepcopy(TransformersCallback())) is TransformersCallback
    caught = ""
    try:
        trainer.train()
    except ValueError as error:
        caught = str(error)
    assert pickle.loads(pickle.dumps(callback.training)).result == callback.training.result
    told = [each for each in trainer.state.log_history if "trainfit/step_ms" in each]
    assert len(told) == len(reporter.logged)
    tell(callback.training, reporter.logged, caught)
    fails = False
    trainer.train()
    tell(callback.training, [], "")


def accelerate(_, folder, fails):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from trainfit.integrations import AccelerateTracker

    class Kept(GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None
        main_process_only = True

        def __init__(self):
            super().__init__()
            self.logged, self.is_open = [], True

        def log(self, values, step=None, **_):
            assert self.is_open
            self.logged.append((step, dict(values)))

        def finish(self):
            self.is_open = False

    tracker, kept = AccelerateTracker(), Kept()
    accelerator = Accelerator(cpu=True, log_with=[tracker, kept])
    tracker.accelerator = accelerator
    accelerator.init_trackers("project")
    assert accelerator.get_tracker("trainfit", unwrap=True) is tracker.training
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data(), BATCH, shuffle=True)
    )
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            accelerator.backward(loss_of(model, inputs, labels))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.log({"loss": 1.0})
    assert type(copy.deepcopy(tracker.training)) is type(tracker.training)
    accelerator.end_training()
    tell(tracker.training, [each for each in kept.logged if "loss" not in each[1]], "")


def tell(training, logged, caught):
    result = training.result
    document = {
        "steps": None if result is None else result.steps,
        "folder": None if result is None else result.folder,
        "metrics": {} if result is None else result.metrics(),
        "logged": list(logged),
        "caught": caught,
    }
    sys.stdout.write(f"told: {json.dumps(document)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("loop")
    parser.add_argument("folder")
    parser.add_argument("--raise", dest="fails", action="store_true")
    options = parser.parse_args()
    loops = {
        "lightning.pytorch": lightning, "pytorch_lightning": lightning,
        "transformers": transformers, "accelerate": accelerate,
    }  # fmt: skip
    loops[options.loop](options.loop, options.folder, options.fails)
    sys.exit(0)
