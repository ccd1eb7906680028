"""How much of a large file has been read: a bar on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def reading(path: Path, console: Console) -> Iterator[Callable[[int], None]]:
    """Show progress while the block runs.

    Args:
        path: The file; one that cannot be read shows nothing, and its reader tells why.
        console: Where to show it.

    Yields:
        To be called with the bytes read so far.
    """
    size = path.stat().st_size if path.is_file() else 0
    if not console.is_terminal:
        yield _Tenths(path, size, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console) as progress:
        task = progress.add_task(path.name, total=size)
        yield lambda done: progress.update(task, completed=done)


class _Tenths:
    def __init__(self, path: Path, size: int, console: Console) -> None:
        self._path = path
        self._size = max(size, 1)
        self._console = console
        self._shown = 0

    def __call__(self, done: int) -> None:
        tenths = min(10 * done // self._size, 10)
        if tenths > self._shown:
            self._shown = tenths
            self._console.print(
                f"{self._path.name}: {10 * tenths} % read", highlight=False, soft_wrap=True
            )
