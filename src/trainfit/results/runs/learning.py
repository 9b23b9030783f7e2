"""What a run showed of its learning: parameters without gradients, gradients that are clipped while
they are scaled, a learning rate of 0, and the like. Counts and places, no tensors."""

from __future__ import annotations

import dataclasses
from typing import Final

#: What cuts off a term of a loss that is computed of gradients.
WITHOUT_GRAPH: Final = "autograd.grad() without create_graph=True"
#: The kind of a misuse that says where a graph was cut off, for findings of what is behind it.
CUT_OFF: Final = "graph_cut_off"
#: float16's smallest number, half of which rounds to 0.
LEAST_HALF: Final = 2.0**-24


@dataclasses.dataclass(frozen=True)
class ScheduleEnd:
    """A schedule of learning rates that is over before its run.

    Attributes
    ----------
    step: The optimizer step after which it is, from 1.
    of_steps: Optimizer steps of the run (of the first epoch, where no more is known).
    error: What it raises then ("ValueError: …"); empty: nothing.
    rate: The learning rate then, where it raises nothing.
    rises: It goes up again from there, and down, as long as the run lasts.
    place: The user's line that made it, "file:line".
    """

    step: int = 0
    of_steps: int = 0
    error: str = ""
    rate: float = 0.0
    rises: bool = False
    place: str | None = None


@dataclasses.dataclass(frozen=True)
class ScheduleUnused:
    """A schedule of learning rates that is as long as its run and is not stepped with its steps, or
    is stepped with them and much longer.

    Attributes
    ----------
    name: Of its class.
    made_for_steps: Optimizer steps that it is made for.
    of_steps: Optimizer steps of the run.
    place: The user's line that made it, "file:line".
    is_stepped: It is stepped with them.
    reached: Of the rate that it begins from, what it has got to at the run's end, still rising; 1:
        all of it, or that is not so.
    """

    name: str
    made_for_steps: int
    of_steps: int
    place: str | None = None
    is_stepped: bool = False
    reached: float = 1.0


@dataclasses.dataclass(frozen=True)
class ScheduleFades:
    """A schedule that multiplies the learning rate each so many steps, stepped with each
    optimizer step.

    Attributes
    ----------
    name: Of its class.
    every_steps: Optimizer steps from one time to the next.
    factor: By which it multiplies.
    step: The optimizer step after which the rate is next to nothing.
    place: The user's line that made it, "file:line".
    """

    name: str
    every_steps: int
    factor: float
    step: int
    place: str | None = None


@dataclasses.dataclass(frozen=True)
class LossMisfit:
    """A loss function that gets something else than it is for.

    Attributes
    ----------
    name: Of the function, in torch.nn.functional; empty: the script computes its loss itself.
    shapes: Of the output and of the target ("64×1"), where they differ and are broadcast to more
        numbers than each of them has; of the output alone, where it has one class, or where its
        activation goes along another dimension than that of the classes.
    activation: What made its input, where the function applies it itself, or wants logarithms:
        "softmax" or "sigmoid"; "relu"; "log_softmax" along another dimension.
    missing: The activation that it wants before it, where a layer's output comes as it is:
        "log_softmax" or "sigmoid".
    place: The user's line that called it, "file:line".
    """

    name: str
    shapes: tuple[str, ...] = ()
    activation: str | None = None
    missing: str | None = None
    place: str | None = None


@dataclasses.dataclass(frozen=True)
class Misuse:
    """A call, a layer or a term of the loss that has not the effect that it is meant to have.

    Attributes
    ----------
    kind: Of its finding.
    told: Names and shapes that the finding gives, in its order.
    place: The user's line, "file:line".
    """

    kind: str
    told: tuple[str, ...] = ()
    place: str | None = None

    @classmethod
    def of(cls, kind: str, *told: object, place: str | None = None) -> Misuse:
        """One of which this is told, at a line; an empty one is none."""
        return cls(kind, tuple(map(str, told)), place or None)


