"""A real browser on a real server with tiny models. Each test fails if the console shows an error or
a request goes to another server.

Without playwright or a browser these tests are skipped; with TRACFORMER_REQUIRE_BROWSER=1 they fail.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from tests.server.helpers import running
from tests.toys import small_model
from tracformer import LanguageModel
from tracformer.data import Tokenizer, char_tokenizer, train_bpe

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

WORDS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "once upon a time there was a cat",
    "the dog sat",
] * 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Site:
    url: str
    lm: LanguageModel


@dataclass
class Screen:
    """An open page, with its console messages and requests."""

    page: "Page"
    site: Site
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, fragment: str = "", ready: bool = True) -> None:
        self.page.goto(f"{self.site.url}/{fragment}")
        if ready:
            self.page.wait_for_selector("body[data-ready]")

    def write(self, text: str) -> None:
        self.page.fill("#text", text)

    def fill(self, text: str | None = None, **settings: Any) -> None:
        """Press Fill and wait for the result."""
        if text is not None:
            self.write(text)
        for name, value in settings.items():
            field = self.page.locator(f"#{name}")
            if field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(str(value))
            else:
                field.fill(str(value))
        self.page.evaluate("document.getElementById('figures').replaceChildren()")
        self.page.click("#fill")
        self.page.wait_for_selector("#figures div")

    @property
    def text(self) -> str:
        return str(self.page.input_value("#text"))

    @property
    def filled(self) -> str:
        """The filled text as it is shown."""
        return str(self.page.evaluate("document.getElementById('sheet').textContent"))

    def tokens(self, kind: str = "") -> list[str]:
        return [str(text) for text in self.page.locator(f"#sheet .token{kind}").all_text_contents()]


def shown(log_prob: float) -> str:
    """Return a number as the page writes it, with a real minus sign."""
    return f"{log_prob:.2f}".replace("-", "\u2212")


def _give_up(reason: str) -> NoReturn:
    if os.environ.get("TRACFORMER_REQUIRE_BROWSER") == "1":
        pytest.fail(f"TRACFORMER_REQUIRE_BROWSER is 1, but {reason}", pytrace=False)
    pytest.skip(
        f"{reason}; the page's tests need one (pip install playwright; apt install chromium)"
    )


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _give_up("there is no playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        _give_up(f"there is no browser ({', '.join(BROWSERS)})")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield launched
        launched.close()


def _text_model() -> LanguageModel:
    """A random model that generates only tokens of more than one character: single bytes are mostly
    not text.
    """
    tokenizer = train_bpe(WORDS, 300)
    model = small_model(
        vocab_size=tokenizer.vocab_size, max_length=128, n_layer=7, modes=("car", "ac", "ar")
    )
    with torch.no_grad():
        model.norm.weight[0], model.norm.bias[0] = 0.0, 12.0
        for i, token in enumerate(tokenizer.tokens()):
            model.embedding.weight[i, 0] = 1.0 if len(token) > 1 else -1.0
    return LanguageModel(model, tokenizer)


def _sequence_model(tokenizer: Tokenizer) -> LanguageModel:
    return LanguageModel(
        small_model(
            vocab_size=tokenizer.vocab_size, max_length=128, n_layer=7, modes=("car", "ac", "ar")
        ),
        tokenizer,
    )


@contextmanager
def serving(lm: LanguageModel) -> Iterator[Site]:
    with running(lambda: lm) as server:
        yield Site(server.url, lm)


@pytest.fixture(scope="session")
def texts(browser: "Browser") -> Iterator[Site]:
    with serving(_text_model()) as site:
        yield site


@pytest.fixture(scope="session")
def genes(browser: "Browser") -> Iterator[Site]:
    with serving(_sequence_model(char_tokenizer("ACGT"))) as site:
        yield site


@pytest.fixture(scope="session")
def proteins(browser: "Browser") -> Iterator[Site]:
    with serving(_sequence_model(char_tokenizer("ACDEFGHIKLMNPQRSTVWY"))) as site:
        yield site


@contextmanager
def _watched(context: "BrowserContext", site: Site, expected: str = "") -> Iterator[Screen]:
    """Open a page; `expected` is text that its console may show."""
    screen = Screen(context.new_page(), site)
    screen.page.on(
        "console",
        lambda message: (
            screen.console.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    screen.page.on("pageerror", lambda error: screen.console.append(str(error)))
    screen.page.on("request", lambda request: screen.requests.append(request.url))
    yield screen
    screen.page.close()
    assert [line for line in screen.console if not expected or expected not in line] == []
    assert screen.requests
    assert all(url.startswith(screen.site.url) for url in screen.requests)


def _context(browser: "Browser", width: int = 1280, **options: Any) -> "BrowserContext":
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    context.set_default_timeout(30_000)
    return context


Open = Callable[..., Screen]


@pytest.fixture
def screens(browser: "Browser") -> Iterator[Open]:
    """Return a function that opens screens, as in `screens(site, width=360, color_scheme="dark")`."""
    with ExitStack() as stack:

        def make(
            site: Site, expected: str = "", fragment: str = "", ready: bool = True, **options: Any
        ) -> Screen:
            context = stack.enter_context(_context(browser, **options))
            screen = stack.enter_context(_watched(context, site, expected))
            screen.open(fragment, ready)
            return screen

        yield make


@pytest.fixture(scope="session")
def desktop(browser: "Browser") -> Iterator["BrowserContext"]:
    with _context(browser) as context:
        yield context


@pytest.fixture
def screen(texts: Site, desktop: "BrowserContext") -> Iterator[Screen]:
    with _watched(desktop, texts) as opened:
        opened.open()
        yield opened
