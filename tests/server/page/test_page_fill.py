"""The page's editor and fills: the page shows the model's own fills, and locked tokens stay."""

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from tests.generation.test_reverse_process import model_of
from tests.server.page.conftest import WORDS, Open, Screen, Site, serving, shown
from tracformer import LanguageModel
from tracformer.data import train_bpe
from tracformer.generation.generation_config import FOR_TEXT
from tracformer.generation.orders import ByConfidence
from tracformer.server import native_protocol

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TEXT = "the cat [[3]] the mat and [[2]] dog"


def test_selected_words_become_a_blank_of_the_same_length(screen: Screen) -> None:
    screen.write("once upon a time there was a cat")
    # with the spaces around
    screen.page.evaluate("document.getElementById('text').setSelectionRange(4, 17)")
    screen.page.focus("#text")
    screen.page.click("#bubble")
    screen.page.wait_for_selector(".pill")
    count = len(screen.site.lm.tokenizer.encode(" upon a time"))
    assert screen.text == f"once [[{count}]] there was a cat"
    assert screen.page.locator("#sheet .token.open").count() == count
    screen.page.keyboard.press("Control+z")
    assert screen.text == "once upon a time there was a cat"


def test_typing_keeps_the_caret_and_draws_blanks_as_they_close(screen: Screen) -> None:
    screen.write("the mat")
    screen.page.evaluate("document.getElementById('text').setSelectionRange(3, 3)")
    screen.page.focus("#text")
    screen.page.keyboard.type(" cat [[2]] on a")
    assert screen.text == "the cat [[2]] on a mat"
    assert screen.page.locator(".pill").all_text_contents() == ["[[2]]"]
    screen.page.keyboard.type(" [[x]]")
    assert "not “x”" in screen.page.inner_text("#problem")
    assert screen.page.locator(".pill.wrong").count() == 1


def test_dragging_the_grip_changes_the_length(screen: Screen) -> None:
    screen.write("the [[3]] mat")
    box = screen.page.locator(".grip").bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    screen.page.mouse.move(x, y)
    screen.page.mouse.down()
    screen.page.mouse.move(x + 44, y, steps=4)
    # shown before the button is released
    assert screen.page.locator("#sheet .token.open").count() == 7
    assert screen.text == "the [[3]] mat"
    screen.page.mouse.up()
    assert screen.text == "the [[7]] mat"
    grip = screen.page.locator(".grip")
    for key, expected in (("ArrowLeft", "6"), ("Shift+ArrowRight", "6-7"), ("Delete", "")):
        grip.press(key)
        assert screen.text == f"the [[{expected}]] mat"
    assert grip.get_attribute("aria-valuetext") == "free length"
    for _ in range(4):
        screen.page.click("#undo")
    assert screen.text == "the [[3]] mat"


def test_the_length_can_be_typed(screen: Screen) -> None:
    screen.fill("the [[3]] mat", seed=1)
    screen.page.click(".grip")
    # opening the panel changes nothing
    assert screen.page.locator("#sheet .token:not(.open):not(.draft)").count() == 3
    screen.page.get_by_label("At most").fill("8")
    assert screen.text == "the [[3-8]] mat"
    screen.page.get_by_label("the model chooses").check()
    assert screen.text == "the [[]] mat"
    screen.page.keyboard.press("Escape")
    assert not screen.page.is_visible(".length-panel")


