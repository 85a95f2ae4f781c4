"""The page's links, code, scores and errors; themes, narrow screens, sequences, accessibility."""

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx
import pytest

import tracformer
from tests.server.helpers import running
from tests.server.page.conftest import Open, Screen, Site, shown
from tracformer.generation import template as blanks
from tracformer.generation.request_options import ORDERS, InfillOptions, flat_options
from tracformer.server import Limits

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
    transferred = screens(texts).page.evaluate(sizes)  # nothing is cached yet
    assert len(transferred) > 10
    assert sum(transferred) < 100_000


def test_no_file_contains_another_address() -> None:
    for file in sorted(FILES.iterdir()):
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", file.read_text())) - {
            "http://www.w3.org/2000/svg"
        }
        assert not addresses, file.name


def test_a_link_restores_text_settings_and_fill(screen: Screen, screens: Open) -> None:
    screen.fill(TEXT, mode="ac", order="random", temperature="0.5", top_p="0.9", n=2)
    screen.page.wait_for_url(re.compile("seed="))  # the drawn seed
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


def test_the_pages_settings_are_options_of_infill() -> None:
    found = re.search(r"DEFAULTS = \{(.*?)\}", (FILES / "settings.js").read_text())
    assert found
    defaults = json.loads("{" + re.sub(r"(\w+):", r'"\1":', found[1]) + "}")
    options = flat_options(InfillOptions)
    for name, default in defaults.items():
        assert default in (None, options[name].default)
    html = (FILES / "index.html").read_text()
    assert set(re.findall(r'<option value="([a-z-]+)"', html)) == set(ORDERS)
    for name in set(defaults) - {"quality", "mode", "order"}:
        field = re.search(rf'<input [^>]*id="{name}"[^>]*>', html)
        assert field
        values = {key: float(value) for key, value in re.findall(r'(min|max)="([^"]+)"', field[0])}
        bounds = options[name].info.bounds
        assert bounds is None or all(map(bounds.allow, values.values()))
    assert 'id="n" min="1" max="16"' in html
    assert Limits().n == 16


@pytest.mark.parametrize("text", [TEXT, 'don\'t [[2]] "the" \\[[ mat'])
def test_the_curl_command_gives_the_same_fill(screen: Screen, text: str) -> None:
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


def test_the_python_code_gives_the_same_fill(
    screen: Screen, capsys: pytest.CaptureFixture[str]
) -> None:
    screen.fill(TEXT, n=2, temperature="0.8", mode="ac")
    screen.page.click("#code")
    screen.page.get_by_role("tab", name="Python").click()
    exec(compile(screen.page.inner_text("#code-text"), "page", "exec"), {})
    assert screen.filled in capsys.readouterr().out


def test_the_score_is_of_the_whole_text(screen: Screen) -> None:
    screen.fill(TEXT, seed=3)
    screen.page.click("#score")
    screen.page.wait_for_selector("#score-figures:visible")
    scored = screen.site.lm.score(blanks.write(["", ""], [screen.filled]), mode="ar")
    assert f"log p {shown(scored.log_prob)}," in screen.page.inner_text("#score-figures")


def test_marked_parts_are_scored(screen: Screen) -> None:
    screen.write("the [[cat]] sat")
    screen.page.click("#score")
    screen.page.wait_for_selector("#score-figures:visible")
    scored = screen.site.lm.score("the [[cat]] sat")
    found = screen.page.inner_text("#score-figures")
    assert found.startswith(f"Marked parts: log p {shown(scored.log_prob)},")


def test_blanks_of_other_programs_are_filled(screen: Screen) -> None:
    screen.fill("the ____ sat on [MASK] [MASK] mat", seed=3)
    assert screen.text == "the [[]] sat on [[]] mat"


def test_marks_are_parsed_and_written_as_in_the_library(screen: Screen) -> None:
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


def test_errors_of_the_server_are_shown(texts: Site, screens: Open) -> None:
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


def test_a_busy_server_is_tried_again_after_the_time_it_names(texts: Site, screens: Open) -> None:
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
    retry.click()  # waits until it is enabled
    screen.page.wait_for_selector("#figures div")
    assert not screen.page.is_visible("#error")


