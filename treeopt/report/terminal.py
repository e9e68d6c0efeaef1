"""The terminal: results on stdout, notes and progress on stderr, which stays silent where it is no terminal."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.text import Text

from treeopt.errors import spoken
from treeopt.files.notes import LOGGER
from treeopt.files.shell import printable

Advance = Callable[..., None]  # by so much of the total; and the title from now on
PIPED = 120  # characters of a line that is not a terminal's


def together(*parts: RenderableType | None, headline: Iterable[str] = ()) -> RenderableType:
    """The known ones below each other, and above them sentences in bold."""
    said = " ".join(headline)
    return Group(*([Text(said, style="bold")] if said else []), *(part for part in parts if part))


def out(renderable: RenderableType | str) -> None:
    """Print a result to stdout; plain text where it is no terminal. No name in it moves the cursor."""
    console = Console(highlight=False, markup=False)  # names in brackets are names
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED
    parts = [Segment(printable(part.text), part.style, part.control) for part in console.render(renderable)]
    console.print(Segments(parts), crop=False)


def note(*messages: str | None) -> None:
    """Print talk to stderr; nothing of what is None."""
    console = Console(stderr=True, highlight=False)
    for message in filter(None, messages):
        console.print(printable(spoken(message)), style="dim", markup=False, soft_wrap=True)


@contextmanager
def progress(title: str, total: float | None) -> Iterator[Advance]:
    """A progress bar on stderr, for who hears notes; none when stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not (console.is_terminal and LOGGER.isEnabledFor(logging.INFO))
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount, title=None: bar.update(task, advance=amount, description=title)
        if total:
            bar.update(task, completed=total)
