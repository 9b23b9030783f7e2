"""Hooks that tell a :class:`LearningObserver` what a training does.

They change nothing and never raise: after an error of its own the observer is asked no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributions, profiler
from torch.amp import grad_scaler
from torch.autograd import profiler as older_profiler
from torch.distributions import kl
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler, swa_utils
from torch.optim import optimizer as optim
from torch.utils import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

from trainfit.hooks.batches import tensors_of_batch
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.losses import LOOKED_AT, OF_CLASSES
from trainfit.hooks.provenance.targets import OF_PAIRS
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.compiled import traces_original
from trainfit.torch_private.data_loading import LoaderIterator
from trainfit.torch_private.modules import autocast_is_on

_Tell = Callable[..., None]
#: What begins a schedule, those of other schedules as well.
_SCHEDULERS = lr_scheduler.LRScheduler, lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler
#: Those that take a dimension by themselves; layers that go over steps.
_SOFTMAX = "softmax", "log_softmax"
#: Distributions that are sampled with or without a graph.
_SAMPLED = distributions.Normal, distributions.LogNormal, distributions.MultivariateNormal
#: Those that policies have, too.
_POLICIES = *_SAMPLED, distributions.Categorical, distributions.Bernoulli, distributions.Beta
#: Functions of torch.nn.init that give all numbers of a tensor one value.
_ONE_VALUE = "constant_", "zeros_", "ones_"
#: … and others that fill it.
_FILL = (
    *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_"),
    *("kaiming_uniform_", "kaiming_normal_", "orthogonal_"),
)
#: Methods that add a hook to a module.
_ADD_HOOKS = (
    *("register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook"),
)
#: Modules that have ``random_split``.
_OF_DATA = torch.utils.data, torch.utils.data.dataset
_RECURRENT, _MOVES = (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU), ("to", "cuda", "cpu", "half")


def install(
    observer: LearningObserver,
    patches: PatchSet,
    on_arithmetic: Callable[[Callable[..., None]], None] = lambda _: None,
    on_view: Callable[[Callable[..., None]], None] = lambda _: None,
    on_result: Callable[[Callable[..., None]], None] = lambda _: None,
) -> None:
    """Hook from now on, until ``patches`` is restored.

    A simulated device tells what it is given by ``on_arithmetic`` of sums, differences and
    products, what by ``on_view`` of tensors and their views, what by ``on_result`` of functions and
    their results.
    """
    tell = _Careful(observer)
    scaler = grad_scaler.GradScaler
    hooks: tuple[tuple[Any, str, _Tell, bool], ...] = (
        (torch.autograd, "backward", _backward, False),
        (scaler, "unscale_", _of_scaler(LearningObserver.unscaled), False),
        (scaler, "step", _of_scaler(_steps_scaler), True),
        (scaler, "get_scale", _of_scaler(LearningObserver.reads_scale), True),
        (clip_grad, "clip_grad_norm_", _clipping, False),
        (clip_grad, "clip_grad_value_", _clipping_values, False),
        *((functional, name, functools.partial(_comparing, name), False) for name in LOOKED_AT),
        (functional, "kl_div", _diverging, False),
        (functional, "ctc_loss", _transcribing, False),
        *((functional, name, functools.partial(_pairing, name), False) for name in OF_PAIRS),
        (optim.Optimizer, "zero_grad", _zeroing, False),
        (swa_utils.AveragedModel, "update_parameters", _averaging, True),
        (swa_utils.AveragedModel, "forward", _averaged, True),
        (swa_utils, "update_bn", _renewing, True),
        (scaler, "update", _of_scaler(lambda it: it.misuse.scaled.updates()), False),
        (optim.Optimizer, "__init__", lambda it, owner, *_, **__: it.made(owner), True),
        (optim.Optimizer, "add_param_group", lambda it, of, *_, **__: it.grouped(of), True),
        *((torch.nn.init, name, _initializing, True) for name in _ONE_VALUE),
        *((torch.nn.init, name, _filling, True) for name in _FILL),
        (profiler.profile, "start", _profiling, True),
        (profiler.profile, "stop", lambda it, *_: it.misuse.profiling.ends(), True),
        (older_profiler.profile, "__enter__", _profiling, True),
        (older_profiler.profile, "__exit__", lambda it, *_: it.misuse.profiling.ends(), True),
        (torch.nn.Module, "zero_grad", _zeroing, False),
        (DataLoader, "__iter__", LearningObserver.iterated, True),
        (DataLoader, "__init__", _serving, True),
        *((functional, name, functools.partial(_activating, name), False) for name in _SOFTMAX),
        (functional, "scaled_dot_product_attention", _attends, False),
        (WeightedRandomSampler, "__init__", _sampling, True),
        (torch.Tensor, "pin_memory", _pinning, False),
        (torch.nn.Parameter, "__deepcopy__", _duplicating, False),
        (torch.nn.ModuleList, "__init__", _listing, True),
        (torch.nn.Sequential, "__init__", _chaining, True),
        (functional, "one_hot", _one_hot, False),
        (functional, "embedding", _embedding, False),
        (torch.autocast, "__enter__", _autocasting, False),
        (distributions.Categorical, "__init__", _drawing, False),
        *((kind, "sample", _sampled, False) for kind in _SAMPLED),
        *((kind, "rsample", _asked, False) for kind in _SAMPLED),
        *((module, "kl_divergence", _compared, False) for module in (distributions, kl)),
        (DistributedSampler, "set_epoch", lambda it, *_, **__: it.numbered(), True),
        (DistributedDataParallel, "__init__", _wrapped, True),
        (torch.nn.Module, "train", lambda it, model, mode=True: it.mode_set(model, mode), True),
        *((kind, "__init__", _scheduled, True) for kind in _SCHEDULERS),
        (lr_scheduler.ReduceLROnPlateau, "__init__", _waiting, True),
        (checkpoint, "check_backward_validity", LearningObserver.checkpointing, True),
    )
    for owner, name, told, always in hooks:
        patches.hook(owner, name, functools.partial(_around, tell, told, always))
    results: tuple[tuple[Any, str, _Tell, _Tell, bool], ...] = (
        (LoaderIterator, "__next__", LearningObserver.fed, _given, False),
        (torch.nn.Module, "load_state_dict", _loading, LearningObserver.loaded, True),
        *((torch.nn.Module, name, _moving, _moved, True) for name in _MOVES),
        (torch.Tensor, "cpu", _copying, _copied, False),
        (torch.nn.MultiheadAttention, "forward", _attending, _attended, False),
        *((kind, "forward", _recurring, _recurred, False) for kind in _RECURRENT),
        (optim.Optimizer, "load_state_dict", _restoring, _restored, True),
        (scaler, "scale", _scaling, _scaled, False),
        *((module, "random_split", _nothing, _parted, True) for module in _OF_DATA),
        (torch.autograd, "grad", _asking, lambda it, found: it.misuse.answered(found), True),
        *((torch.nn.Module, name, _nothing, _hooked, True) for name in _ADD_HOOKS),
        *((kind, "log_prob", _asked, _log_probabilities, False) for kind in _POLICIES),
    )
    for owner, name, told, gave_it, always in results:
        patches.hook(owner, name, functools.partial(_giving, tell, told, gave_it, always))

    def computed(*tensors: Any) -> None:
        if observer.awake:
            tell(_computed, *tensors)

    def viewed(*tensors: Any) -> None:
        if observer.awake:
            tell(LearningObserver.viewed, *tensors)

    def gave(*call: Any) -> None:
        if observer.awake:
            tell(_gave, *call)

    on_arithmetic(computed)
    on_view(viewed)
    on_result(gave)

    def stepping(optimizer: Any, *_: Any) -> None:
        if observer.awake:
            tell(_stepping, optimizer)

    def stepped(optimizer: Any, *_: Any) -> None:
        tell(LearningObserver.stepped if observer.awake else LearningObserver.passed, optimizer)

    patches.see_steps(stepping, stepped)


def _backward(
    observer: LearningObserver,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
    **_: Any,
) -> None:
    if inputs is not None:
        observer.chooses()
    observer.misuse.passes.is_chosen = inputs is not None
    observer.backward(tensors, with_graph=create_graph)


def _asking(
    observer: LearningObserver,
    outputs: Any = None,
    inputs: Any = None,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    *_: Any,
    **__: Any,
) -> None:
    observer.chooses()
    observer.misuse.asking(with_graph=create_graph)


def _clipping(
    observer: LearningObserver,
    parameters: Any = None,
    max_norm: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    observer.clipping(parameters, max_norm)


def _clipping_values(
    observer: LearningObserver, parameters: Any = None, clip_value: Any = None, *_: Any, **__: Any
) -> None:
    observer.clipping(parameters, clip_value, by_norm=False)


def _zeroing(observer: LearningObserver, owner: Any, *_: Any, **__: Any) -> None:
    observer.misuse.passes.zeroed(owner)
    observer.misuse.mixed.zeroed(owner)
    observer.zeroed(owner)


def _averaging(observer: LearningObserver, model: Any, *_: Any, **__: Any) -> None:
    observer.misuse.averages.averaged(model)


def _averaged(observer: LearningObserver, model: Any, *_: Any, **__: Any) -> None:
    observer.misuse.averages.evaluates(model)


def _renewing(
    observer: LearningObserver, loader: Any = None, model: Any = None, *_: Any, **__: Any
) -> None:
    observer.misuse.averages.renewed(model)


def _steps_scaler(observer: LearningObserver) -> None:
    observer.steps_scaler()
    observer.misuse.scaled.steps()


def _drawing(observer: LearningObserver, _: Any, probs: Any = None, *__: Any, **___: Any) -> None:
    observer.misuse.predictions.drawing(probs)


def _initializing(observer: LearningObserver, tensor: Any = None, *_: Any, **__: Any) -> None:
    observer.misuse.initialized(tensor)


def _filling(observer: LearningObserver, tensor: Any = None, *_: Any, **__: Any) -> None:
    observer.misuse.filled(tensor)


def _profiling(observer: LearningObserver, it: Any) -> None:
    observer.profiling(it)


def _computed(observer: LearningObserver, left: Any, right: Any, result: Any) -> None:
    observer.misuse.terms.wraps(left, right, result)
    observer.computed(left, right, result)


def _gave(observer: LearningObserver, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    if func is torch.Tensor.__setitem__:
        observer.misuse.origins.assigns(args[0])
    elif not any(map(is_lazy, (result, *args))):  # which has neither numbers nor a shape yet
        observer.misuse.gave(func, args, kwargs or {}, result)


def _activating(
    name: str, observer: LearningObserver, input: Any = None, dim: Any = None, *_: Any, **__: Any
) -> None:
    observer.misuse.activating(name, input, dim)


def _recurring(
    observer: LearningObserver, module: Any, input: Any = None, *_: Any, **__: Any
) -> None:
    observer.misuse.recurring(module, input)
    observer.misuse.inputs.recurs(module)
    observer.misuse.sequences.recurs(module, input)
    observer.misuse.targets.recurs(module, input)


def _recurred(observer: LearningObserver, result: Any) -> None:
    observer.misuse.inputs.recurred(result)
    observer.misuse.sequences.recurred(result)


def _attending(
    observer: LearningObserver,
    module: Any,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> None:
    if query is key:
        observer.misuse.recurring(module, query)
    observer.misuse.attending(module, need_weights, attn_mask, key_padding_mask)
    observer.misuse.targets.attends(query, key, attn_mask, is_causal=is_causal)
    is_masked = attn_mask is not None or key_padding_mask is not None or is_causal
    observer.misuse.sequences.attends(
        query, key, is_masked=is_masked, batch_first=module.batch_first
    )


def _attended(observer: LearningObserver, result: Any) -> None:
    observer.misuse.attended(result)


def _attends(
    observer: LearningObserver,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> None:
    observer.misuse.attends(attn_mask)
    observer.misuse.targets.attends(query, key, attn_mask, is_causal=is_causal)
    is_masked = attn_mask is not None or is_causal
    observer.misuse.sequences.attends(query, key, is_masked=is_masked, batch_first=True)


def _sampling(observer: LearningObserver, sampler: Any, *_: Any, **__: Any) -> None:
    observer.misuse.loaders.sampling(sampler)


def _pinning(observer: LearningObserver, *_: Any, **__: Any) -> None:
    observer.misuse.pinning()


def _serving(
    observer: LearningObserver, loader: Any, dataset: Any = None, *_: Any, **__: Any
) -> None:
    observer.misuse.loaders.made(dataset)


def _parted(observer: LearningObserver, parts: Any) -> None:
    observer.misuse.loaders.parted(parts)


def _moving(observer: LearningObserver, module: Any, *_: Any, **__: Any) -> None:
    observer.misuse.moving(module)


def _moved(observer: LearningObserver, _: Any) -> None:
    observer.misuse.ties.moved()
    observer.misuse.moved.moved()


def _copying(observer: LearningObserver, tensor: Any, *_: Any, **__: Any) -> None:
    observer.misuse.host_copies.copying(tensor)


def _copied(observer: LearningObserver, copy: Any) -> None:
    observer.misuse.host_copies.copied(copy)


def _duplicating(observer: LearningObserver, parameter: Any, *_: Any) -> None:
    observer.misuse.duplicating(parameter)


def _nothing(observer: LearningObserver, *_: Any, **__: Any) -> None: ...


def _hooked(observer: LearningObserver, handle: Any) -> None:
    observer.misuse.hooking(handle)


def _scaling(observer: LearningObserver, scaler: Any, *_: Any, **__: Any) -> None:
    observer.misuse.scaled.is_enabled = scaler.is_enabled()
    if scaler.is_enabled():
        observer.scaled()


def _scaled(observer: LearningObserver, losses: Any) -> None:
    observer.misuse.scaled.scaled(losses)


def _loading(
    observer: LearningObserver, module: Any, state_dict: Any = None, *_: Any, **__: Any
) -> None:
    observer.loading(module, state_dict)


def _embedding(
    observer: LearningObserver,
    input: Any = None,
    weight: Any = None,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False,
    sparse: Any = False,
) -> None:
    observer.misuse.batches.embedded(input)
    observer.misuse.labels.embedded(input, padding_idx)
    observer.misuse.inputs.embedded(input, weight, is_sparse=bool(sparse))
    observer.misuse.sequences.embedded(padding_idx)
    if max_norm is not None:
        observer.misuse.origins.renorms(weight)


def _autocasting(observer: LearningObserver, region: Any, *_: Any) -> None:
    is_half = region.fast_dtype in (torch.float16, torch.bfloat16)
    if is_half and region.device in ("cuda", "cpu") and autocast_is_on(region):
        observer.misuse.autocasting(of_cpu=region.device == "cpu")


def _sampled(observer: LearningObserver, distribution: Any, *_: Any, **__: Any) -> None:
    observer.misuse.sampled(distribution)


def _asked(observer: LearningObserver, distribution: Any, *_: Any, **__: Any) -> None:
    observer.misuse.samples.asked(distribution)


def _compared(observer: LearningObserver, p: Any = None, q: Any = None) -> None:
    observer.misuse.samples.compared(p, q)


def _giving(
    tell: _Careful, told: _Tell, gave: _Tell, always: bool, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Around what gives something that is looked at, too: the next batch, log-probabilities."""
    observer = tell.observer

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        if not (always or observer.awake):
            return original(*args, **kwargs)
        tell(told, *args, **kwargs)
        result = original(*args, **kwargs)
        tell(gave, result)
        return result

    traces_original(hook, original)
    return hook


