"""What leaves the page says the same as the page: links, code, scores; and what goes
wrong is told.
"""

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

import tracformer
from tests.server.helpers import running
from tests.server.page.conftest import Open, Screen, Site, shown
from tracformer.generation import template as blanks

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FILES = Path(tracformer.__file__).parent / "server" / "page"
TEXT = "the cat [[3]] the mat and [[2]] dog"
TRICKY = [
    "a [[3]] b",
    r"\[[2]] [[4]]",
    r"a \\[[3-8]] b",
    "[[[2]]] ]] [",
    r"x\\\[[ [[]]",
    "[[1]][[2]]",
    "a [[nonsense]]b",
    'don\'t "quote" [[5]]\n$HOME',
]


def test_the_page_is_small(texts: Site, screens: Open) -> None:
    sizes = (
        "['navigation', 'resource'].flatMap(kind => performance.getEntriesByType(kind)).map(entry "
        "=> entry.transferSize)"
    )
    transferred = screens(texts).page.evaluate(sizes)  # nothing is cached there
    assert len(transferred) > 10
    assert sum(transferred) < 100_000


def test_no_file_names_another_address() -> None:
    for file in sorted(FILES.iterdir()):
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", file.read_text())) - {
            "http://www.w3.org/2000/svg"
        }
        assert not addresses, file.name


def test_a_link_brings_back_text_settings_and_filling(screen: Screen, screens: Open) -> None:
    screen.fill(TEXT, mode="ac", order="random", temperature="0.5", top_p="0.9", n=2)
    screen.page.wait_for_url(re.compile("seed="))  # the one that was drawn
    screen.page.click("#link")
    other = screens(screen.site, fragment=screen.page.evaluate("location.hash"))
    other.page.wait_for_selector("#figures div")
    assert (other.text, other.filled) == (TEXT, screen.filled)
    for name, value in (
        ("mode", "ac"),
        ("order", "random"),
        ("temperature", "0.5"),
        ("top_p", "0.9"),
        ("n", "2"),
    ):
        assert other.page.input_value(f"#{name}") == value


@pytest.mark.parametrize("text", [TEXT, 'don\'t [[2]] "the" \\[[ mat'])
def test_the_curl_command_gives_the_same_filling(screen: Screen, text: str) -> None:
    screen.fill(text, n=2, top_p="0.9")
    screen.page.click("#code")
    screen.page.wait_for_selector("#code-dialog[open]")
    words = shlex.split(screen.page.inner_text("#code-text"))
    answer = (
        httpx.post(words[1], json=json.loads(words[words.index("-d") + 1]))
        .raise_for_status()
        .json()
    )
    assert answer["results"][0]["text"] == screen.filled


def test_the_python_lines_give_the_same_filling(
    screen: Screen, capsys: pytest.CaptureFixture[str]
) -> None:
    screen.fill(TEXT, n=2, temperature="0.8", mode="ac")
    screen.page.click("#code")
    screen.page.get_by_role("tab", name="Python").click()
    exec(compile(screen.page.inner_text("#code-text"), "page", "exec"), {})
    assert screen.filled in capsys.readouterr().out


def test_the_score_is_that_of_the_whole_text(screen: Screen) -> None:
    screen.fill(TEXT, seed=3)
    screen.page.click("#score")
    screen.page.wait_for_selector("#score-figures:visible")
    scored = screen.site.lm.score(blanks.write(["", ""], [screen.filled]), mode="ar")
    assert f"log p {shown(scored.log_prob)}," in screen.page.inner_text("#score-figures")


def test_marks_are_read_and_written_as_the_library_does(screen: Screen) -> None:
    read = """async texts => {
        const {parse, write} = await import('/page/marks.js');
        return texts.map(text => {
            const {pieces, marks} = parse(text), contents = marks.map(mark => mark.content);
            return [pieces, contents, write(pieces, contents)];
        });
    }"""
    for text, (pieces, contents, written) in zip(
        TRICKY, screen.page.evaluate(read, TRICKY), strict=True
    ):
        template = blanks.parse(text)
        assert (tuple(pieces), tuple(contents)) == (template.pieces, template.contents)
        assert written == blanks.write(template.pieces, template.contents)


