"""Progress bars on standard error, drawn by `rich`.

A bar appears only if standard error is a terminal; otherwise nothing is written and `rich` is not
imported. The bar is removed when the work ends.

    for item in track(items, "scoring"):
        ...

    with ProgressBar("preparing train", total=size, unit="bytes") as bar:
        bar.update(len(block))
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class ProgressBar:
    """One progress bar with the remaining time. Use it in a `with` statement, or call `close`.

    Args:
        description: Text before the bar.
        total: Number of steps. None shows a bar without percentage and remaining time.
        unit: "steps", "bytes" to show kB, MB, GB, or "seconds" to show only the time so far.
        delay: Seconds after which the bar appears; work that ends before shows none.
        enabled: False draws nothing, for callers with a `quiet` option.
    """

    def __init__(
        self,
        description: str,
        total: float | None = None,
        *,
        unit: str = "steps",
        delay: float = 0.0,
        enabled: bool = True,
    ) -> None:
        self._progress: Any = None
        self._timer: threading.Timer | None = None
        self._lock, self._closed = threading.Lock(), False
        if not enabled or sys.stderr is None or not sys.stderr.isatty():
            return
        if delay:
            self._timer = threading.Timer(delay, self._appear, (description, total, unit))
            self._timer.daemon = True
            self._timer.start()
        else:
            self._appear(description, total, unit)

    def _appear(self, description: str, total: float | None, unit: str) -> None:
        """Draw the bar."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns: dict[str, tuple[Any, ...]] = {
            "steps": (MofNCompleteColumn(), TimeRemainingColumn()),
            "bytes": (DownloadColumn(), TimeRemainingColumn()),
            "seconds": (TimeElapsedColumn(),),
        }
        progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *columns[unit],
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # results on standard output must not go to standard error
        )
        with self._lock:
            if self._closed:
                return
            self._task = progress.add_task(description, total=total, note="")
            progress.start()
            self._progress = progress

    def update(self, advance: float = 1, note: str | None = None) -> None:
        """Advance by a number of steps; `note` replaces the text after the bar."""
        if self._progress is not None:
            fields = {} if note is None else {"note": note}
            self._progress.update(self._task, advance=advance, **fields)

    def close(self) -> None:
        """Remove the bar. A closed bar ignores further updates."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def track(
    items: Iterable[T], description: str, total: float | None = None, *, enabled: bool = True
) -> Iterator[T]:
    """Yield the items and show how many of them are done. `total` defaults to `len(items)`."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with ProgressBar(description, total, enabled=enabled) as bar:
        for item in items:
            yield item
            bar.update()
