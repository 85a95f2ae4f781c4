"""Readable by everybody: both themes, a narrow screen, sequences in groups of ten, names for all
that can be pressed.
"""

from typing import Literal

from tests.server.page.conftest import Open, Screen, Site
from tracformer.generation.template import parse

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


def test_examples_are_filled_at_once_and_text_stands_out_from_its_ground(
    texts: Site, genes: Site, proteins: Site, screens: Open
) -> None:
    seen: dict[tuple[str, str], float] = {}
    for site in (texts, genes, proteins):
        screen = screens(site)
        for example in screen.page.locator(".example").all():
            assert parse(example.get_attribute("title") or "").contents
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


def test_the_theme_follows_the_system_until_it_is_switched(texts: Site, screens: Open) -> None:
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


def test_sequences_stand_in_tens_under_their_positions(genes: Site, screens: Open) -> None:
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


def test_the_end_of_a_text_is_no_letter_to_lock(genes: Site, screens: Open) -> None:
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


def test_everything_that_can_be_pressed_has_a_name(screen: Screen) -> None:
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
