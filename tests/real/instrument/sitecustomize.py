"""Counts what a bare run on the CPU does until its second optimizer step, and ends it there.

Independent of trainfit: PyTorch's own hooks of modules and optimizers. Python imports it of
itself where this folder is on PYTHONPATH; ``BARE_RUN`` names the file that it writes.
"""

import json
import os
import sys

STEPS = 2


def _cpu_seconds():
    """CPU time of this process and all below it, of those that ended too."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for each in (me, *me.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Counter:
    """Elements and bytes of models and optimizers, and the batches that the models were given."""

    def __init__(self, path):
        self.path, self.depth, self.waiting = path, 0, False
        self.models, self.optimizers = {}, {}
        self.steps, self.gradients = {}, {}
        self.calls = []

    def called(self, module, args):
        """A module's call starts: the outermost is a model, the first leaf has its batch."""
        if self.depth == 0:
            _let_nms_pass()
            self.models[id(module)] = module
            self.waiting = True
        self.depth += 1
        tensors = [each for each in args if hasattr(each, "shape") and len(each.shape)]
        if self.waiting and tensors and not list(module.children()):
            self.calls.append(int(tensors[0].shape[0]))
            self.waiting = False

    def returned(self, _module, _args, _result):
        """A module's call ends (also by an exception)."""
        self.depth = max(0, self.depth - 1)

    def before_step(self, optimizer, _args, _kwargs):
        """Gradients are all there right before a step."""
        self.gradients[id(optimizer)] = sum(
            p.grad.numel() * p.grad.element_size()
            for p in _held([optimizer]).values()
            if p.grad is not None
        )

    def stepped(self, optimizer, _args, _kwargs):
        """After an optimizer's second step, write and leave."""
        self.optimizers[id(optimizer)] = optimizer
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        if self.steps[id(optimizer)] == STEPS:
            self.write()
            os._exit(0)
        if len(self.optimizers) == 1:
            self.calls.clear()

    def write(self):
        """One JSON document."""
        import torch

        owned = {id(p): p for model in self.models.values() for p in model.parameters()}
        state = [
            value
            for optimizer in self.optimizers.values()
            for entry in optimizer.state.values()
            for name, value in (entry.items() if isinstance(entry, dict) else ())
            if torch.is_tensor(value) and name != "step"
        ]
        found = {
            "parameters": sum(p.numel() for p in owned.values()),
            "trained": sum(p.numel() for p in _held(self.optimizers.values()).values()),
            "gradient_bytes": sum(self.gradients.values()),
            "state_bytes": sum(t.numel() * t.element_size() for t in state),
            "optimizers": sorted(type(each).__name__ for each in self.optimizers.values()),
            "calls": self.calls[:64],
            "steps": max(self.steps.values(), default=0),
            "cpu_s": _cpu_seconds(),
        }
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(found, file)


def _held(optimizers):
    return {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}


def _serve_torchvision():
    """Where torchvision's extension cannot load (a CUDA wheel next to a CPU build of PyTorch):
    the schemas that its import needs, and a non-maximum suppression in Python."""
    import importlib.util
    from pathlib import Path

    import torch

    spec = importlib.util.find_spec("torchvision")
    try:
        for file in Path(spec.origin).parent.glob("_C*.so") if spec else ():
            torch.ops.load_library(file)
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", _nms, "CPU")
        _libraries.append(library)


_libraries = []


def _nms(boxes, scores, threshold):
    """Indices of the boxes that stay, by falling score."""
    import torch
    from torchvision.ops import box_iou

    order, kept = scores.argsort(descending=True), []
    while order.numel():
        kept.append(order[0])
        overlap = box_iou(boxes[order[:1]], boxes[order[1:]])[0]
        order = order[1:][overlap <= threshold]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.long)


def _let_nms_pass():
    """torchvision asks whether its extension is there before it calls the operator."""
    boxes = sys.modules.get("torchvision.ops.boxes")
    if _libraries and boxes is not None:
        boxes._assert_has_ops = lambda: None


def _install(path):
    import atexit

    from torch.nn.modules import module
    from torch.optim import optimizer

    _serve_torchvision()
    counter = Counter(path)
    module.register_module_forward_pre_hook(counter.called)
    module.register_module_forward_hook(counter.returned, always_call=True)
    optimizer.register_optimizer_step_pre_hook(counter.before_step)
    optimizer.register_optimizer_step_post_hook(counter.stepped)
    # A script without an optimizer ends by itself; forked workers do not write.
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and counter.models and counter.write())


if os.environ.get("BARE_RUN") and not any("multiprocessing" in word for word in sys.argv):
    _install(os.environ["BARE_RUN"])
