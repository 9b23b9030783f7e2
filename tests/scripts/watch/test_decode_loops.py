"""Loops of a script's own that ask a model for one more token with each call."""

from __future__ import annotations

import torch

from trainfit.scripts.caches import (
    CountedCalls,
    DecodeLoop,
    Signature,
    follows,
    integers_of,
    signature_of,
)


def called_with(*shapes: tuple[int, ...]) -> Signature:
    return tuple((str(place), shape) for place, shape in enumerate(shapes))


def loop_of(*signatures: Signature) -> tuple[DecodeLoop, list[bool]]:
    """A loop after calls of one model with these, and which of them were for a further token."""
    loop, module = DecodeLoop(), torch.nn.Identity()
    found = []
    for step, signature in enumerate(signatures, start=1):
        loop.given(module, signature)
        found.append(loop.called(step))
    return loop, found


def test_a_call_follows_another_with_as_much_or_one_position_more() -> None:
    one = called_with((4, 1), (4, 30))
    assert follows(one, one) and follows(one, called_with((4, 1), (4, 31)))
    assert not follows(one, called_with((4, 1), (4, 32)))
    assert not follows(one, called_with((4, 1), (4, 29)))
    assert not follows(one, called_with((4, 1)))
    assert not follows(one, called_with((4, 1), (4, 30, 1)))
    assert not follows((), ())


def test_a_prompt_and_single_positions_are_a_text() -> None:
    loop, tokens = loop_of(called_with((4, 20)), *[called_with((4, 1))] * 5)
    assert tokens == [False, *[True] * 5]
    text = loop.text()
    assert (text.prefill, text.decodes, text.prompt, text.rows) == (0, 5, 20, 4)


def test_a_model_that_reads_integers_of_its_own_reads_its_text() -> None:
    """The caches of such a loop may have their full length from the first call on."""

    def is_of_tokens(*calls: tuple[torch.nn.Module, torch.Tensor]) -> bool:
        loop = DecodeLoop()
        for step, (module, given) in enumerate(calls, start=1):
            loop.given(module, signature_of((given,), {}), integers_of((given,), {}))
            loop.called(step)
        return loop.is_of_tokens

    model, other = torch.nn.Identity(), torch.nn.Identity()
    prompt, token = torch.zeros(4, 20).long(), torch.zeros(4, 1).long()
    assert is_of_tokens((model, prompt), *[(model, token)] * 4)
    assert not is_of_tokens((other, prompt), *[(model, token)] * 4)  # a class of each row
    assert not is_of_tokens((model, prompt.float()), *[(model, token.float())] * 4)
    assert not is_of_tokens((model, prompt[:2]), *[(model, token)] * 4)
    assert not is_of_tokens(*[(model, prompt)] * 5)


def test_an_input_that_grows_is_a_text_without_a_cache() -> None:
    loop, tokens = loop_of(*(called_with((4, 20 + more)) for more in range(5)))
    assert tokens == [*[False] * 3, True, True]  # a batch or two may be longer by chance
    assert (loop.text().prefill, loop.text().decodes, loop.text().prompt) == (0, 4, 20)


def test_batches_of_one_shape_are_none() -> None:
    assert loop_of(*[called_with((8, 3, 32, 32))] * 6)[1] == [False] * 6
    assert loop_of(*[called_with((8, 1, 28, 28))] * 6)[1] == [False] * 6


def test_the_next_prompt_begins_another_text() -> None:
    prompt, token = called_with((4, 20)), called_with((4, 1))
    loop, tokens = loop_of(prompt, token, token, prompt, token)
    assert tokens == [False, True, True, False, True]
    assert (loop.text().prefill, loop.text().decodes) == (3, 1)


def test_calls_are_counted_with_what_the_first_of_them_gave() -> None:
    module, counted, over = torch.nn.Linear(8, 8), [], []
    token = torch.zeros(4, 8)
    calls = CountedCalls(
        module, signature_of((token,), {}), lambda: counted.append(1), lambda _: over.append(1)
    )
    given = [module(token) for _ in range(7)]
    assert len(counted) == 7 and not over and all(each is given[0] for each in given)
    assert module(torch.zeros(9, 8)).shape == (9, 8) and over == [1] and len(counted) == 7
    calls.remove()
    assert "forward" not in vars(module) and module(token) is not given[0]
