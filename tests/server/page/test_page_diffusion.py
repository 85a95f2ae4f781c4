"""The page before models that have mode `diffusion`, with another or alone."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from tests.generation.test_diffusion_texts import model_of
from tests.server.page.conftest import WORDS, Open, Site, serving, shown
from tracformer import LanguageModel
from tracformer.data import train_bpe
from tracformer.generation.orders import ByConfidence

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TEXT = "the cat [[3]] the [[2]] mat"


def site_of(system: str) -> Iterator[Site]:
    tokenizer = train_bpe(WORDS, 300)
    model = model_of(system, tokenizer)
    with torch.no_grad():  # tokens of one byte are mostly no text
        bias = model.head_bias
        assert bias is not None
        for i, token in enumerate(tokenizer.tokens()):
            bias[i] += 0.0 if len(token) > 1 else -30.0
    with serving(LanguageModel(model, tokenizer)) as site:
        yield site


@pytest.fixture(scope="module")
def mdlm(browser: "Browser") -> Iterator[Site]:
    yield from site_of("mdlm")


@pytest.fixture(scope="module")
def plaid(browser: "Browser") -> Iterator[Site]:
    yield from site_of("plaid")


def test_the_preferred_mode_is_chosen_and_the_other_is_offered(mdlm: Site, screens: Open) -> None:
    screen = screens(mdlm)
    assert screen.page.locator("#mode option").all_text_contents() == [
        "AC: any order",
        "Diffusion: in its own steps",
    ]
    assert screen.page.input_value("#mode") == "ac"
    screen.fill(TEXT, seed=7)
    assert screen.filled == mdlm.lm.infill(TEXT, seed=7, order=ByConfidence("probability"))[0].text
    screen.fill(TEXT, seed=7, mode="diffusion")
    [expected] = mdlm.lm.infill(TEXT, seed=7, mode="diffusion")
    assert screen.filled == expected.text
    assert screen.page.is_disabled("#order")


def test_a_model_without_another_mode_fills_and_shows_candidates(
    plaid: Site, screens: Open
) -> None:
    screen = screens(plaid)
    assert screen.page.locator("#mode option").all_text_contents() == [
        "Diffusion: in its own steps"
    ]
    screen.fill(TEXT, seed=7)
    [expected] = plaid.lm.infill(TEXT, seed=7, top=6)
    assert screen.filled == expected.text
    assert screen.page.inner_text("#figures div:first-child dd") == shown(expected.log_prob)
    assert "when it was revealed" in str(
        screen.page.get_attribute("#figures div:first-child", "title")
    )
    screen.page.locator("#sheet .token").nth(1).hover()
    box = screen.page.locator("#candidates")
    box.wait_for()
    assert box.locator(".candidate").count() >= 6
    screen.page.mouse.move(0, 0)
    screen.page.click("#score")
    screen.page.wait_for_selector("#score-figures:visible")
    assert "DIFFUSION, bound" in screen.page.inner_text("#score-figures")