def _log_probabilities(observer: LearningObserver, result: Any) -> None:
    observer.misuse.log_probabilities(result)


def _restoring(observer: LearningObserver, optimizer: Any, *_: Any, **__: Any) -> None:
    observer.misuse.restored.loading(optimizer)


def _restored(observer: LearningObserver, _: Any) -> None:
    observer.misuse.restored.loaded()


def _given(observer: LearningObserver, batch: Any) -> None:
    observer.misuse.batches.given(batch)
    tensors = list(tensors_of_batch(batch))
    misuse = observer.misuse
    for room in (misuse.labels, misuse.targets, misuse.inputs, misuse.same, misuse.masks):
        room.given(tensors)
    observer.misuse.loaders.given(batch)


def _listing(
    observer: LearningObserver, container: Any, modules: Any = None, *_: Any, **__: Any
) -> None:
    observer.misuse.listing(modules)


def _chaining(observer: LearningObserver, container: Any, *modules: Any, **__: Any) -> None:
    observer.misuse.listing(modules)


def _one_hot(
    observer: LearningObserver, tensor: Any = None, num_classes: Any = -1, *_: Any, **__: Any
) -> None:
    observer.misuse.one_hot_of(tensor, num_classes)


def _comparing(
    name: str,
    observer: LearningObserver,
    input: Any = None,
    target: Any = None,
    weight: Any = None,
    *_: Any,
    ignore_index: Any = -100,
    reduction: Any = "mean",
    **__: Any,
) -> None:
    observer.comparing(name, input, target)
    observer.misuse.terms.comparing(name, input, target)
    observer.misuse.predictions.comparing(name, input)
    averages = reduction == "mean"
    observer.misuse.targets.comparing(name, input, target, ignore_index, averages=averages)
    if reduction != "none" and weight is None:  # what is left out may have any number
        observer.misuse.targets.probable(name, input, target)
    if name in OF_CLASSES and reduction != "none":  # a mask may come after it
        observer.misuse.compares(target, weight, ignore_index)


