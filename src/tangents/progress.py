"""A progress bar for what takes longer than a glance."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")

PATIENCE = 2.0  # seconds before a bar is shown


def track(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, with a bar on standard error (of a terminal) once they have taken two seconds."""
    start, bar, task = time.monotonic(), None, None
    try:
        for done, item in enumerate(items):
            if bar is None and sys.stderr.isatty() and total > 1 and time.monotonic() - start > PATIENCE:
                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                task = bar.add_task(what, total=total)
            if bar is not None and task is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()
