"""Where a training step is over, from plain events: no PyTorch, no hooks."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.results.runs.step_cycle import NEVER_STEPS, StepCycle


class Parameter:
    requires_grad = True
    grad: Any = None
    is_leaf = True

    def __init__(self, elements: int = 1) -> None:
        self.numel = lambda: elements


class Optimizer:
    def __init__(self, *parameters: Parameter) -> None:
        self.param_groups = [{"params": list(parameters or (Parameter(),))}]

    @property
    def parameters(self) -> list[Parameter]:
        return list(self.param_groups[0]["params"])


def steps(cycle: StepCycle, sequence: str, **optimizers: Any) -> str:
    """The ``sequence`` of optimizers that step, with a bar where a step is over."""
    return "".join(each + "|" * cycle.stepped(optimizers[each]) for each in sequence)


def made(*optimizers: Any) -> StepCycle:
    cycle = StepCycle()
    for each in optimizers:
        cycle.made(each)
    return cycle


def test_the_steps_of_one_optimizer() -> None:
    a = Optimizer()
    assert steps(made(a), "aaa", a=a) == "a|a|a|"


@pytest.mark.parametrize("drops", [True, False])
def test_iterations_are_steps_where_gradients_are_dropped_and_nothing_steps(drops: bool) -> None:
    """Up to many passes an optimizer may accumulate; what is dropped after each pass is not."""
    cycle, over = made(Optimizer()), 0
    for _ in range(2 * NEVER_STEPS):
        over += cycle.next_batch()
        cycle.next_pass()
        if drops:
            cycle.zeroed()
            cycle.zeroed()  # of the model, too
    assert over == (NEVER_STEPS if drops else 0)
    a = Optimizer()
    assert cycle.stepped(a) and not cycle.next_batch()  # one that does step is what counts


def test_an_optimizer_that_steps_for_a_part_of_its_parameters_at_a_time() -> None:
    """DeepSpeed's ZeRO gives it one group after the other (stage_1_and_2.py: _optimizer_step)."""
    a = Optimizer()
    cycle, groups = made(a), [[{"params": [Parameter()]}] for _ in range(2)]
    seen = []
    for _ in range(3):
        cycle.next_pass()
        for a.param_groups in groups:
            seen.append(cycle.stepped(a))
    assert seen == [True, False] * 3
    # One after the other with a pass before each is a training that takes turns.
    for a.param_groups in groups * 2:
        cycle.next_pass()
        assert cycle.stepped(a)
    # Without any pass that is seen, the same parameters' turn is a step.
    assert [cycle.stepped(a) for _ in range(3)] == [True, True, True]


@pytest.mark.parametrize("critic", [1, 2, 5, 20])
def test_a_critic_steps_several_times_for_each_step_of_its_generator(critic: int) -> None:
    d, g = Optimizer(), Optimizer()
    cycle = made(d, g)
    cycle.called(g.parameters)  # it makes what the critic is given
    assert steps(cycle, ("d" * critic + "g") * 3, d=d, g=g) == ("d" * critic + "g|") * 3


def test_the_first_to_step_may_step_the_least() -> None:
    d, g = Optimizer(), Optimizer()
    cycle = made(d, g)
    cycle.called(d.parameters)
    assert steps(cycle, "gddddd" * 3, d=d, g=g).count("|") == 3


def test_optimizers_that_step_together_are_told_by_their_gradients() -> None:
    a, b = Optimizer(), Optimizer()
    b.parameters[0].grad = 1.0
    assert steps(made(a, b), "ababab", a=a, b=b) == "ab|ab|ab|"


def test_gradients_that_an_earlier_training_left_tell_nothing() -> None:
    a, earlier = Optimizer(), Optimizer()
    earlier.parameters[0].grad = 1.0
    cycle = StepCycle()
    for each in (a, earlier):
        cycle.made(each, before=True)
    assert steps(cycle, "aaa", a=a) == "a|a|a|"


def test_one_that_nothing_told_of_ends_the_periods_once_it_steps() -> None:
    c, a = Optimizer(), Optimizer()
    cycle = made(c, a)
    assert steps(cycle, "cca", c=c, a=a) == "c|c|a|" and cycle.partial_steps == 3
    assert steps(cycle, "ccacca", c=c, a=a) == "cca|cca|" and cycle.partial_steps == 3


def test_no_step_is_partial_where_its_optimizers_were_told_of() -> None:
    d, g = Optimizer(), Optimizer()
    cycle = made(d, g)
    cycle.called(g.parameters)
    steps(cycle, "dgdg", d=d, g=g)
    alone, other = Optimizer(), Optimizer()
    single = made(alone, other)  # what begins long after is another training
    steps(single, "a" * 30 + "b" * 5, a=alone, b=other)
    assert not cycle.partial_steps and not single.partial_steps