def test_what_the_server_refuses_is_told(texts: Site, screens: Open) -> None:
    screen = screens(texts, expected="status of 400")
    screen.write("the [[200]] mat")
    screen.page.click("#fill")
    screen.page.wait_for_selector("#error:visible")
    assert "128" in screen.page.inner_text("#error")
    assert screen.page.inner_text("#fill") == "Fill"
    screen.write("the mat")
    assert not screen.page.is_visible("#error")
    screen.page.click("#fill")
    assert "No blank in the text" in screen.page.inner_text("#error")


def test_a_busy_server_is_tried_again_after_its_time(texts: Site, screens: Open) -> None:
    screen = screens(texts, expected="status of 429")
    refusal = {
        "error": {
            "message": "the queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": None,
        }
    }
    screen.page.route(
        "**/v1/infill",
        lambda route: route.fulfill(status=429, headers={"Retry-After": "1"}, json=refusal),
        times=1,
    )
    screen.write(TEXT)
    screen.page.click("#fill")
    retry = screen.page.get_by_role("button", name="Try again")
    retry.wait_for()
    assert "busy" in screen.page.inner_text("#error")
    assert retry.is_disabled()
    retry.click()  # waits until it may
    screen.page.wait_for_selector("#figures div")
    assert not screen.page.is_visible("#error")


def test_a_server_with_a_key_is_given_one(
    texts: Site, screens: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(lambda: texts.lm, api_key="open sesame") as server:
        screen = screens(Site(server.url, texts.lm), expected="status of 401", ready=False)
        screen.page.get_by_label("API key").fill("open sesame")
        screen.page.get_by_role("button", name="Use this key").click()
        screen.page.wait_for_selector("body[data-ready]")
        screen.fill(TEXT, seed=1)
        assert screen.filled == texts.lm.infill(TEXT, seed=1)[0].text
        screen.page.click("#code")
        screen.page.wait_for_selector("#code-dialog[open]")
        assert '-H "Authorization: Bearer $TRACFORMER_API_KEY"' in screen.page.inner_text(
            "#code-text"
        )
        screen.page.get_by_role("tab", name="Python").click()
        python = screen.page.inner_text("#code-text")
        assert "sesame" not in python
        monkeypatch.setenv("TRACFORMER_API_KEY", "open sesame")
        exec(compile(python, "page", "exec"), {})
        assert screen.filled in capsys.readouterr().out


def test_a_browser_that_keeps_nothing_is_served_too(texts: Site, browser: "Browser") -> None:
    forbidden = "get() { throw new DOMException('', 'SecurityError') }"
    with browser.new_context() as context:
        page = context.new_page()
        page.add_init_script(
            "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, "
            f"name, {{ {forbidden} }});"
        )
        page.goto(texts.url)
        page.wait_for_selector("body[data-ready]", timeout=30_000)
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_lost_connection_is_told(texts: Site, screens: Open) -> None:
    screen = screens(texts, expected="net::ERR")
    screen.page.route("**/v1/infill", lambda route: route.abort(), times=1)
    screen.write(TEXT)
    screen.page.click("#fill")
    screen.page.wait_for_selector("#error:visible")
    assert "No connection" in screen.page.inner_text("#error")
    screen.page.get_by_role("button", name="Try again").click()
    screen.page.wait_for_selector("#figures div")
    cut = 'event: start\ndata: {"id": "x", "model": "m", "seed": 1}\n\n'
    screen.page.route(
        "**/v1/infill",
        lambda route: route.fulfill(content_type="text/event-stream", body=cut),
        times=1,
    )
    screen.page.click("#fill")
    screen.page.wait_for_selector("#error:visible")
    assert "lost" in screen.page.inner_text("#error")
