"""Watches a training for what spoils its learning, at little cost and without reading a value
of a GPU.

Whoever installs the hooks of a run (simulated, watched) tells it what happens; it looks at the
first steps of each optimizer, and then now and then.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from trainfit.hooks.batches import Restarts
from trainfit.hooks.losses import (
    Leaf,
    LossScale,
    broadcast_in,
    classes_by_view,
    common,
    has_graph,
    has_no_graph,
    is_lost,
    leaves_of,
    mark_broadcast,
    misfit,
    scale_of_loss,
    shape_of,
)
from trainfit.hooks.misuse import MisuseObserver
from trainfit.hooks.modes import SwitchedModes
from trainfit.hooks.optimizer_looks import (
    FIRST_LOOKS,
    Accumulated,
    ObservedOptimizer,
    has_no_gradients,
    kept_of,
    of_trained,
    steps_at_zero,
    vanished_rate,
    where_most,
)
from trainfit.hooks.owners import (
    Gradients,
    in_modules,
    names_of,
    untrained,
    unused_gradients,
    without_gradients,
)
from trainfit.hooks.provenance.copies import seems_swapped
from trainfit.hooks.provenance.passes import reaches_inputs
from trainfit.hooks.ranks import EpochOrder, goes_over_all, passed_by, ranks
from trainfit.hooks.remade import of_schedules
from trainfit.hooks.schedules import (
    Schedule,
    made_for,
    schedule_end,
    schedule_fades,
    schedule_unused,
)
from trainfit.hooks.values import anomaly_at, denormals, loss_of, rooted_at, where_not_finite
from trainfit.results.runs.learning import LearningFacts, LossMisfit, Misuse
from trainfit.torch_private.autograd import nodes_of

#: Losses that are followed back, models that are known, names that are reported.
_LOSSES: Final = 8
#: Calls of models before the first step that are no trial of one.
_EARLY: Final = 4
_MODELS: Final = 4
_NAMES: Final = 3
#: Bytes of a model whose activations are hardly worth a word.
_SMALL: Final = 1 << 20
#: The look after which it is asked, once, whose tensors got no gradient.
_LOOK_AT_OWNERS: Final = 2
#: A limit that no gradient of a training that learns reaches: its norm is only measured.
_ONLY_MEASURED: Final = 1e4


class LearningObserver:
    """Collects :class:`LearningFacts`.

    Args:
        place: gives the user's line that is running, "file:line", or ``None``.
        counts_in_place: whether unscaling raises a tensor's version, as on real devices.
        looked: is told after each step that was looked at.
        reads_values: whether the tensors of a CPU have values, and may be read.
    """

    def __init__(
        self,
        place: Callable[[], str | None],
        *,
        counts_in_place: bool = True,
        looked: Callable[[], None] = lambda: None,
        reads_values: bool = False,
    ) -> None:
        self._reads_values = reads_values
        self._place = place
        self._looked = looked
        self._counts_in_place = counts_in_place
        self._seen: weakref.WeakKeyDictionary[Any, ObservedOptimizer] = weakref.WeakKeyDictionary()
        self._all: list[ObservedOptimizer] = []
        #: Backward passes of this step, and those of them that give inputs a gradient, too.
        self._passes = self._to_inputs = 0
        #: Backward passes, and other changes of gradients, of the whole run.
        self._passed = self._changed = 0
        self._zeroed = self._has_zeroed = self._scaled = self._unscaled = False
        #: What the last backward pass began at.
        self._root: weakref.ref[Any] | None = None
        #: Steps with gradients that were scaled and not unscaled; and whether any ever were, or
        #: whether the script asked for the scale.
        self._steps_scaled = 0
        self._unscales = False
        self._calls = 0
        self._batches: Counter[int] = Counter()
        self._is_fed = False
        self._accumulated = Accumulated(place)
        self._modes = SwitchedModes()
        self._trained_before = False
        self._losses: list[LossScale] = []
        self._models: list[weakref.ref[Any]] = []
        self._schedules: list[Schedule] = []
        self._made: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
        #: What the second step's loss was computed with, by identity.
        self._leaves: dict[int, Leaf] | None = None
        self._gradients = Gradients({}, 0)
        #: Models that gave something with a graph, by identity, and where; and one of them that
        #: gets no gradient. Are gradients of chosen tensors asked for?
        self._with_graph: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._graph_unused: tuple[str, str, bool] | None = None
        self._chooses = False
        self._graphs_at: str | None = None
        self._checkpoint: str | None = None
        self._clipped: str | None = None
        #: A line that clipped with no backward pass since the last step, until the next event tells
        #: whether a step used it; and one that none did.
        self._clipping: str | None = None
        self._clipped_late: str | None = None
        self._rootless: str | None = None
        #: Where numbers that are not finite come from, once that was asked; no kind: not known.
        self._not_finite: Misuse | None = None
        self._loading: weakref.ref[Any] | None = None
        #: Where a batch was taken last, if of all of a data set.
        self._over_all: str | None = None
        #: Tensors of optimizers, by identity, in modules that were not called.
        self._owned: set[int] = set()
        self._restarts = Restarts()
        #: Of models that several ranks train.
        self._wrappers: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
        self._not_split: str | None = None
        self._order = EpochOrder()
        self._misfit: LossMisfit | None = None
        self.misuse = MisuseObserver(place, lambda: self._all[0].steps if self._all else 0)
        """What has no effect, or another than it is meant to have."""
        self.misuse.loaders.are_workers_asked = reads_values
        self.misuse.restored.schedules = self._schedules
        #: Was something broadcast that may be a loss?
        self._is_broadcast = False
        #: A number that was added to float16, where it is 0, and the line.
        self._eps_lost: tuple[float, str] | None = None
        #: Shapes of a view that seems to swap dimensions, and its line.
        self._swapped: tuple[str, str, str] | None = None
        self._half = False
        self._anomaly: tuple[str, ...] = ()
        self.awake = True
        """Is the next step looked at? Else nothing needs to be told of it but its end
        (:meth:`passed`), a mode that is set and a checkpoint: most steps cost next to nothing."""

    # -- what happens ----------------------------------------------------------------------------

    def loading(self, module: Any, state: Any) -> None:
        """``module.load_state_dict(state)`` is called."""
        self._loading = weakref.ref(module)
        self.misuse.loading(module, state)

    def loaded(self, keys: Any) -> None:
        """``load_state_dict`` returned ``keys``: what names are missing and left over."""
        known, self._loading = self._loading, None
        if (module := known() if known is not None else None) is not None:
            lacks, other = getattr(keys, "missing_keys", ()), getattr(keys, "unexpected_keys", ())
            self.misuse.loaded(module, lacks, other)

    def called(self, module: Any) -> None:
        """An outermost module with parameters is about to be called."""
        self._calls += 1
        self.misuse.calling(module, self._called, self._made)
        if len(self._models) < _MODELS and all(known() is not module for known in self._models):
            self._models.append(weakref.ref(module))

    def returned(self, module: Any, output: Any) -> None:
        """An outermost module with parameters gave ``output``."""
        self.misuse.graphs.called(output, self._place)
        known, is_used = self._with_graph, self._trained_before or self._calls >= _EARLY
        if is_used and id(module) not in known and len(known) < _MODELS and has_graph(output):
            known[id(module)] = weakref.ref(module), self._place() or ""

    def iterated(self, loader: Any) -> None:
        """A DataLoader begins to be gone over."""
        self._accumulated.is_new_pass = self._trained_before
        self._order.begins(loader, sum(each.steps for each in self._all))
        self.misuse.iterated(loader)
        if self._trained_before and self.misuse.freezing.begins_pass(self._called()):
            self.awake = True
            for each in self._all:
                each.look_again()
        self._restarts.begins(loader, self._place() or "")

    def numbered(self) -> None:
        """A sampler of several ranks is told the number of an epoch."""
        self._order.told()

    def wrapped(self, wrapper: Any) -> None:
        """A model is wrapped by DistributedDataParallel."""
        self._wrappers[wrapper] = self._place()

    def fed(self, batches: Any) -> None:
        """The iterator of a DataLoader is asked for its next batch."""
        self._is_fed = True
        self._restarts.given += 1
        self.misuse.batches.asked(batches)
        self._batches[id(batches)] += 1
        if self._wrappers and not self._trained_before:
            self._over_all = (self._place() or "") if goes_over_all(batches) else None

    def backward(self, tensors: Any, *, with_graph: bool = False) -> None:
        """A backward pass from ``tensors`` begins, whose gradients may have graphs themselves."""
        self.misuse.second_order.passes((self._place() or "") if with_graph else None)
        self._passes += 1
        self._passed += 1
        root = tensors[0] if isinstance(tensors, Sequence) and tensors else tensors
        if reaches_inputs(root, self._made):
            self._to_inputs += 1
        else:
            self._accumulated.used += 1
        if self._clipping is not None and self._trained_before:
            self._clipped_late = self._clipped_late or self._clipping
        self._clipping = None
        if self._rootless is None and has_no_graph(root):
            self._rootless = rooted_at(self._place() or "")
        if self._is_broadcast and self._misfit is None and isinstance(root, torch.Tensor):
            self._misfit = broadcast_in(root.grad_fn)
        if len(self._losses) < _LOSSES and isinstance(root, torch.Tensor):
            self._losses.append(scale_of_loss(root.grad_fn, scaled=self._scaled))
            if self._trained_before and self._leaves is None:
                # Those that shard parameters compute with others than the optimizer has.
                in_group = dist.is_available() and dist.is_initialized()
                self._leaves = {} if in_group else leaves_of(root.grad_fn)
        self.misuse.averaging.backward(self._wrappers, self._place() if self._wrappers else None)
        self.misuse.backward(root, has_trained=self._trained_before)
        if self._reads_values:
            self._root = weakref.ref(root) if isinstance(root, torch.Tensor) else None
        if with_graph and self._graphs_at is None:
            self._graphs_at = self._place() or ""

    def _called(self) -> list[Any]:
        """Models that were called and live."""
        return [model for known in self._models if (model := known()) is not None]

    def grouped(self, optimizer: Any) -> None:
        """An optimizer is about to get one more group of parameters."""
        seen = self._seen.get(optimizer)
        if seen is not None and seen.steps:
            self.misuse.grown.adds(optimizer, self._place())

    def profiling(self, profiler: Any) -> None:
        """A profiler of the script begins."""
        self.misuse.profiling.begins(profiler, self._place())

    def chooses(self) -> None:
        """Gradients of chosen tensors are asked for: others get none of that backward pass."""
        self.misuse.second_order.passes(None)
        self._chooses = True

    def made(self, optimizer: Any) -> None:
        """An optimizer is made."""
        self._made[optimizer] = self._place()

    def scheduled(self, scheduler: Any) -> None:
        """A schedule of learning rates is made."""
        self._schedules.append(Schedule(weakref.ref(scheduler), self._place()))

    def scaled(self) -> None:
        """An enabled GradScaler scaled a loss."""
        self._scaled, self._unscaled = True, False

    def unscaled(self) -> None:
        """A GradScaler unscaled the gradients."""
        self.misuse.scaled.unscaled()
        self._unscaled = self._unscales = True
        self._changed += self._counts_in_place

    def reads_scale(self) -> None:
        """A script asks for a GradScaler's scale, by which it may unscale itself."""
        self.steps_scaler()
        self.misuse.scaled.read()

    def steps_scaler(self) -> None:
        """A GradScaler makes the step, or is asked for its scale, by which a script unscales."""
        self._unscales = True

    def computed(self, left: Any, right: Any, result: Any) -> None:
        """A sum, a difference or a product was computed."""
        if self._eps_lost is None and is_lost(left, right):
            self._eps_lost = right, self._place() or ""
        self.misuse.computed(left, right, result)
        if self._misfit is None and mark_broadcast(left, right, result, self._place):
            self._is_broadcast = True

    def viewed(self, source: Any, result: Any) -> None:
        """The script made a view of a tensor, or a tensor of another shape."""
        if self._swapped is None and seems_swapped(source.shape, result.shape):
            self._swapped = shape_of(source), shape_of(result), self._place() or ""

    def comparing(self, name: str, output: Any, target: Any) -> None:
        """A loss function of torch.nn.functional is called."""
        self.misuse.batches.compared(name, output, target)
        if self._swapped is None and (shapes := classes_by_view(name, output)) is not None:
            self._swapped = *shapes, self._place() or ""
        if self._misfit is None:
            found = misfit(name, output, target)
            if found is not None:
                self._misfit = dataclasses.replace(found, place=self._place())

    def clipping(self, tensors: Any = None, limit: Any = None, by_norm: bool = True) -> None:
        """Gradients of tensors are clipped to a limit, by norm or value (a huge one: they are only
        measured)."""
        self.misuse.clipping(tensors, limit if self._passes else None, by_norm)
        self._changed += 1
        is_measured = isinstance(limit, int | float) and limit >= _ONLY_MEASURED
        if not self._passes and not is_measured:
            self._clipping = self._place() or ""
        if not is_measured:
            self._accumulated.clipped()
        if self._scaled and not self._unscaled and self._clipped is None:
            self._clipped = self._place() or ""

    def zeroed(self, owner: Any) -> None:
        """Gradients were set to zero or dropped, by zero_grad of an optimizer or a module."""
        self._zeroed = self._has_zeroed = self._accumulated.zeroed_within = True
        for optimizer, seen in self._seen.items():
            # A model's own zero_grad is of any of them.
            if owner is optimizer or not isinstance(owner, torch.optim.Optimizer):
                seen.zeroed = True
        if self._accumulated.used and self._is_only(owner):
            self._accumulated.drop(self._place() or "", owner)

    def _is_only(self, owner: Any) -> bool:
        """Is it the only optimizer, or a model with all of its tensors?"""
        if len(self._all) != 1:
            return False
        if isinstance(owner, torch.optim.Optimizer):
            return owner in self._seen
        return self._all[0].is_within({id(tensor) for tensor in owner.parameters()})

    def checkpointing(self, inputs: Iterable[Any]) -> None:
        """A reentrant checkpoint begins (in an evaluation, too, where it does not matter)."""
        if self._checkpoint is None:
            tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
            if tensors and not any(tensor.requires_grad for tensor in tensors):
                self._checkpoint = self._place() or ""

    def mode_set(self, model: Any, training: bool) -> None:
        """``model.train(training)``, which concerns all its parts."""
        self.awake = True
        self._modes.set(model, training, self._trained_before, self._place)

    def stepping(self, optimizer: Any) -> None:
        """An optimizer's step begins: its gradients are what it will use."""
        self._clipping = None
        if self._passes:
            self._restarts.step()
        seen = self._seen.get(optimizer)
        self._accumulated.enter(optimizer, self._passed)
        if seen is None:
            if not self._passed and not self._calls and has_no_gradients(optimizer):
                return  # before a training that goes on, or with a closure
            seen = self._seen[optimizer] = ObservedOptimizer(optimizer)
            self._all.append(seen)
            self._look_at_data()
            self.misuse.begins(optimizer, self._called(), self._made.get(optimizer))
        self.misuse.passes.uses(optimizer)
        if self._passes:
            at = self._made.get(optimizer)
            self.misuse.stepping(optimizer, at, unscaled=self._unscaled)
        if seen.is_due():
            added = seen.added(optimizer)
            # Where some are set to zero by a method, no other is by hand.
            kept = seen.keeps(added, self._passed, self._changed)
            kept = kept and (len(self._all) == 1 or self._has_zeroed)
            again = seen.had_passes and not self._zeroed and self._passes == 0 == added
            seen.look(optimizer, kept=kept, again=(self._place() or "") if again else None)
            self.misuse.freezing.look(optimizer, self._names_of_all)
            if seen.zero_rates == 1 or len(seen.vanished) == 1:
                seen.rate_at = made_for(self._schedules, optimizer) or self._made.get(optimizer)
            if self._reads_values:
                self._look_at_numbers(optimizer)
            if self._reads_values and seen.looks > FIRST_LOOKS:
                seen.denormal = denormals(optimizer)
                place = self._made.get(optimizer)
                look = self.misuse.stalled.look
                look(
                    optimizer,
                    place,
                    loss_of(self._root),
                    self._called(),
                    is_only=len(self._all) == 1,
                )
            self.misuse.looked(seen.steps)
            self._anomaly = self._anomaly or anomaly_at(self._place)
            self._half = self._half or (self._scaled and seen.is_half)
            self._steps_scaled += self._scaled and not self._unscaled
        self._accumulated.look(self._passes)
        seen.had_passes = self._passes > 0
        if self._passes:
            self._accumulated.step(self._micro_batches_now(), optimizer)
            if self._modes.evaluating is not None:
                self._modes.look(optimizer)

    def _look_at_numbers(self, optimizer: Any) -> None:
        """Find where what is not finite comes from: a slope, or the data."""
        root = self._root() if self._root is not None else None
        if self._not_finite is None and root is not None:
            nodes = () if self._trained_before else nodes_of(root.grad_fn) or ()
            data, at = self.misuse.batches.data, self._place() or ""
            self._not_finite = where_not_finite(optimizer, loss_of(self._root), nodes, data, at)

    def _look_at_owners(self, observed: ObservedOptimizer) -> None:
        """Do modules that were not called have tensors of an optimizer that got no gradient? Of a
        part that was replaced the optimizer alone holds them."""
        called = self._called()
        within = {key for model in called for key in names_of(model)}
        foreign = {key for key, had in observed.had.items() if not had and key not in within}
        if called and foreign:
            self._owned |= in_modules(foreign)

    def _look_at_unused(self) -> None:
        """Are there gradients that no optimizer uses? Those that shard parameters compute with
        others than they have."""
        called = self._called()
        had = {key: each for seen in self._all for key, each in seen.had.items()}
        self.misuse.trained(called, had)
        self.misuse.wrapped(self._wrappers, had)
        if called and ranks() == 1:
            used = {key for seen in self._all for key in seen.had}
            self._gradients = unused_gradients(called, used)
            self._look_at_graphs(used)

    def _look_at_graphs(self, used: set[int]) -> None:
        """Does a model record a graph that no backward pass goes through?"""
        for known, place in () if self._chooses else self._with_graph.values():
            model = known()
            if model is not None and without_gradients(model, used):
                is_small = sum(each.nbytes for each in model.parameters()) < _SMALL
                self._graph_unused = type(model).__name__, place, is_small
                return

    def _look_at_data(self) -> None:
        """Does each of several ranks that train one model go over the same data?"""
        if self._wrappers and self._not_split is None and ranks() > 1:
            self._not_split = self._over_all

    def _micro_batches_now(self) -> int:
        """Backward passes of the step that had a batch of their own, and not several losses of one
        (a generator's and a discriminator's, a penalty)."""
        if self._is_fed:
            maximum = max(self._batches.values(), default=1)
        elif len(self._all) > 1 or len(self._models) > 1:
            maximum = 1  # which of them had data of its own is not known
        else:
            maximum = (self._calls or self._passes) - self._to_inputs
        return max(1, min(self._passes - self._to_inputs, maximum))

    def stepped(self, optimizer: Any) -> None:
        """An optimizer's step is over."""
        seen = self._seen.get(optimizer)
        if self._accumulated.leave(optimizer, self._passed) and seen is not None and seen.was_due:
            seen.gets(optimizer)
        if seen is not None and seen.will_be_due():
            seen.remember(optimizer)
        if seen is not None and seen.was_due and seen.looks == _LOOK_AT_OWNERS:
            self._look_at_owners(seen)
            self._look_at_unused()
        if seen is not None and seen.was_due and self.misuse.freezing.unfrozen:
            used = {key for each in self._all for key in each.had}
            self.misuse.freezing.stepped(self._called(), used)
        if self._passes:
            self._trained_before = True
        self._passes = self._calls = self._to_inputs = self._accumulated.used = 0
        if seen is not None:
            seen.over(self._passed, self._changed)
        self._batches.clear()
        self._accumulated.dropped_at = None
        self._zeroed = self._scaled = self._unscaled = False
        self.awake = not self._all or any(each.is_next_due for each in self._all)
        if seen is not None and seen.was_due:
            self._looked()

    def passed(self, optimizer: Any) -> None:
        """A step of an optimizer that is not looked at is over."""
        seen = self._seen.get(optimizer)
        if seen is None:
            self.awake = True  # the next one of this optimizer is looked at
            return
        self.awake = seen.pass_over()
        self._restarts.passed()

    def _names_of_all(self) -> dict[int, str]:
        return {key: name for model in self._called() for key, name in names_of(model).items()}

    # -- what came of it -------------------------------------------------------------------------

    def facts(self, ahead: int = 0, *, is_whole: bool = False) -> LearningFacts:
        """All so far; the models that were called give names to tensors. Schedules are stepped
        ``ahead`` to that many steps of the optimizer (0: they are not), which may be all of the
        run's (``is_whole``)."""
        names = self._names_of_all()
        looked = [seen for seen in self._all if seen.looks]
        without = untrained(self._called(), looked)
        losses = [] if self.misuse.limits.are_scaled_down else self._losses
        foreign = [key for key, _ in without if key not in names]
        had = {key for seen in self._all for key in seen.had}
        leaves, gradients = self._leaves or {}, self._gradients
        loose = [key for key in leaves if key not in names and key not in had]
        all_known = bool(names) and len(self._models) < _MODELS
        left_out = [name for key, name in names.items() if key in leaves and key not in had]
        schedules = self._schedules if ahead else ()
        steps = max((seen.steps for seen in looked), default=0)
        is_apart, models = self._owned.isdisjoint(foreign), [known() for known in self._models]
        return LearningFacts(
            steps=sum(seen.looks for seen in looked),
            optimized=sum(len(seen.had) for seen in looked),
            frozen=sum(seen.frozen for seen in looked),
            without_gradient=len(without),
            foreign=len(foreign) if all_known else 0,
            unregistered=tuple(leaves[key].shape for key in loose if all_known),
            made_again=sum(leaves[key].parameter() is None for key in loose),
            unused_gradients=tuple(names[key] for key in gradients.unused if key in names),
            unused_bytes=sum(gradients.unused.values()),
            gradient_bytes=gradients.nbytes,
            left_out=tuple(left_out) if all_known and foreign and is_apart else (),
            graph_unused=self._graph_unused,
            swapped=self._swapped,
            eps_lost=self._eps_lost,
            gradients_with_graph=self._graphs_at,
            without_names=tuple(names.get(key, shape) for key, shape in without[:_NAMES]),
            **of_trained(looked, names),
            checkpoint_without_gradient=self._checkpoint,
            loss_without_graph=self._rootless,
            restarted=self._restarts.at,
            same_batch=self._restarts.same_batch,
            not_split=self._not_split,
            same_order=self._order.same(ahead if is_whole else 0),
            passed_by=passed_by(self._wrappers, models) if all_known and looked else None,
            misfit=self._misfit,
            not_finite=self._not_finite if self._not_finite and self._not_finite.kind else None,
            misuses=(
                *self.misuse.found(names),
                *self._accumulated.found(),
                *of_schedules(self._schedules, self._seen, asks=not self._reads_values),
            ),
            clipped_late=self._clipped_late,
            clipped_scaled=self._clipped,
            scaler_on_half=self._half,
            half_at=self.misuse.moved.half_at,
            steps_scaled=0 if self._unscales or len(self._all) > 1 else self._steps_scaled,
            small_eps=next((seen.small_eps for seen in looked if seen.small_eps is not None), None),
            kept_gradients=sum(seen.kept for seen in looked),
            kept_of=kept_of(looked, names),
            used_again=sum(seen.again for seen in looked),
            used_again_at=next((seen.again_at for seen in looked if seen.again_at), None),
            zero_rates=(zeros := steps_at_zero(looked)),
            rate_zero_at=next((seen.rate_at for seen in looked), None) if zeros else None,
            vanished_rate=(vanished := vanished_rate(looked)),
            vanished_at=None if vanished is None else looked[0].rate_at,
            schedule=schedule_end(schedules, steps, ahead, list(self._seen)),
            schedule_unused=schedule_unused(
                self._schedules, steps, ahead if is_whole else 0, list(self._seen)
            ),
            denormal=max((share for seen in looked for share in seen.denormal.values()), default=0),
            denormal_in=where_most(looked),
            schedule_fades=schedule_fades(self._schedules, steps, list(self._seen)),
            anomaly=bool(self._anomaly),
            anomaly_at="".join(self._anomaly),
            evaluating_at=self._modes.wrong_at,
            micro_batches=self._accumulated.micro_batches(),
            dropped_micro_batches=self._accumulated.dropped(),
            dropped_at=self._accumulated.dropping,
            remainder=self._accumulated.remainder(),
            remainder_share=self._accumulated.remainder_share(),
            loss_divisors=tuple(sorted(common(losses))),
            loss_is_known=bool(losses) and all(loss.is_known for loss in losses),
        )