def test_one_optimizer_for_each_of_many_parameters() -> None:
    many = [Optimizer() for _ in range(200)]
    cycle = made(*many)
    cycle.called(each.parameters[0] for each in many)
    ends = [number for number, each in enumerate(many * 3) if cycle.stepped(each)]
    assert ends == [199, 399, 599]


def test_one_that_never_steps_is_awaited_for_a_while_only() -> None:
    a, never = Optimizer(), Optimizer()
    cycle = made(a, never)
    cycle.called(never.parameters)
    ends = [number for number in range(100) if cycle.stepped(a)]
    assert ends == list(range(32, 100))
    assert not cycle.awaits


def test_one_that_shares_its_parameters_is_not_awaited() -> None:
    """SAM holds the optimizer that it wraps, and steps by that alone."""
    inner = Optimizer()
    outer = Optimizer(*inner.parameters)
    inner.parameters[0].grad = 1.0
    cycle = made(outer, inner)
    cycle.called(inner.parameters)
    assert steps(cycle, "iii", i=inner) == "i|i|i|"


def test_a_frozen_one_is_not_awaited() -> None:
    a, frozen = Optimizer(), Optimizer()
    frozen.parameters[0].requires_grad = False
    cycle = made(a, frozen)
    cycle.called(frozen.parameters)
    assert steps(cycle, "aaa", a=a) == "a|a|a|"


def test_a_hundred_steps_of_the_critic_are_learnt() -> None:
    d, g = Optimizer(), Optimizer()
    cycle = made(d, g)
    cycle.called(g.parameters)
    found = steps(cycle, ("d" * 100 + "g") * 4, d=d, g=g)
    assert found.endswith(("d" * 100 + "g|") * 3)
    assert not cycle.restarted


def test_an_optimizer_that_appears_after_a_warm_up() -> None:
    g, d = Optimizer(), Optimizer()
    found = steps(made(g, d), "g" * 50 + "dg" * 10, g=g, d=d)
    assert found.startswith("g|" * 50) and found.endswith("dg|" * 8)


def test_one_that_is_not_used_any_more() -> None:
    d, g = Optimizer(), Optimizer()
    cycle = made(d, g)
    cycle.called(g.parameters)
    steps(cycle, "dg" * 10, d=d, g=g)
    assert steps(cycle, "d" * 60, d=d).endswith("d|" * 20)


def test_an_optimizer_that_is_made_anew_in_each_period() -> None:
    """The inner steps of Reptile or MAML, and the outer one."""
    outer = Optimizer()
    cycle = made(outer)
    found = []
    for _ in range(6):
        inner = Optimizer()
        cycle.made(inner)
        cycle.called(inner.parameters)
        found.append(steps(cycle, "iiio", i=inner, o=outer))
        del inner
    assert found[1:] == ["iiio|"] * 5
    assert not cycle.restarted


def test_another_training_begins() -> None:
    a, b = Optimizer(), Optimizer()
    cycle = made(a, b)
    assert steps(cycle, "a" * 30, a=a) == "a|" * 30
    assert cycle.stepped(b) and cycle.restarted
    assert cycle.stepped(b) and not cycle.restarted


def test_a_training_whose_optimizer_is_gone_is_over() -> None:
    a = Optimizer()
    cycle = made(a)
    cycle.stepped(a)
    del a
    gc.collect()
    b = Optimizer()
    assert cycle.stepped(b) and cycle.restarted
    assert cycle.optimizer == "Optimizer"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(10, 20))
def test_whatever_the_period_is_it_is_found(period: list[str], times: int) -> None:
    optimizers = {name: Optimizer() for name in "abc"}
    cycle = made(*optimizers.values())
    ends = [cycle.stepped(optimizers[each]) for each in period * times]
    # From the third period on: as many steps in each, and at the same places.
    chunks = [ends[at : at + len(period)] for at in range(2 * len(period), len(ends), len(period))]
    assert all(chunk == chunks[0] for chunk in chunks) and any(chunks[0])


# -- steps within steps ----------------------------------------------------------------------------


def test_a_step_that_another_optimizer_calls_is_within_its() -> None:
    cycle, outer, inner = StepCycle(), Optimizer(), Optimizer()
    frame = sys._getframe()

    def step_of_inner() -> bool:
        cycle.enter(inner, sys._getframe())
        return cycle.leave(inner)

    cycle.enter(outer, frame)
    assert not step_of_inner()
    assert cycle.leave(outer)


