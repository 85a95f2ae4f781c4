"""Pictures of the page, at desktop and phone width: page-desktop.png, page-phone.png.

    python docs/pictures/page.py MODEL [--text "..."] [--seed 1] [--dark] [--out docs/pictures]

Serves the model, fills a text in a real browser (playwright, and chromium on the path) and takes
the pictures.
"""

import argparse
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

import tracformer
from tracformer.server import Settings
from tracformer.server.app import Server

TEXT = (
    "Once upon a time, there was a little girl named Lily. One day she found [[5]] in the garden. "
    '[[12]] Her mom smiled and said, "[[6]]." They went home and were happy.'
)
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}


@contextmanager
def serving(model: str, name: str) -> Iterator[str]:
    server = Server(lambda: tracformer.load(model), name, Settings(port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.port}"
    server.should_exit = True
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model's folder")
    parser.add_argument("--name", default="stories", help="what the page calls it")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--token", type=int, default=2, help="whose candidates are shown")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    with serving(arguments.model, arguments.name) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for size, (width, height) in SIZES.items():
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if arguments.dark else "light",
            )
            page.goto(url)
            page.wait_for_selector("body[data-ready]")
            for field, value in (
                ("text", arguments.text),
                ("n", "3"),
                ("seed", arguments.seed),
            ):
                page.fill(f"#{field}", value)
            page.click("#fill")
            page.wait_for_selector("#figures div")
            if size == "phone":
                page.evaluate("document.querySelector('.desk').scrollIntoView()")
            page.locator("#sheet .token").nth(arguments.token).hover()
            page.wait_for_selector("#candidates:visible")
            page.screenshot(path=arguments.out / f"page-{size}.png")
        browser.close()


if __name__ == "__main__":
    main()