def test_a_server_with_a_key_is_sent_one(
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


def test_a_browser_without_storage_works(texts: Site, browser: "Browser") -> None:
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


def test_a_lost_connection_is_shown(texts: Site, screens: Open) -> None:
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


SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")

CONTRAST = """selectors => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgb = (colour) => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (node) => {
        for (; node; node = node.parentElement) { const c = rgb(getComputedStyle(node).backgroundColor); if (c[3] === 255) return c; }
        return [255, 255, 255];
    };
    const ratios = {};
    for (const selector of selectors) for (const node of document.querySelectorAll(selector)) {
        const [a, b] = [luminance(rgb(getComputedStyle(node).color)), luminance(ground(node))].sort((x, y) => y - x);
        ratios[selector] = Math.min(ratios[selector] ?? 99, (a + 0.05) / (b + 0.05));
    }
    return ratios;
}"""
READ = """
    h1, .intro p, code, .example, .pane h2, .pill > span, #sheet, #sheet .token, #sheet .letter, .position,
    #figures dt, #figures dd, .legend span, .settings label, .settings b, #fill, .bottom p, .bottom a,
    .candidate .word, .odds, .keep, .classes li, #model-facts
"""
NAMES = [name.strip() for name in READ.split(",")]


def test_examples_are_filled_and_text_has_enough_contrast(
    texts: Site, genes: Site, proteins: Site, screens: Open
) -> None:
    seen: dict[tuple[str, str], float] = {}
    for site in (texts, genes, proteins):
        screen = screens(site)
        for example in screen.page.locator(".example").all():
            assert blanks.parse(example.get_attribute("title") or "").contents
        screen.page.locator(".example").first.click()
        screen.page.wait_for_selector("#figures div")
        screen.page.locator(".token").first.focus()
        screen.page.wait_for_selector("#candidates:visible")
        for scheme in SCHEMES:
            screen.page.emulate_media(color_scheme=scheme)
            for name, ratio in screen.page.evaluate(CONTRAST, NAMES).items():
                seen[scheme, name] = min(ratio, seen.get((scheme, name), 99))
    assert len(seen) == 2 * len(NAMES)
    assert {name: round(ratio, 2) for name, ratio in seen.items() if ratio < 4.5} == {}


def test_the_theme_follows_the_system_until_switched(texts: Site, screens: Open) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light, dark = screens(texts, color_scheme="light"), screens(texts, color_scheme="dark")
    colours = light.page.evaluate(ground), dark.page.evaluate(ground)
    assert colours[0] != colours[1]
    light.page.click("#theme")
    assert light.page.evaluate(ground) == colours[1]
    light.page.reload()
    light.page.wait_for_selector("body[data-ready]")
    assert light.page.evaluate(ground) == colours[1]


def test_a_narrow_screen_never_scrolls_sideways(texts: Site, genes: Site, screens: Open) -> None:
    for site in (texts, genes):
        screen = screens(site, width=360, has_touch=True)
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert screen.page.evaluate(wide) == 0
        screen.page.locator(".example").first.tap()
        screen.page.wait_for_selector("#figures div")
        assert screen.page.evaluate(wide) == 0
        screen.page.locator("#sheet .token").first.tap()
        box = screen.page.locator("#candidates").bounding_box()
        token = screen.page.locator("#sheet .token").first.bounding_box()
        assert box is not None
        assert token is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert token["y"] + token["height"] <= box["y"]
        assert screen.page.evaluate(wide) == 0
        screen.page.keyboard.press("Escape")
        screen.page.click("#help")
        assert screen.page.evaluate(wide) == 0
    long = "a" * 300 + " [[2]]"
    screen.page.keyboard.press("Escape")
    screen.write(long)
    assert screen.page.evaluate(wide) == 0


def test_sequences_are_shown_in_groups_of_ten(genes: Site, screens: Open) -> None:
    screen = screens(genes)
    screen.fill("ACGTACGT[[5]]TTGACAGGCA", seed=1)
    tens = screen.page.locator(".ten")
    letters = [
        tens.nth(i).locator(".letter, .token").all_text_contents() for i in range(tens.count())
    ]
    assert [len(ten) for ten in letters] == [10, 10, 3]
    [expected] = genes.lm.infill("ACGTACGT[[5]]TTGACAGGCA", seed=1)
    assert "".join(letter for ten in letters for letter in ten) == expected.text
    assert screen.page.locator(".position").all_text_contents() == ["1", "11", "21"]
    colours = screen.page.locator(".ten .letter").evaluate_all(
        "all => all.slice(0, 4).map(letter => getComputedStyle(letter).color)"
    )
    assert len(set(colours)) == 4
    assert (
        "mono"
        in screen.page.evaluate(
            "getComputedStyle(document.getElementById('sheet')).fontFamily"
        ).lower()
    )


def test_the_end_of_text_cannot_be_locked(genes: Site, screens: Open) -> None:
    screen = screens(genes)
    screen.fill("ACGTACGT[[5]]TTGACAGGCA", seed=1)
    screen.page.locator(".token").first.focus()
    lockable = {
        text: screen.page.locator(".candidate").nth(i).is_enabled()
        for i, text in enumerate(screen.page.locator(".word").all_text_contents())
    }
    assert lockable == {"A": True, "C": True, "G": True, "T": True, "<|endoftext|>": False}


def test_pasted_fasta_becomes_a_sequence(genes: Site, screens: Open) -> None:
    screen = screens(genes)
    screen.write("")
    screen.page.focus("#text")
    screen.page.evaluate("""() => {
        const data = new DataTransfer();
        data.setData('text/plain', '>seq 1\\nacgt acg\\nTTT[[3]]A\\n');
        document.getElementById('text').dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}));
    }""")
    assert screen.text == "ACGTACGTTT[[3]]A"


def test_every_control_has_an_accessible_name(screen: Screen) -> None:
    screen.fill("the cat [[3]] the mat", seed=1)
    screen.page.locator(".token").first.focus()
    nameless = screen.page.evaluate("""() => {
        const named = (node) => node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length || node.title;
        const pressed = document.querySelectorAll('button, input, select, textarea, [role=button], [role=slider]');
        return [...pressed].filter(node => !named(node)).map(node => node.outerHTML);
    }""")
    assert nameless == []
    assert screen.page.get_attribute("#live", "aria-live") == "polite"
    assert screen.page.get_attribute("#error", "role") == "alert"
