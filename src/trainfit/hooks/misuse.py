"""Sees calls, layers and terms of a loss without the effect that they are meant to have.

Each is certain from objects and shapes alone, or told as likely; no value is read.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, Final

import torch
from torch.nn import functional

from trainfit.hooks.batches import TrainingBatches, is_own
from trainfit.hooks.graphs import BackwardGraphs, Profiling, ScaledLosses, SecondOrder, keeps_result
from trainfit.hooks.loaders import Loaders
from trainfit.hooks.losses import shape_of
from trainfit.hooks.modes import Bystanders
from trainfit.hooks.optimizer_looks import FIRST_LOOKS
from trainfit.hooks.owners import tensors_of
from trainfit.hooks.provenance.averages import Averages
from trainfit.hooks.provenance.copies import HostCopies, UndoneCasts
from trainfit.hooks.provenance.cuts import (
    OF_TERM,
    Cut,
    Lost,
    Marks,
    cut_in,
    follow,
    name_of,
    steps_back,
    tensors_among,
)
from trainfit.hooks.provenance.gradients import HandMadeLimits, MixedPasses
from trainfit.hooks.provenance.inputs import Inputs, SameInputs
from trainfit.hooks.provenance.masks import Masks, Misused
from trainfit.hooks.provenance.origins import TensorOrigins
from trainfit.hooks.provenance.outputs import (
    AttentionWeights,
    Outputs,
    Predictions,
    Scores,
    softmax_by_hand,
)
from trainfit.hooks.provenance.passes import Passes
from trainfit.hooks.provenance.policies import OF_SAMPLES, PolicyTerms, Samples, mark, trains_critic
from trainfit.hooks.provenance.sequences import Labels, Sequences
from trainfit.hooks.provenance.targets import DrawnSteps, Targets
from trainfit.hooks.provenance.terms import Terms
from trainfit.hooks.ranks import Averaging, gathered_at_once, goes_over_host
from trainfit.hooks.remade import (
    Grown,
    Hooked,
    Moved,
    Overwritten,
    Plateaus,
    Remade,
    Restored,
    twice,
)
from trainfit.hooks.structure import (
    Freezing,
    Repeats,
    Ties,
    forgetful_norms,
    frozen_norms,
    idle_checkpointing,
    large_rate,
    of_one_value,
    searches_in_vain,
    tied_in,
)
from trainfit.hooks.values import Stalled
from trainfit.results.runs.learning import WITHOUT_GRAPH, Misuse
from trainfit.simgpu.device.user_location import called_by_user
from trainfit.torch_private.autograd import nodes_of, operator_of, parameters_of
from trainfit.torch_private.modules import in_shards

#: Names that are told.
_NAMES: Final = 3
#: Nodes of loss functions that give one number for all samples.
_LOSSES: Final = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy")
#: Nodes whose derivative is 0 everywhere.
_FLAT: Final = {"Sign", "Sgn", "Round", "Floor", "Ceil", "Trunc"}
#: Steps that a graph goes back through, after which it is told: a tensor may be made once, before
#: all of them.
_STEPS_BACK: Final = 2
#: Passes over samples as if they were time steps, after which it is told.
_PASSES: Final = 2
#: Bytes of one-hot vectors, a whole number of 8 bytes for each class, that are worth a word.
_ONE_HOT: Final = 256 << 20
_WHOLE: Final = 8
#: A limit that leaves nothing of gradients, and calls with one that show it.
_NOTHING: Final = 1e-8
_CLIPS: Final = 3
#: Weights whose first values are remembered.
_INITIALIZED: Final = 64


class MisuseObserver:
    """Collects :class:`Misuse`; ``place`` gives the user's line that is running, ``steps`` how many
    the first of the optimizers has begun."""

    def __init__(self, place: Callable[[], str | None], steps: Callable[[], int]) -> None:
        self._place, self._steps = place, steps
        self._found: dict[str, Misuse] = {}
        self._cuts: Marks[Cut] = Marks()
        self._asks_without = False
        #: In which step tensors were made, and through how many steps their graph goes back.
        self._made: Marks[tuple[int, int]] = Marks()
        #: The iterator that gradients were clipped of last.
        self._clipped: Any = None
        #: Where gradients were first clipped by the norm of all of them (empty: not known).
        self._norm_at: str | None = None
        #: Calls that leave nothing of gradients, and others.
        self._to_nothing = self._to_something = 0
        #: Lines that gave all numbers of weights one value, by the weights' identity.
        self._initialized: dict[int, str | None] = {}
        #: An optimizer of such weights alone: how many, one's name, its units, and the line.
        self._constant: tuple[str, str, str, str | None] | None = None
        self._batch_sizes: set[int] = set()
        self.sequences = Sequences(place, self._batch_sizes)
        self._over_samples = 0
        #: Leaves that each backward pass so far reaches by flat nodes only: parameters by identity.
        self._flat: dict[int, Any] | None = None
        self._flat_by = ""
        self._repeats = Repeats()
        self._remade = Remade()
        self.batches = TrainingBatches(place)
        self.samples = Samples()
        self.graphs = BackwardGraphs()
        self.second_order = SecondOrder()
        self.scaled = ScaledLosses(place)
        self.loaders = Loaders(place)
        self.masks = Masks(place)
        self.outputs = Outputs(place)
        self.origins = TensorOrigins(place, steps)
        self.lost = Lost()
        #: Is a model that is in training mode being called?
        self._calls_for_training = False
        self.predictions = Predictions(place)
        self.weights = AttentionWeights()
        self.scores = Scores()
        self.terms = Terms(place)
        self.targets = Targets(place)
        self.inputs = Inputs(place)
        self.bystanders = Bystanders()
        self.restored = Restored(place)
        self.overwritten = Overwritten(place)
        self.plateaus = Plateaus(place)
        self.passes = Passes()
        self.labels = Labels(place)
        self.hooked = Hooked()
        self.averages = Averages(place)
        self.policies = PolicyTerms(place)
        self.same, self.moved = SameInputs(place), Moved(place, steps)
        self.host_copies, self.casts = HostCopies(place, steps), UndoneCasts(place, steps)
        self.mixed, self.drawn, self.averaging = MixedPasses(place), DrawnSteps(place), Averaging()
        self.limits = HandMadeLimits(place, lambda: self.scaled.are_gradients)
        self.ties, self.freezing, self.profiling = Ties(place), Freezing(), Profiling()
        self.grown, self.stalled = Grown(), Stalled()
        #: Has the first step begun, and are all steps looked at, or was that so at the last look?
        self._begun = self._is_early = False

    def found(self, names: Mapping[int, str]) -> tuple[Misuse, ...]:
        """What was seen; ``names`` are those of parameters, by identity."""
        of_batches = self.batches.found()
        at_padding = () if any(map(_is_padding, of_batches)) else self.labels.found()
        return (
            *self._found.values(), *of_batches, *at_padding, *self._of_precision(),
            *self.second_order.found(), *self.grown.found(), *self._stalled(names),
            *self.outputs.found(), *self.weights.found(), *self.scores.found(),
            *self.averages.found(), *self.masks.found(), *self.ties.found(), *self.freezing.found(),
            *self.hooked.found(), *self.policies.found(), *self.same.found(), *self.moved.found(),
            *self.host_copies.found(), *self.limits.found(), *self.lost.found(names),
            *self.drawn.found(), *self.casts.found(), *self.averaging.found(), *self.mixed.found(),
            *self.loaders.found(self.batches.data), *self.terms.found(), *self.passes.found(names),
            *self.targets.found(), *self.inputs.found(), *self.restored.found(),
            *self.overwritten.found(), *self.bystanders.found(trains=self._begun),
            *self.profiling.found(), *self.plateaus.found(self._steps(), self.batches.of_epoch),
            *self.predictions.found(), *self.sequences.found(), *self._without_slope(names),
        )  # fmt: skip

    def _of_precision(self) -> Iterator[Misuse]:
        yield from self.graphs.found("graph_grows" in self._found)
        yield from self.scaled.found()
        if self.graphs.is_whole:
            yield from self.scaled.in_vain()

    def _stalled(self, names: Mapping[int, str]) -> Iterator[Misuse]:
        """What holds at the last look, unless it is said already why nothing moves."""
        found = list(self.stalled.found(names, self._initialized))
        if "clipped_to_nothing" in self._found or self._flat:
            found = [each for each in found if each.kind == "weights_decayed"]
        elif self._constant and not {"units_alike", "weights_decayed"} & {it.kind for it in found}:
            found.append(Misuse.of("units_alike", *self._constant[:3], place=self._constant[3]))
        yield from found

    def _without_slope(self, names: Mapping[int, str]) -> Iterator[Misuse]:
        if leaves := self._flat or {}:
            known = [name for key, name in names.items() if key in leaves]
            flat = known + [shape_of(leaf) for key, leaf in leaves.items() if key not in names]
            yield Misuse.of("gradient_flat", self._flat_by, len(flat), *flat[:_NAMES])

    def _note(self, kind: str, *told: object, place: str | None = None) -> None:
        if kind not in self._found:
            at = self._place() if place is None else place
            self._found[kind] = Misuse.of(kind, *told, place=at)

    # -- what happens ----------------------------------------------------------------------------

    def computed(self, left: Any, right: Any, result: Any) -> None:
        """A sum, a difference or a product was computed."""
        self.drawn.computed(left, right, result)
        are_tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        node = getattr(result, "grad_fn", None)
        name = "" if node is None else node.name()
        if not are_tensors:
            graph = next((it for it in (left, right) if isinstance(it, torch.Tensor)), None)
            if graph is not None and graph.requires_grad and name.startswith("Mul"):
                self.policies.multiplied(graph, node)
            return
        if left.requires_grad == right.requires_grad:
            return
        graph, other = (left, right) if left.requires_grad else (right, left)
        if node is not None and name.startswith("Mul"):
            self.policies.multiplied(graph, node)
        if node is None or graph.dim():
            return
        if name.startswith("Mul") and other.numel() > 1:
            made = graph.grad_fn.name() if graph.grad_fn is not None else ""
            if made.startswith(_LOSSES):
                self._note("loss_averaged", shape_of(other))
        elif name.startswith(("Add", "Sub", "Rsub")) and not other.dim():
            cut = self._cuts.of(other)
            # What a library adds is as it means it: the density of a point in Pyro's ELBO.
            if cut is not None and not cut.is_meant and called_by_user():
                node.metadata[OF_TERM] = cut.operator, cut.place, self._place()

    def gave(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """A function of PyTorch gave a result."""
        self.predictions.gave(name := name_of(func), args, kwargs, result)
        if self._steps():
            self.averages.gave(name, args, result)
            self.limits.gave(name, args)
        if not isinstance(result, torch.Tensor):
            return
        if func is torch.Tensor.scatter_ and args[3:] == (1,):
            self.one_hot(args[0].shape, args[0].itemsize, args[0].is_cuda)
        if func is functional.pad and args[1:2] == ((0, 1),) and self.batches.follows(args[0]):
            self._note("shifted_twice")
        if name == "__deepcopy__":
            self.duplicating(args[0])
        given = tensors_among(args)
        if softmax_by_hand(given, result):
            self._note("softmax_by_hand")
        self.origins.gave(name, given, result)
        self.drawn.gave(name, args, result)
        self.casts.gave(name, args, result)
        self.outputs.gave(func, args, result)
        self.terms.gave(func, args, kwargs, result)
        self.labels.gave(func, args, result)
        self.sequences.gave(name, args, kwargs, result)
        self.same.gave(name, args, result)
        self.targets.gave(name, args, result)
        self.inputs.gave(name, args, result)
        self.masks.gave(func, args, kwargs, result)
        follow(self._cuts, func, given, result, self._place, self.lost)
        if not torch.is_grad_enabled():
            if self._calls_for_training:
                weights = [tensor for tensor in given if isinstance(tensor, torch.nn.Parameter)]
                self.lost.computed(filter(_is_trained, weights), self._place)
            return
        if steps_back(self._made, given, result, self._steps()) >= _STEPS_BACK:
            self._note("graph_grows")

    def one_hot(self, shape: Iterable[int], width: int, on_gpu: bool) -> None:
        """One-hot vectors are about to be made, of so many bytes for each class."""
        sizes = list(shape)
        nbytes = math.prod(sizes) * width
        if on_gpu and nbytes >= _ONE_HOT:
            self._note("one_hot", "×".join(map(str, sizes)), str(nbytes))

    def one_hot_of(self, classes: Any, number: Any) -> None:
        """``one_hot(classes, number)`` is called."""
        if isinstance(classes, torch.Tensor) and isinstance(number, int) and number > 0:
            self.one_hot((*classes.shape, number), _WHOLE, classes.is_cuda)

    def backward(self, root: Any, *, has_trained: bool = True) -> None:
        """A backward pass begins from a tensor."""
        node = getattr(root, "grad_fn", None)
        walked = functools.cache(lambda: nodes_of(node))
        self.graphs.begins(node, walked, self._steps(), self._place)
        if not has_trained:
            return
        if "term_cut_off" not in self._found and (cut := cut_in(node)) is not None:
            operator, cut_at, place = cut
            self._note("term_cut_off", operator, cut_at or "", place=place)
        self.batches.trained(node)
        nodes = walked()
        goes_back = functools.partial(self.origins.goes_back_to, root, OF_SAMPLES)
        self.samples.used(nodes or (), goes_back)
        everything = nodes or ()
        self.graphs.look(everything)
        self.scaled.backward(everything, self._place())
        self.terms.backward(node, everything)
        self.passes.backward(everything, self._place())
        self.inputs.backward(everything)
        self.weights.backward(everything)
        self.policies.backward(node)
        self.same.backward(everything)
        self.scores.backward()
        if self._repeats and "one_layer" not in self._found:
            again = self._repeats.stacked(everything)
            if again is not None:
                self._note("one_layer", again.name, str(again.times), place=again.place)
        if (place := trains_critic(node, everything)) is not None:
            self._note("advantage_with_graph", place=place)
        if (kept := keeps_result(everything)) is not None:
            self._note("result_on_context", *kept[:2], place=kept[2])
        self._look_at_flat(node, nodes)

    def _look_at_flat(self, node: Any, everything: Sequence[Any] | None) -> None:
        if self._flat is not None and not self._flat:
            return
        if everything is None:
            self._flat = {}
            return
        if self._flat is None:
            flat_by = [operator_of(each).lower() for each in everything if _is_flat(each)]
            if not flat_by:
                return
            self._flat, self._flat_by = _by_identity(everything), flat_by[-1]
        live = _by_identity(nodes_of(node, ends=_is_flat) or ())
        self._flat = {key: leaf for key, leaf in self._flat.items() if key not in live}

    def stepping(self, optimizer: Any, place: str | None, *, unscaled: bool) -> None:
        """An optimizer that a line made is about to step, with gradients that a scaler unscaled."""
        self.second_order.stepping()
        self.averaging.stepping()
        self.policies.stepping(optimizer)
        self.limits.stepping(optimizer)
        self.mixed.stepping(optimizer)
        self.scaled.stepping(tensors_of(optimizer), unscaled=unscaled)
        self.weights.over()
        self.scores.over()
        self.passes.stepping(optimizer, place)
        if self._remade.steps(optimizer, place):
            self._note("optimizer_remade", type(optimizer).__name__, place=place)
        if (sampled := self.samples.step()) is not None:
            self._note("sample_without_graph", sampled[0], place=sampled[1])

    def begins(self, optimizer: Any, models: Sequence[Any], place: str | None) -> None:
        """An optimizer that a line made is about to make its first step; these were called."""
        self.grown.began(optimizer, models)
        self.passes.begins(optimizer)
        self.restored.begins(optimizer)
        self._begun = True
        self._is_early = self._steps() < FIRST_LOOKS
        self.freezing.first_pass(models)
        several, all_of_them = twice(optimizer)
        if several:
            self._note("parameters_twice", str(several), str(all_of_them), place=place or "")
        names = {id(it): name for model in models for name, it in model.named_parameters()}
        if (tied := tied_in(optimizer, names)) is not None:
            self._note("tie_lost", *tied, "steps", place=place or "")
        if self._constant is None:
            self._constant = of_one_value(optimizer, self._initialized, names)
        if (rate := large_rate(optimizer, names)) is not None:
            self._note("rate_large", type(optimizer).__name__, f"{rate:g}", place=place or "")

    def looked(self, steps: int) -> None:
        """A step that is looked at, of so many, is about to use its gradients."""
        self._is_early = steps <= FIRST_LOOKS
        self.profiling.look(steps)
        self.host_copies.looked()
        self.batches.looked(steps)

    def compares(self, target: Any, weight: Any, ignored: Any) -> None:
        """A loss over classes of these targets is called, without those that are ``ignored``."""
        self.batches.compares(target, ignored)
        self.labels.compares(target, weight, ignored)

    def hooking(self, handle: Any) -> None:
        """A hook was added to a module."""
        self.hooked.added(handle, self._steps(), self._place)

    def calling(
        self, module: Any, models: Callable[[], Iterable[Any]], optimizers: Iterable[Any]
    ) -> None:
        """An outermost module is about to be called; ``models`` gives those that were before,
        ``optimizers`` are all that were made."""
        self._calls_for_training = bool(module.training)
        self.graphs.calling()
        if self._is_early:
            self.averages.calling(module, self.passes.trained, models())
        if self._is_early or not self._begun:
            self.bystanders.calling(module, optimizers, self._place)

    def asking(self, *, with_graph: bool) -> None:
        """Gradients of chosen tensors are asked for (``torch.autograd.grad``)."""
        self.terms.derives |= with_graph
        self._asks_without = not with_graph and torch.is_grad_enabled()

    def answered(self, gradients: Any) -> None:
        """Gradients of chosen tensors are given."""
        if not self._asks_without or not isinstance(gradients, tuple):
            return
        cut = Cut(WITHOUT_GRAPH, self._place(), False)
        for each in gradients:
            if isinstance(each, torch.Tensor):
                self._cuts.put(each, cut)

    def reached(self, given: Any) -> None:
        """An outermost module is about to be called with these."""
        if self.batches.wants_given:
            self.batches.used(given, self._place)

    def autocasting(self, *, of_cpu: bool) -> None:
        """A region of autocast to 16 bits is about to begin."""
        (self.graphs.entered_for_cpu if of_cpu else self.graphs.entered)(self._place())

    def log_probabilities(self, result: Any) -> None:
        """A distribution gave log-probabilities."""
        mark(result, self._place())

    def sampled(self, distribution: Any) -> None:
        """``distribution.sample()`` is called."""
        self.samples.sampled(distribution, self._place)

    def listing(self, layers: Any) -> None:
        """A container of layers is about to be made."""
        self._repeats.made(layers, self._place)

    def loading(self, module: Any, state: Any) -> None:
        """``module.load_state_dict(state)`` is called."""
        if isinstance(state, Mapping) and state and is_own(module, state):
            self._note("own_state", type(module).__name__)

    def loaded(self, module: Any, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """A state that need not have all names was loaded: these it lacks, and has too many."""
        self.overwritten.loaded(module)
        self._initialized.clear()
        own = len(module.state_dict())
        if missing and unexpected and len(missing) >= own:
            told = type(module).__name__, str(len(unexpected)), missing[0], unexpected[0]
            self._note("state_not_loaded", *told)

    def initialized(self, weights: Any) -> None:
        """All numbers of weights are about to get one value."""
        self.overwritten.initialized(weights)
        if len(self._initialized) >= _INITIALIZED:
            return
        if isinstance(weights, torch.Tensor) and weights.dim() > 1:
            self._initialized[id(weights)] = self._place()

    def filled(self, weights: Any) -> None:
        """Weights are about to get numbers of their own."""
        self.overwritten.initialized(weights)
        self._initialized.pop(id(weights), None)

    def clipping(self, tensors: Any, limit: Any = None, by_norm: bool = True) -> None:
        """Gradients of ``tensors`` are about to be clipped, to a ``limit`` if it is known."""
        if by_norm and self._norm_at is None:
            self._norm_at = self._place() or ""
        if isinstance(limit, int | float):
            if limit > _NOTHING:
                self._to_something += 1
            else:
                self._to_nothing += 1
            if self._to_nothing >= _CLIPS and not self._to_something:
                self._note("clipped_to_nothing", f"{limit:g}")
        if not isinstance(tensors, Iterator):
            return
        is_over = isinstance(tensors, GeneratorType) and (
            inspect.getgeneratorstate(tensors) == inspect.GEN_CLOSED
        )
        if is_over or tensors is self._clipped:
            self._note("clips_nothing")
        self._clipped = tensors

    def activating(self, name: str, x: Any, dim: Any) -> None:
        """A softmax is about to be computed, over ``dim``; ``None``: none is given."""
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return
        if name == "softmax" and dim in (-1, x.dim() - 1) and not self.weights.is_inside:
            self.scores.computed(x, self._place)
        if dim is not None:
            return
        if x.dim() == 3 and x.shape[0] > 1:
            self._note("softmax_over_samples", name, shape_of(x))

    def iterated(self, loader: Any) -> None:
        """A DataLoader begins to be gone over."""
        self.batches.iterated(loader, self._place())
        self.loaders.iterated(loader)
        if isinstance(size := getattr(loader, "batch_size", None), int) and size > 1:
            self._batch_sizes.add(size)

    def duplicating(self, parameter: torch.nn.Parameter) -> None:
        """A parameter is about to be copied (copy.deepcopy)."""
        if self._begun and parameter.requires_grad:
            self.lost.copying(parameter, self._place())

    def pinning(self) -> None:
        """A tensor of the host is about to be pinned."""
        if self._begun and called_by_user():
            self.loaders.pins()

    def moving(self, module: Any) -> None:
        """A module is about to be moved."""
        self.ties.moving(module)
        self.moved.moving(module)

    def attending(self, module: Any, wants_weights: bool, *masks: Any) -> None:
        """An attention layer is about to be called with two masks."""
        self.weights.asks(module.num_heads, wanted=wants_weights)
        self._note_mask(type(module).__name__, self.masks.attention(*masks))

    def attends(self, mask: Any) -> None:
        """``scaled_dot_product_attention`` is about to be called with a mask."""
        self._note_mask("scaled_dot_product_attention", self.masks.attends(mask))

    def _note_mask(self, by: str, misused: Misused | None) -> None:
        if misused is not None:
            self._note("mask_misused", misused.how, misused.where, by, place=misused.place)

    def attended(self, result: Any) -> None:
        """An attention layer gave its output and its weights."""
        self.weights.gave(result, self._place())

    def recurring(self, module: Any, x: Any) -> None:
        """A recurrent layer, or attention to itself, is about to go over ``x``."""
        if module.batch_first or not module.training or not isinstance(x, torch.Tensor):
            return
        if x.dim() != 3 or not torch.is_grad_enabled() or x.shape[0] not in self._batch_sizes:
            return
        if x.shape[1] < 2 or any(x.shape[1] % size == 0 for size in self._batch_sizes):
            return
        self._over_samples += 1
        if self._over_samples >= _PASSES:
            self._note("samples_as_steps", type(module).__name__, shape_of(x))

    def wrapped(self, wrappers: Mapping[Any, str | None], had: Mapping[int, bool]) -> None:
        """Optimizers gave these parameters a gradient, of models in these wrappers."""
        if (vain := searches_in_vain(wrappers, had)) is not None:
            self._note("search_in_vain", place=wrappers[vain] or "")
        if (slow := next(filter(goes_over_host, wrappers), None)) is not None:
            self._note("gloo_of_gpus", place=wrappers[slow] or "")

    def trained(self, models: Sequence[Any], had: Mapping[int, bool]) -> None:
        """Optimizers gave these parameters a gradient, by identity, in models that were called."""
        if (classes := self.batches.sorted_by_class()) is not None:
            self._note("sorted_by_class", *map(str, classes), place=self.batches.place)
        if self._norm_at is not None and any(map(in_shards, models)):
            self._note("norm_of_a_shard", place=self._norm_at)
        if (whole := gathered_at_once(models)) is not None:
            self._note("gathered_at_once", *map(str, whole), place="")
        self.passes.look_at_memory(models)
        if norms := forgetful_norms(models):
            name, momentum = norms[0]
            self._note("norm_forgets", str(len(norms)), name, f"{momentum:g}", place="")
        if norms_moving := frozen_norms(models, had, self.freezing.ever, self.averages.changed):
            self._note("norm_of_frozen", str(len(norms_moving)), norms_moving[0], place="")
        if (idle := idle_checkpointing(models, had)) is not None:
            self._note("checkpointing_idle", idle[0], str(idle[1]), place="")
        names = [
            (name or type(part).__name__, part)
            for model in models
            for name, part in model.named_modules()
            if vars(part).get("requires_grad") is False
        ]
        vain = [
            name for name, part in names if any(had.get(id(each)) for each in part.parameters())
        ]
        if vain and "freeze_ignored" not in self._found:
            told = str(len(vain)), *vain[:_NAMES]
            self._found["freeze_ignored"] = Misuse("freeze_ignored", told)


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter.requires_grad)


def _is_padding(misuse: Misuse) -> bool:
    return misuse.kind == "padding_learned"


def _is_flat(node: Any) -> bool:
    """A Function of the script's may have such a name, and a derivative of its own."""
    return operator_of(node) in _FLAT and not isinstance(node, torch.autograd.function.FunctionCtx)


def _by_identity(nodes: Iterable[Any]) -> dict[int, Any]:
    return {id(leaf): leaf for leaf in parameters_of(nodes)}
