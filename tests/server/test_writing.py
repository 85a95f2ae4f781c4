"""What is written behind a prompt: what of it may be told already, how it stands beside the prompt,
which lengths are weighed.
"""

from collections.abc import Callable

import pytest

from tests.generation.texts import (
    llama_tokenizer,
    make,
    metaspace_tokenizer,
    t5_tokenizer,
    wordpiece_tokenizer,
)
from tracformer.data import Tokenizer
from tracformer.generation.samplers import Sampler
from tracformer.server.completion import (
    LENGTHS,
    CompletionOptions,
    complete,
    length_prior,
    read_prompt,
)
from tracformer.server.streaming import PartialText


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    letters = dict(enumerate("abcxyz"))
    growing = PartialText(lambda ids: "".join(letters[i] for i in ids), eot=9, stops=("xyz", "bb"))
    told = []
    for token in (0, 3, 4, 1, 0, 3, 4, 5, 0):
        growing.add(token, -1.0)
        told.append(growing.release()[0])
    assert told == ["a", "", "", "xy", "ba", "", "", "", ""]
    growing.finish()
    assert (growing.text, growing.stopped, growing.release(finished=True)) == (
        "axyba",
        "xyz",
        ("", []),
    )


def test_half_a_character_is_held_back() -> None:
    raw = "a€".encode()
    growing = PartialText(lambda ids: bytes(ids).decode("utf-8", "replace"), eot=999)
    told = []
    for byte in raw:
        growing.add(byte, -1.0)
        told.append(growing.release())
    assert [text for text, _ in told] == ["a", "", "", "€"]
    assert [[piece.start for piece in tokens] for _, tokens in told] == [[0], [], [], [1, 1, 1]]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, LENGTHS), (1, 16), (3, 128), (1, 1000)])
def test_the_lengths_that_are_weighed_stand_for_all(low: int, high: int) -> None:
    prior = length_prior(low, high)
    assert len(prior) <= LENGTHS
    assert min(prior) == low
    assert max(prior) == high
    assert sum(prior.values()) == pytest.approx(high - low + 1)
    assert min(prior.values()) > 0


@pytest.mark.parametrize(
    "maker", [metaspace_tokenizer, llama_tokenizer, t5_tokenizer, wordpiece_tokenizer]
)
def test_words_stand_apart_from_the_prompt_as_the_tokeniser_spells_both(
    maker: Callable[[], Tokenizer],
) -> None:
    lm = make(maker())
    only = Sampler(allowed=(lm.tokenizer.encode("cat")[0],))
    for prompt, text in (
        ("the", " cat cat"),
        ("the ", "cat cat"),
        ("", "cat cat"),
        (tuple(lm.tokenizer.encode("the")), " cat cat"),
    ):
        for suffix in ("", " the"):
            told: list[str] = []
            options = CompletionOptions(suffix, min_tokens=2, max_tokens=2, sampler=only)
            [written] = complete(
                lm,
                read_prompt(lm, prompt),
                options,
                0,
                lambda _, text, __, told=told: told.append(text),  # type: ignore[misc]
            )
            assert written.text == "".join(told) == text
            assert [piece.start for piece in written.tokens] == ([0, 4] if prompt else [0, 3])