def _diverging(
    observer: LearningObserver,
    input: Any = None,
    target: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
    log_target: Any = False,
) -> None:
    observer.misuse.terms.diverging(target, log_target)
    observer.misuse.targets.diverging(input, averages=reduction == "mean" and reduce is None)


def _transcribing(
    observer: LearningObserver,
    log_probs: Any = None,
    targets: Any = None,
    input_lengths: Any = None,
    target_lengths: Any = None,
    blank: Any = 0,
    reduction: Any = "mean",
    zero_infinity: Any = False,
) -> None:
    observer.misuse.terms.transcribing(input_lengths, target_lengths, zero_infinity)
    observer.misuse.targets.transcribing(targets, target_lengths, blank)


def _pairing(name: str, observer: LearningObserver, *given: Any, **named: Any) -> None:
    """A loss of pairs, or of one sign for each sample: its targets are last of its tensors."""
    tensors = [tensor for tensor in (*given, *named.values()) if isinstance(tensor, torch.Tensor)]
    if tensors:
        observer.misuse.targets.pairing(name, named.get("target", tensors[-1]))


def _wrapped(observer: LearningObserver, wrapper: Any, *_: Any, **__: Any) -> None:
    observer.wrapped(wrapper)


def _scheduled(observer: LearningObserver, scheduler: Any, *_: Any, **__: Any) -> None:
    observer.scheduled(scheduler)