@dataclasses.dataclass(frozen=True)
class LearningFacts:
    """What all optimizer steps that were looked at say of the learning.

    Attributes
    ----------
    steps: Optimizer steps that were looked at; 0: there is nothing to say.
    optimized: Tensors that the optimizers have.
    frozen: Of them, those that need no gradient (requires_grad=False).
    without_gradient: Of those that need one, how many had none at any of their steps.
    foreign: Of those without, how many no model has that was called; 0: unknown as well.
    unregistered: Shapes of parameters that the loss depends on and that neither a model that was
        called has nor an optimizer; none: unknown as well.
    made_again: Of the unregistered ones, how many each forward pass makes anew.
    unused_gradients: Names of parameters of called models that get gradients and that no optimizer
        has, next to others that one has; none: unknown as well.
    unused_bytes, gradient_bytes: Of all such gradients, and of all of these models.
    left_out: Names of parameters that the loss depends on and that a model has and no optimizer,
        where the optimizer has others that no model has; none: unknown as well.
    graph_unused: Of a model that is called with gradients on and whose parameters get none, nor
        have an optimizer: its class, the line that calls it, and whether it is small.
    swapped: Shapes of a tensor and of a view of it that seems to swap dimensions, and the line.
    eps_lost: A small number that was added to float16, where it is 0, and the line.
    gradients_with_graph: The line that called backward(create_graph=True).
    without_names: The first of these, by name where a model is known, else by shape.
    trained_vector: The only tensor that is trained, next to frozen ones, where it is a vector (a
        bias): its name, or else its shape.
    has_adapters: Adapters or prompts are trained (LoRA), by their names.
    trained_numbers, all_numbers: Numbers in tensors that had gradients, and in all.
    checkpoint_without_gradient: The line that called a reentrant checkpoint with no input that
        needs a gradient.
    loss_without_graph: The line that called backward() of a tensor that nothing was computed for.
    restarted: The line that makes a new iterator of a DataLoader for one batch, in each step.
    same_batch: That is the first batch of the same order each time.
    not_split: The line that goes over all of the data in each of several ranks.
    same_order: The line that goes over the data of several ranks in one and the same order in each
        epoch.
    passed_by: Of several ranks, the class of the model that is called within its
        DistributedDataParallel, which itself is not.
    misfit: The first loss function that gets something else than it is for.
    not_finite: Of a loss that is not finite, or of gradients, where that comes from: a function
        with an infinite slope ("slope_infinite"), the data ("data_not_finite"), the batch
        ("batch_not_finite"), a line ("made_not_finite", and its variable), or lines that may have
        made it ("may_be_made", by their source); on a CPU only.
    misuses: What has no effect, or another than it is meant to have, the first of each kind.
    clipped_late: The line that clipped gradients after the step that used them.
    clipped_scaled: The line that clipped gradients which a GradScaler had scaled.
    scaler_on_half: A GradScaler was used on parameters that are float16 themselves.
    half_at: The line that cast a model to float16; ``None``: none did.
    small_eps: Adam's eps where parameters are float16, and it is 0 there.
    steps_scaled: Steps with gradients that a GradScaler had scaled, in a run that never unscaled
        any and never asked for the scale.
    kept_gradients: Steps that began with the gradients of the step before.
    kept_of: The first tensor of those, where another optimizer's gradients are set to zero.
    used_again: Steps that used the gradients of the step before once more, as they were.
    used_again_at: The line of the first of them.
    zero_rates: Steps at which each learning rate was 0.
    rate_zero_at: Then, the line that made the schedule, or else the optimizer.
    vanished_rate: The last learning rate, where it fell below a hundred-millionth of the largest.
    vanished_at: Then, the line that made the schedule, or else the optimizer.
    schedule: A schedule that is over too soon, as it will be; only of simulated runs.
    schedule_unused: A schedule that will hardly begin; of a real run one of steps that is stepped
        once for many.
    denormal, denormal_in: The largest share of denormal float32 on the CPU that the last look
        found in a large tensor, and in what: "weights", "gradients", "averages".
    schedule_fades: A schedule whose rate falls to next to nothing, by its own figures.
    anomaly, anomaly_at: The anomaly mode of autograd was on; the line that set it, where known.
    evaluating_at: The line that switched the trained model to evaluation, which is still on.
    micro_batches: Backward passes of a step that had a batch of their own, the most common number.
    dropped_micro_batches: Of them, those whose gradients zero_grad dropped before the step.
    dropped_at: The line that did.
    remainder: Where others are not dropped, the most micro-batches that one step lost of an epoch's
        end; 0: none.
    remainder_share: Of all micro-batches, what steps lost.
    loss_divisors: Numbers by which each of them divided its loss, or each term of it, last.
    loss_is_known: Whether nothing else was done to the loss after it was computed.
    """

    steps: int = 0
    optimized: int = 0
    frozen: int = 0
    without_gradient: int = 0
    foreign: int = 0
    unregistered: tuple[str, ...] = ()
    made_again: int = 0
    unused_gradients: tuple[str, ...] = ()
    unused_bytes: int = 0
    gradient_bytes: int = 0
    left_out: tuple[str, ...] = ()
    graph_unused: tuple[str, str, bool] | None = None
    swapped: tuple[str, str, str] | None = None
    eps_lost: tuple[float, str] | None = None
    gradients_with_graph: str | None = None
    without_names: tuple[str, ...] = ()
    trained_vector: str | None = None
    has_adapters: bool = False
    trained_numbers: int = 0
    all_numbers: int = 0
    checkpoint_without_gradient: str | None = None
    loss_without_graph: str | None = None
    restarted: str | None = None
    same_batch: bool = False
    not_split: str | None = None
    same_order: str | None = None
    passed_by: str | None = None
    misfit: LossMisfit | None = None
    not_finite: Misuse | None = None
    misuses: tuple[Misuse, ...] = ()
    clipped_late: str | None = None
    clipped_scaled: str | None = None
    scaler_on_half: bool = False
    half_at: str | None = None
    small_eps: float | None = None
    steps_scaled: int = 0
    kept_gradients: int = 0
    kept_of: str = ""
    used_again: int = 0
    used_again_at: str | None = None
    zero_rates: int = 0
    rate_zero_at: str | None = None
    vanished_rate: float | None = None
    vanished_at: str | None = None
    schedule_fades: ScheduleFades | None = None
    denormal: float = 0.0
    denormal_in: str = ""
    schedule: ScheduleEnd | None = None
    schedule_unused: ScheduleUnused | None = None
    anomaly: bool = False
    anomaly_at: str = ""
    evaluating_at: str | None = None
    micro_batches: int = 1
    dropped_micro_batches: int = 0
    dropped_at: str | None = None
    remainder: int = 0
    remainder_share: float = 0.0
    loss_divisors: tuple[float, ...] = ()
    loss_is_known: bool = False

    @property
    def is_divided(self) -> bool | None:
        """Whether the losses of a step's micro-batches are divided by their number; ``None``: it
        cannot be told."""
        if self.micro_batches < 2:
            return None
        if any(abs(divisor / self.micro_batches - 1) < 1e-3 for divisor in self.loss_divisors):
            return True
        is_plain = all(abs(divisor - 1) < 1e-3 for divisor in self.loss_divisors)
        return False if self.loss_is_known and is_plain else None


#: Of a run without an optimizer's step.
NOTHING_SEEN: Final = LearningFacts()