def test_a_step_that_calls_the_step_of_its_base_class_is_one() -> None:
    cycle, optimizer = StepCycle(), Optimizer()

    def step_of_base() -> bool:
        cycle.enter(optimizer, sys._getframe())
        return cycle.leave(optimizer)

    cycle.enter(optimizer, sys._getframe())
    assert not step_of_base() and cycle.depth == 1
    assert cycle.leave(optimizer) and not cycle.depth


def test_an_optimizer_that_took_the_place_of_the_users_is_not_waited_for() -> None:
    """Accelerate makes DeepSpeed's of the same parameters, which steps with parts of its own."""
    users = Optimizer(Parameter(), Parameter())
    for replaced in (True, False):
        cycle = made(users)
        own = Optimizer(*(users.parameters if replaced else (Parameter(),)))
        cycle.made(own)
        cycle.constructed(own)
        own.param_groups[0]["params"] = [Parameter()]
        cycle.called(users.parameters)
        cycle.next_pass()
        assert steps(cycle, "b", b=own) == ("b|" if replaced else "b")


def test_a_step_that_an_exception_left_hides_no_other() -> None:
    cycle, failed, later = StepCycle(), Optimizer(), Optimizer()

    def fails() -> None:
        cycle.enter(failed, sys._getframe())
        raise MemoryError

    with pytest.raises(MemoryError):
        fails()

    def works() -> bool:
        cycle.enter(later, sys._getframe())
        return cycle.leave(later)

    assert works()


def test_steps_that_are_none_of_the_scripts() -> None:
    cycle, own = StepCycle(), Optimizer()
    cycle.ignore(own)
    cycle.enter(own, sys._getframe())
    assert not cycle.leave(own)


# -- without an optimizer --------------------------------------------------------------------------


def loop(cycle: StepCycle, events: str, times: int) -> list[int]:
    """Steps that are over in each iteration: batch, call of a model, pass of gradients."""
    happens = {"b": cycle.next_batch, "c": cycle.next_call, "p": cycle.next_pass}
    return [sum(happens[each]() for each in events) for _ in range(times)]


@pytest.mark.parametrize("iteration", ["bcp", "cp", "p", "bp", "bbcp", "bcpcp"])
def test_iterations_are_steps_without_an_optimizer(iteration: str) -> None:
    cycle = StepCycle()
    cycle.counts_every_pass = True
    assert loop(cycle, iteration, 10) == [0] + [1] * 9
    learning = loop(StepCycle(), iteration, 20)
    assert learning[-10:] == [1] * 10 and sum(learning[:4]) == 0


def test_passes_are_accumulated_where_an_optimizer_was_made() -> None:
    a = Optimizer()
    cycle = made(a)
    assert not any(loop(cycle, "bcp", 100))
    assert cycle.stepped(a)


def test_a_gradient_that_trains_is_one_by_parameters() -> None:
    cycle = StepCycle()
    assert cycle.is_pass([Parameter()], False) and cycle.is_pass(Parameter(), None)
    assert not cycle.is_pass([Parameter()], True)  # it is differentiated again
    assert not cycle.is_pass([SimpleNamespace(is_leaf=False)], False)
    optimizer = Optimizer()
    assert not made(optimizer).is_pass([Parameter()], False)


def test_the_end_of_the_script_ends_the_only_step() -> None:
    d, g = Optimizer(), Optimizer()
    cycle = made(d, g)
    cycle.called(g.parameters)
    assert not cycle.is_unfinished
    assert steps(cycle, "ddd", d=d) == "ddd" and cycle.is_unfinished


def test_steps_before_a_training_that_goes_on_are_none() -> None:
    a = Optimizer()
    cycle = made(a)
    assert [cycle.only_resumes(a) for _ in range(3)] == [True] * 3
    cycle.next_pass()
    assert not cycle.only_resumes(a)


@pytest.mark.parametrize(
    "how", ["its model was called", "it has a gradient", "it was there before"]
)
def test_first_steps_of_a_training(how: str) -> None:
    a = Optimizer()
    cycle = StepCycle()
    cycle.made(a, before=how == "it was there before")
    if how == "its model was called":
        cycle.called(a.parameters)
    a.parameters[0].grad = 1.0 if how == "it has a gradient" else None
    assert not cycle.only_resumes(a)


def test_a_step_without_gradients_after_a_pass_resumes_nothing() -> None:
    """An optimizer of another model's parameters (made before FSDP shards them) never has any."""
    a = Optimizer()
    cycle = made(a)
    assert cycle.only_resumes(a)
    cycle.passed()
    assert not cycle.only_resumes(a)