def test_the_page_shows_the_models_own_fill(screen: Screen) -> None:
    screen.fill(TEXT, seed=7)
    [expected] = screen.site.lm.infill(TEXT, seed=7)
    assert screen.filled == expected.text
    assert screen.page.inner_text("#figures div:first-child dd") == shown(expected.log_prob)
    shades = screen.page.locator("#sheet .token").evaluate_all(
        "tokens => tokens.map(token => Number(token.style.getPropertyValue('--p')) ** 2)"
    )
    shares = [share for span in expected.spans for share in span.log_probs]
    assert [round(shade, 2) for shade in shades] == pytest.approx(
        [round(2.718281828**share, 2) for share in shares], abs=0.011
    )
    assert expected.text in screen.page.inner_text("#live")


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send events slowly enough to be seen, also on a busy machine."""
    event = native_protocol.event
    monkeypatch.setattr(native_protocol, "event", lambda *data: time.sleep(0.05) or event(*data))


@pytest.mark.usefixtures("slowly")
def test_tokens_arrive_one_by_one_and_a_fill_can_be_stopped(screen: Screen) -> None:
    screen.write("the cat [[100]] mat")
    screen.page.evaluate("""
        const sheet = document.getElementById('sheet');
        const look = () => {
            if (document.body.dataset.stopped || sheet.querySelectorAll('.token:not(.open)').length <= 2) return;
            document.body.dataset.stopped = 'yes';
            document.getElementById('stop').click();
        };
        new MutationObserver(look).observe(sheet, {subtree: true, childList: true, attributes: true});
    """)
    screen.page.click("#fill")
    # wait_for_function polls by eval, which the page's policy forbids
    screen.page.wait_for_selector("body[data-stopped]")
    screen.page.wait_for_selector("#fill:visible")
    known = len(screen.tokens(":not(.open)"))
    assert 2 < known < 100
    screen.page.wait_for_timeout(200)
    assert len(screen.tokens(":not(.open)")) == known  # no more arrive


@pytest.mark.usefixtures("slowly")
def test_drafts_look_different_until_they_are_confirmed(screen: Screen) -> None:
    screen.page.evaluate("""
        window.drafts = new Set();
        const look = () => document.querySelectorAll('.token.draft').forEach(token => drafts.add(getComputedStyle(token).fontStyle));
        new MutationObserver(look).observe(document.getElementById('sheet'), {subtree: true, childList: true, attributes: true});
    """)
    screen.fill("the cat [[40]] the mat", seed=3, mode="ac", order="probability")
    assert screen.page.evaluate("[...drafts]") == ["italic"]
    assert screen.tokens(".draft") == []
    assert (
        screen.page.evaluate("getComputedStyle(document.querySelector('.token')).fontStyle")
        == "normal"
    )


def test_pointing_shows_candidates_and_choosing_one_locks_it(screen: Screen) -> None:
    screen.fill("the cat [[4]] the mat", seed=2)
    before = screen.tokens()
    screen.page.locator("#sheet .token").nth(1).hover()
    box = screen.page.locator("#candidates")
    box.wait_for()
    odds = [
        float(re.sub(r"[^0-9.]", "", text)) for text in box.locator(".odds").all_text_contents()
    ]
    assert len(odds) >= 2
    assert odds[:8] == sorted(odds[:8], reverse=True)
    assert box.locator(".candidate.same").count() == 1
    other = box.locator(".candidate:not(.same):enabled").first
    chosen = (other.locator(".word").text_content() or "").replace("␣", " ")
    other.click()
    assert screen.text == f"the cat [[1]]{chosen}[[2]] the mat"
    assert screen.tokens(".draft") == [before[0], *before[2:]]  # they belong to the earlier text
    screen.fill(seed=5)
    [expected] = screen.site.lm.infill(f"the cat [[1]]{chosen}[[2]] the mat", seed=5)
    assert screen.filled == expected.text
    screen.page.mouse.move(0, 0)


def test_a_locked_fill_stays_when_the_rest_is_filled_again(screen: Screen) -> None:
    screen.fill(TEXT, seed=1)
    [first] = screen.site.lm.infill(TEXT, seed=1)
    screen.page.locator(".lock").first.click()
    assert screen.text == f"the cat{first.spans[0].text} the mat and [[2]] dog"
    assert screen.page.inner_text("#fill") == "Fill the rest"
    screen.fill(seed=2)
    [second] = screen.site.lm.infill(screen.text, seed=2)
    assert screen.filled == second.text
    assert second.text.startswith(f"the cat{first.spans[0].text} the mat and")
    screen.page.click("#undo")
    # the lock is undone and the fills are back
    assert (screen.text, screen.filled) == (TEXT, first.text)


def test_undo_restores_the_previous_fill(screen: Screen) -> None:
    fills = {}
    for seed in (1, 2):
        screen.fill(TEXT, seed=seed)
        fills[seed] = screen.filled
    assert fills[1] != fills[2]
    screen.page.click("#undo")
    assert (screen.text, screen.filled) == (TEXT, fills[1])
    screen.page.click("#redo")
    assert (screen.text, screen.filled) == (TEXT, fills[2])


def test_paging_through_alternatives(screen: Screen) -> None:
    screen.fill(TEXT, seed=4, n=3)
    expected = [result.text for result in screen.site.lm.infill(TEXT, 3, seed=4)]
    seen = []
    for _ in range(3):
        seen.append(screen.filled)
        screen.page.click("#next")
    assert seen == expected
    assert screen.filled == expected[0]
    screen.page.click("#previous")
    assert screen.page.inner_text("#page-number") == "3 of 3"


def test_editing_keeps_the_fills_it_does_not_touch(screen: Screen) -> None:
    screen.fill(TEXT, seed=6)
    tokens = screen.tokens()
    screen.page.focus("#text")
    screen.page.keyboard.press("Control+End")
    screen.page.keyboard.type(" sat")
    assert screen.tokens() == tokens == screen.tokens(".draft")
    screen.page.locator(".grip").first.press("ArrowRight")
    assert screen.tokens(".draft") == tokens[3:]
    assert screen.page.locator(".token.open").count() == 4


def test_the_model_chooses_the_length_of_a_range(screen: Screen) -> None:
    screen.fill("the [[1-4]] mat", seed=9)
    [expected] = screen.site.lm.infill("the [[1-4]] mat", seed=9)
    assert screen.filled == expected.text
    assert len(screen.tokens()) == len(expected.spans[0].token_ids)


def test_everything_works_by_keyboard(screen: Screen) -> None:
    keyboard = screen.page.keyboard
    screen.page.focus("#text")
    keyboard.press("Control+a")
    keyboard.type("the cat sat on the mat")
    for _ in range(4):
        keyboard.press("ArrowLeft")
    keyboard.press("Control+b")  # the word at the caret
    screen.page.wait_for_selector(".pill")
    assert screen.text == "the cat sat on [[1]] mat"
    keyboard.press("Tab")
    assert screen.page.evaluate("document.activeElement.getAttribute('role')") == "slider"
    keyboard.press("ArrowRight")
    keyboard.press("Control+Enter")
    screen.page.wait_for_selector("#figures div")
    screen.page.focus("#text")
    keyboard.press("F6")
    assert screen.page.evaluate("document.activeElement.dataset.index") == "0"
    keyboard.press("ArrowRight")
    assert screen.page.evaluate("document.activeElement.dataset.index") == "1"
    assert "2 of 2 in blank 1" in (
        screen.page.evaluate("document.activeElement.getAttribute('aria-label')")
    )
    assert screen.page.is_visible("#candidates")
    keyboard.press("Enter")
    assert screen.page.evaluate("document.activeElement.className").startswith("candidate")
    keyboard.press("Escape")
    assert screen.page.evaluate("document.activeElement.dataset.index") == "1"
    keyboard.press("l")
    assert "[[" not in screen.text
    keyboard.press("Control+z")
    assert screen.text == "the cat sat on [[2]] mat"


# Models with mode `diffusion`

DIFFUSION_TEXT = "the cat [[3]] the [[2]] mat"


def site_of(system: str) -> Iterator[Site]:
    tokenizer = train_bpe(WORDS, 300)
    model = model_of(system, tokenizer)
    with torch.no_grad():  # single bytes are mostly not text
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


def test_the_default_mode_is_chosen_and_diffusion_is_offered(mdlm: Site, screens: Open) -> None:
    screen = screens(mdlm)
    assert screen.page.locator("#mode option").all_text_contents() == [
        "AC: any order",
        "Diffusion: reverse process",
    ]
    assert screen.page.input_value("#mode") == "ac"
    screen.fill(DIFFUSION_TEXT, seed=7)
    assert (
        screen.filled
        == mdlm.lm.infill(DIFFUSION_TEXT, seed=7, order=ByConfidence("probability"))[0].text
    )
    screen.fill(DIFFUSION_TEXT, seed=7, mode="diffusion")
    [expected] = mdlm.lm.infill(DIFFUSION_TEXT, seed=7, mode="diffusion")
    assert screen.filled == expected.text
    assert screen.page.is_disabled("#order")


def test_a_model_with_diffusion_only_fills_and_shows_candidates(plaid: Site, screens: Open) -> None:
    screen = screens(plaid)
    assert screen.page.locator("#mode option").all_text_contents() == ["Diffusion: reverse process"]
    screen.fill(DIFFUSION_TEXT, seed=7)
    [expected] = plaid.lm.infill(DIFFUSION_TEXT, seed=7, top=6)
    assert screen.filled == expected.text
    assert screen.page.inner_text("#figures div:first-child dd") == shown(expected.log_prob)
    assert "when each was filled" in str(
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


def test_the_page_fills_with_the_models_quality_unless_another_is_chosen(
    texts: Site, screens: Open
) -> None:
    lm = LanguageModel(texts.lm.model, texts.lm.tokenizer, generation=FOR_TEXT)
    with serving(lm) as site:
        screen = screens(site)
        assert screen.page.input_value("#quality") == "best"
        for name in ("mode", "order", "temperature", "top_p"):
            assert screen.page.locator(f"#{name}").is_disabled()
        screen.fill(TEXT, seed=1, n=2)
        [first, _] = lm.infill(TEXT, 2, seed=1)
        assert screen.filled == first.text
        screen.fill(quality="fast", n=1)
        assert screen.page.input_value("#temperature") == "0.8"
        assert screen.filled == lm.infill(TEXT, seed=1, quality="fast")[0].text
        screen.fill(temperature="1")  # a value that the model does not have
        expected = lm.infill(TEXT, seed=1, quality="fast", temperature=1.0)[0].text
        assert screen.filled == expected
        screen.page.wait_for_url(lambda url: "temperature=1" in url)
        other = screens(site, fragment=screen.page.evaluate("location.hash"))
        other.page.wait_for_selector("#figures div")
        assert other.page.input_value("#temperature") == "1"
        assert other.filled == expected
        screen.fill(quality="raw")
        assert screen.filled == lm.infill(TEXT, seed=1, quality="raw")[0].text
