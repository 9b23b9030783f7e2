"""What a script does in a step: batches, calls and passes; whether it trains at all."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from trainfit.findings.source_code import file_syntax
from trainfit.results.runs.steps import Framework, StepMakeup, WaitKind
from trainfit.results.runs.trace import StepFeed
from trainfit.scripts.dataloader import GivenBatch, LoaderTracker
from trainfit.scripts.samples.batch_sizes import samples_in
from trainfit.scripts.step_makeup import loop_of, makeup_of
from trainfit.simgpu.device.recorder import BACKWARD
from trainfit.simgpu.device.uploads import Uploads
from trainfit.simgpu.device.user_location import call_of_user, files_of_user, frame_of_user
from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.torch_private.autograd import ENGINE_RUN_BACKWARD
from trainfit.torch_private.distributed import PIPELINE_STAGES, passes_for_shapes
from trainfit.torch_private.operators import version


@dataclasses.dataclass
class _Calls:
    """Calls of one outermost module since the last training step.

    ``pending`` are those that no backward pass followed so far; ``sizes`` the first dimensions
    of what the calls were given; ``given`` the tensors of the first call, with their versions.
    """

    counted: int = 0
    pending: int = 0
    sizes: Counter[int] = dataclasses.field(default_factory=Counter)
    given: list[tuple[weakref.ref[torch.Tensor], int]] = dataclasses.field(default_factory=list)

    def is_as(self, before: _Calls) -> bool:
        """Is it one call, with the tensors of the one before, and nothing new in them?"""
        tensors = [ref() for ref, _ in self.given]
        return (
            self.counted == before.counted == 1
            and bool(tensors)
            and len(tensors) == len(before.given)
            and all(
                ref is not None and ref is then() and now == version_then
                for ref, (_, now), (then, version_then) in zip(
                    tensors, self.given, before.given, strict=True
                )
            )
        )


#: How often the host waits, by line (``None``: none of the user's) and by what for.
_Waits = Counter[tuple[str | None, WaitKind]]


class StepWatch:
    """Notes what each training step of a run is given (:class:`StepFeed`), and tells the
    simulation's :class:`~trainfit.results.runs.step_cycle.StepCycle` what a loop without an
    optimizer does.

    A model's call counts if gradients were enabled and a backward pass followed; of several
    outermost modules, those of the one with the most trained parameters. What checkpointing
    calls again within a backward pass does not count.
    """

    def __init__(self, simulation: Simulation, loaders: LoaderTracker) -> None:
        self._simulation = simulation
        loaders.on_batch = self._give
        self._loaders = loaders
        self._sizes: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._depth = self._in_backward = self._stepping = 0
        self._needs_size: _Calls | None = None
        #: The outermost call that goes on, as long as its size may be that of the time.
        self._sized: tuple[_Calls, int] | None = None
        self.after_backward: Callable[[], None] = lambda: None
        """Called after each outermost pass that makes gradients of parameters."""
        self._needs_tensors: _Calls | None = None
        self._before = _Calls()
        self.feeds: list[StepFeed] = []
        self._waits: list[_Waits] = []
        self._uploads = Uploads(simulation.module)
        self.loop: Framework = ""
        self.where: str | None = None
        self._begin()

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored and :meth:`remove` is called."""
        backward = ENGINE_RUN_BACKWARD.now
        self._simulation.on_wait = lambda kind: self._waiting.update(((call_of_user(), kind),))
        self._simulation.on_upload(self._uploads.copied)

        def watched(*args: Any, **kwargs: Any) -> Any:
            cycle = self._simulation.cycle
            counts = not self._in_backward and cycle.is_engine_pass(args, kwargs)
            if counts:
                cycle.passed()
                if not self._stepping:
                    self._tell(cycle.next_pass)
                self._commit()
            self._in_backward += 1
            try:
                found = backward(*args, **kwargs)
            finally:
                self._in_backward -= 1
            if counts:
                self.after_backward()
            return found

        patches.set(*ENGINE_RUN_BACKWARD, watched)

        def staged(stages: ModuleType) -> None:
            for each in passes_for_shapes(stages):
                patches.hook(*each, self._apart)

        patches.when_imported(PIPELINE_STAGES, staged)
        patches.see_calls(self._enter, self._leave)
        patches.see_steps(self._before_step, self._after_step)

    def _apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose calls and passes are of no micro-batch."""

        @functools.wraps(function)
        def not_counted(*args: Any, **kwargs: Any) -> Any:
            self._in_backward += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._in_backward -= 1

        return not_counted

    def note_step(self) -> None:
        """A training step is over."""
        if not self.feeds:
            self._look_around()
        self._waits.append(self._waiting)
        self._uploads.step_ended()
        calls = max(
            ((self._trained(module), call) for module, call in self._calls.items()),
            key=lambda pair: pair[0],
            default=(0, _Calls()),
        )[1]
        if self._simulation.replaying and not calls.counted and self.feeds:
            # What was called when the graph was captured.
            self._again(self.feeds[-1])
            return
        common = calls.sizes.most_common(1)
        batches, loaders = self._fed(common[0][0] if common else None, calls.counted)
        self.feeds.append(
            StepFeed(
                batches=batches,
                loaders=loaders,
                is_given_again=any(batch.is_again for batch in self._batches),
                calls=calls.counted,
                call_samples=common[0][0] if common else None,
                backwards=self._backwards,
                others=self._others,
                rounds=max(1, self._rounds),
                call_rows=sum(size * times for size, times in calls.sizes.items()) or None,
                is_same=calls.is_as(self._before),
            )
        )
        self._before = calls
        self._begin()

    def _again(self, feed: StepFeed) -> None:
        batches, loaders = self._fed(feed.call_samples, feed.calls)
        self.feeds.append(dataclasses.replace(feed, batches=batches, loaders=loaders))
        self._begin()

    def warms_up(self) -> bool:
        """Did the last step accumulate more micro-batches than the one before it?"""
        passes = [feed.backwards for feed in self.feeds[-2:]]
        return len(passes) == 2 and passes[0] < passes[1]

    def makeup(self, batch_size: int | None = None) -> StepMakeup | None:
        """What the steps so far consist of; ``batch_size`` is what the command says."""
        found = makeup_of(self.feeds, batch_size)
        if found is None:
            return None
        # The first step has what comes before the loop, too.
        times = self._waits[1:] if len(self._waits) > 2 else [_Waits()]
        each = {
            (line, kind): least
            for line, kind in times[0]
            if line is not None and (least := min(step[line, kind] for step in times))
        }
        maximum = max(each.values(), default=0)
        looped = maximum if maximum > _WAITS_OF_LOOP * (found.accumulation or 1) else 0
        waits = sorted(each)
        if looped:
            waits.sort(key=lambda wait: -each[wait])
        kinds = dict(reversed(waits))  # the first of each line
        tried = self._simulation.engine.steps_with_trials.values()
        trials = max((len(steps - {0}) for steps in tried), default=0)
        return dataclasses.replace(
            found,
            loop=self.loop,
            where=self.where,
            waits=tuple(dict.fromkeys(line for line, _ in waits)),
            wait_kinds=tuple(kinds[line] for line in dict.fromkeys(line for line, _ in waits)),
            uploads=tuple(self._uploads.found()) if len(self._waits) > 2 else (),
            looped_waits=looped,
            trials=trials,
        )

    def _begin(self) -> None:
        self._batches: list[GivenBatch] = []
        self._waiting = _Waits()
        self._calls: weakref.WeakKeyDictionary[torch.nn.Module, _Calls]
        self._calls = weakref.WeakKeyDictionary()
        self._backwards = 0
        self._rounds = 0
        self._within = self._others = self._stepped = self._has_called = self._is_fed = False

    # -- batches -------------------------------------------------------------------------

    def _give(self, batch: GivenBatch) -> None:
        self._tell(self._simulation.cycle.next_batch)
        self._batches.append(batch)
        self._is_fed = True

    def _fed(self, lead: int | None, calls: int) -> tuple[tuple[int | None, ...], int]:
        """Sizes of the batches of the loader that gave the latest, or that has the least share, not
        those of an evaluation, and 1; or, where the model's ``calls`` of ``lead`` samples were each
        given one batch of several loaders together, in equal shares, what it was called with, and
        their number."""
        given = [batch for batch in self._batches if batch.with_grad] or self._batches
        least = self._loaders.least_share
        if own := tuple(batch.samples for batch in given if batch.loader == least):
            return own, 1
        latest = tuple(batch.samples for batch in given if batch.loader == given[-1].loader)
        loaders, rest = divmod(len(given), max(len(latest), 1))
        if loaders < 2 or rest or not lead or len(latest) != calls:
            return latest, 1
        if any(batch.samples is None or batch.samples * loaders != lead for batch in given):
            return latest, 1
        return (lead,) * calls, loaders

    # -- calls and backward passes ---------------------------------------------------------

    def _enter(self, module: torch.nn.Module, given: Any) -> None:
        self._depth += 1
        if self._in_backward:
            return
        if self._depth == 1:
            self._needs_size = self._sized = self._needs_tensors = None
            if torch.is_grad_enabled() and self._trained(module):
                if module.training and not self._stepping:
                    self._tell(self._simulation.cycle.next_call)
                self._has_called = True
                self._needs_size = self._calls.setdefault(module, _Calls())
                self._needs_size.pending += 1
                self._needs_tensors = self._needs_size if not self._needs_size.given else None
        if self._needs_tensors is not None:
            # Or its first module that is given some.
            tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
            if tensors and not any(tensor.requires_grad for tensor in tensors):
                self._needs_tensors.given += [
                    (weakref.ref(tensor), version(tensor)) for tensor in tensors
                ]
            self._needs_tensors = None if tensors else self._needs_tensors
        if self._needs_size is not None and given:
            # A model that is called with keywords only: its first module that is not.
            size = next(filter(None, map(samples_in, given)), None)
            if size is not None:
                self._needs_size.sizes[size] += 1
                # Where a DataLoader tells the batch size, often ``batch_first`` was forgotten.
                if all(batch.samples in (None, 1) for batch in self._batches):
                    self._sized = self._needs_size, size
                self._needs_size = None
        if self._sized is not None and getattr(module, "batch_first", True) is False:
            self._turn(*self._sized, tuple(getattr(given[0], "shape", ())) if given else ())

    def _turn(self, calls: _Calls, size: int, shape: tuple[int, ...]) -> None:
        """A recurrent network or an attention is called whose dimensions are time, batch and
        features: where the model was given them in this order, the second is its samples."""
        if len(shape) != 3:
            return
        self._sized = None
        if shape[0] == size:
            calls.sizes[size] -= 1
            calls.sizes[shape[1]] += 1

    def _leave(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _commit(self) -> None:
        """A backward pass begins: the calls before it were of training.

        An optimizer that evaluates the model again and again within its step (L-BFGS) does so
        with the same samples.
        """
        repeats = self._within and bool(self._stepping)
        self._within = bool(self._stepping)
        self._backwards += not repeats
        for call in self._calls.values():
            call.counted += 0 if repeats else call.pending
            call.pending = 0

    def repeat(self) -> None:
        """A micro-batch like the latest counts, though it was not made."""
        self._backwards += 1
        for call in self._calls.values():
            if call.counted:
                call.counted += 1
                call.sizes[call.sizes.most_common(1)[0][0] if call.sizes else 0] += 1

    def _trained(self, module: torch.nn.Module) -> int:
        """Elements of its parameters that are trained."""
        known = self._sizes.get(module)
        if known is None:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            if any(map(is_lazy, trained)):
                return 1  # this call makes them (nn.LazyLinear)
            known = sum(parameter.numel() for parameter in trained)
            self._sizes[module] = known
        return known

    # -- steps -----------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._stepping += 1
        if self._stepping == 1:
            # Another one of the step's, with calls of its own.
            self._others |= self._stepped and self._has_called
            self._rounds += self._is_fed
            self._stepped, self._has_called, self._is_fed = True, False, False

    def _after_step(self, *_: Any) -> None:
        self._stepping = max(0, self._stepping - 1)

    def _tell(self, happens: Callable[[], bool]) -> None:
        """Tell the end of a step where no optimizer tells it: the loop does."""
        if self._simulation.cycle.counts_every_pass and happens():
            self._simulation.end_step()

    def _look_around(self) -> None:
        """Note whose loop makes the step, and where it is called."""
        frame = sys._getframe(1)
        self.where = frame_of_user(frame)
        self.loop = loop_of(frame)


# ---
# Detects, while a script runs, whether it trains at all, and with an optimizer.


#: Calls of models without an optimizer or a backward pass after which a script is taken not
#: to train.
_CALLS: Final = 100
#: Calls that are made before a training at the most: a text of 500 tokens, and some more.
_BEFORE_TRAINING: Final = 600
#: Backward passes without an optimizer after which a script is taken to do without.
_BACKWARDS: Final = 20
#: Calls in a row that distinguish a growing cache from mere variation.
_GROWTHS: Final = 4
#: Times that a line waits for the GPU in each micro-batch, above which a loop goes over samples:
#: a few numbers are read by one line that is called for each of them.
_WAITS_OF_LOOP: Final = 4


class InferenceWatch:
    """Sees scripts that only infer; what has trained once is not looked at again."""

    def __init__(self, simulation: Simulation, interventions: Interventions) -> None:
        self._simulation, self._interventions = simulation, interventions
        self._has_trained = self._was_fed = False
        self._unfed = self._backwards = 0
        self._may_train: bool | None = None

    @property
    def trains(self) -> bool:
        """Was there an optimizer or a backward pass by now?"""
        return bool(self._interventions.optimizers) or self._has_trained or self._backwards > 0

    def fed(self) -> None:
        """A DataLoader has given a batch."""
        self._was_fed = True

    def only_infers(self) -> bool:
        """A model was called: were there many of these calls, and no optimizer and no backward pass
        so far?

        Calls that no DataLoader feeds, of a script whose source trains, may be of a text that it
        makes before: that goes on.
        """
        self._unfed += not self._was_fed
        self._was_fed = False
        calls = self._interventions.forward_calls().calls
        if calls < _CALLS or self.trains:
            return False
        if self._may_train is None:
            self._may_train = any(map(source_trains, files_of_user()))
        if self._may_train and calls - min(self._unfed, _BEFORE_TRAINING) < _CALLS:
            return False
        self._has_trained = bool((self._simulation.recording.op_phase == BACKWARD).any())
        return not self._has_trained

    def updates_by_itself(self) -> bool:
        """A backward pass is over: were there some by now, and no optimizer?"""
        self._backwards += 1
        return self._backwards >= _BACKWARDS and not self._interventions.optimizers


def source_trains(path: str) -> bool:
    """Does a file call a backward pass, a ``fit()``, or make a trainer?"""
    tree = file_syntax(path)
    nodes = ast.walk(tree) if tree is not None else ()
    called = (node.func for node in nodes if isinstance(node, ast.Call))
    names = (getattr(each, "attr", getattr(each, "id", "")) for each in called)
    return any(name in ("backward", "fit") or name.endswith("Trainer") for name in names)


class CacheWatch:
    """Does memory grow from call to call of a model, as with the KV cache of ``generate()``?

    Its peak is at the end of the growth, however many calls that takes.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ends: list[int] = []
        self._grew = False

    def note_call(self) -> None:
        """A call has ended: what it left in use counts, as it was asked for. The blocks that it got
        may be larger than they need be, one time more than the next."""
        self._ends.append(self._simulation.allocator.requested_bytes)
        self._grew = self._grew or self.grows()

    def grows(self) -> bool:
        """Did the last calls leave more and more behind, and never less?"""
        last = self._ends[-_GROWTHS - 1 :]
        rises = all(after >= before for before, after in pairwise(last))
        return len(last) > _GROWTHS and rises and last[-1] > last[0]

    def released(self) -> bool:
        """Has what had grown been let go with the last call?"""
        return self._grew and self._ends[-1] < self._ends[-2]