def _waiting(observer: LearningObserver, scheduler: Any, *_: Any, **__: Any) -> None:
    observer.misuse.plateaus.made(scheduler)


def _stepping(observer: LearningObserver, optimizer: Any) -> None:
    observer.misuse.origins.steps()
    observer.stepping(optimizer)


def _around(
    tell: _Careful, told: _Tell, always: bool, original: Callable[..., Any]
) -> Callable[..., Any]:
    observer = tell.observer

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        if always or observer.awake:
            tell(told, *args, **kwargs)
        return original(*args, **kwargs)

    if original.__name__ != "backward":  # torch.compile stops before that one in any case
        traces_original(hook, original)
    return hook


class _Careful:
    """Calls an observer until it fails once."""

    def __init__(self, observer: LearningObserver) -> None:
        self.observer = observer
        self._live = True

    def __call__(self, told: _Tell, *args: Any, **kwargs: Any) -> None:
        if self._live and not torch.compiler.is_compiling():
            try:
                told(self.observer, *args, **kwargs)
            except Exception:
                self._live = False


def _of_scaler(told: Callable[[LearningObserver], None]) -> _Tell:
    def tell(observer: LearningObserver, scaler: Any, *_: Any, **__: Any) -> None:
        if scaler.is_enabled():
            told(observer)

    return tell
