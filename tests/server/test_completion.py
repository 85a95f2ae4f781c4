"""Completions: what can be sent already, spaces after the prompt, weights of lengths."""

from collections.abc import Callable

import pytest

from tests.toys import (
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


def test_the_possible_beginning_of_a_stop_string_is_held_back() -> None:
    letters = dict(enumerate("abcxyz"))
    growing = PartialText(lambda ids: "".join(letters[i] for i in ids), eot=9, stops=("xyz", "bb"))
    found = []
    for token in (0, 3, 4, 1, 0, 3, 4, 5, 0):
        growing.add(token, -1.0)
        found.append(growing.release()[0])
    assert found == ["a", "", "", "xy", "ba", "", "", "", ""]
    growing.finish()
    assert (growing.text, growing.stopped, growing.release(finished=True)) == (
        "axyba",
        "xyz",
        ("", []),
    )


def test_an_incomplete_character_is_held_back() -> None:
    raw = "a€".encode()
    growing = PartialText(lambda ids: bytes(ids).decode("utf-8", "replace"), eot=999)
    found = []
    for byte in raw:
        growing.add(byte, -1.0)
        found.append(growing.release())
    assert [text for text, _ in found] == ["a", "", "", "€"]
    assert [[piece.start for piece in tokens] for _, tokens in found] == [[0], [], [], [1, 1, 1]]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, LENGTHS), (1, 16), (3, 128), (1, 1000)])
def test_the_weights_of_lengths_sum_to_their_number(low: int, high: int) -> None:
    prior = length_prior(low, high)
    assert len(prior) <= LENGTHS
    assert min(prior) == low
    assert max(prior) == high
    assert sum(prior.values()) == pytest.approx(high - low + 1)
    assert min(prior.values()) > 0


@pytest.mark.parametrize(
    "maker", [metaspace_tokenizer, llama_tokenizer, t5_tokenizer, wordpiece_tokenizer]
)
def test_words_are_spaced_from_the_prompt_as_the_tokenizer_does(
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
            found: list[str] = []
            options = CompletionOptions(suffix, min_tokens=2, max_tokens=2, sampler=only)
            [written] = complete(
                lm,
                read_prompt(lm, prompt),
                options,
                0,
                lambda _, text, __, found=found: found.append(text),  # type: ignore[misc]
            )
            assert written.text == "".join(found) == text
            assert [piece.start for piece in written.tokens] == ([0, 4] if prompt else [0, 3])
