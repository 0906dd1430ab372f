"""A bar for long work, where rich is installed and somebody looks at a terminal; else nothing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes done since the last call; from any thread."""
    try:
        from rich.console import Console  # noqa: PLC0415 - optional, and 100 ms
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    except ImportError:
        yield lambda _count: None
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)
