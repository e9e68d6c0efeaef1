"""The command line: every command reads files, calls one function, and writes one file.

Results go to stdout, talk and progress to stderr. Exit 0 done, 1 could not, 2 misused, 130 Ctrl-C.

Each command is in the file of its name; export.py has convert too, show.py plot and report, trees.py score and
import-tree. options.py holds what commands share. What is heavy is imported inside a command, so that --help is quick.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from types import FrameType
from typing import Any, NoReturn

import click

from treeopt import __version__
from treeopt.cli.bench import bench
from treeopt.cli.calibrate import calibrate
from treeopt.cli.compare import compare
from treeopt.cli.export import convert, export
from treeopt.cli.importing import import_
from treeopt.cli.listing import list_
from treeopt.cli.merge import merge
from treeopt.cli.profile import profile
from treeopt.cli.run import run
from treeopt.cli.search import search
from treeopt.cli.show import plot, report, show
from treeopt.cli.status import status
from treeopt.cli.train import train
from treeopt.cli.trees import import_tree, score
from treeopt.errors import TreeoptError
from treeopt.files import writing
from treeopt.files.shell import printable

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Group(click.Group):
    """Prints a TreeoptError as one sentence and exits 1, and so what the system refuses, a full disk for example.

    Ctrl-C and SIGTERM end a command with a sentence on what is left, and 128 and the number of the signal, 130 for Ctrl-C.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As always, but for words that no option can mean: an empty one would be the current folder."""
        for before, word in pairwise(["", *args]):
            if not word or (word.startswith("--") and word.endswith("=")):
                name = word[:-1] or (before if before.startswith("-") else "An argument")
                raise click.UsageError(f"{name} must not be empty.", ctx)
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise click.UsageError(f"Names must be UTF-8, but got {os.fsencode(word)!r}.", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        came: list[int] = []  # signals

        def interrupt(number: int, frame: FrameType | None) -> None:
            came.append(number)
            raise KeyboardInterrupt

        writing.WRITTEN.clear()
        before = {n: signal.signal(n, interrupt) for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            # Whatever a library made of the interrupt while it wrote an archive, it was one.
            if came or isinstance(error, KeyboardInterrupt):
                _end(_left(str(ctx.invoked_subcommand)), 128 + (came[0] if came else signal.SIGINT))
            if isinstance(error, TreeoptError):
                _end(f"treeopt: {error}", 1)
            if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
                _end(f"treeopt: {_refused(error)}", 1)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end(said: str, code: int) -> NoReturn:
    with suppress(OSError):  # stderr may be full as well
        click.echo(printable(said), err=True)
    sys.exit(code)


def _left(command: str) -> str:
    """What an interrupted command leaves behind."""
    files = {file for file in writing.WRITTEN if file.exists()}
    kept = [file for file in files if file.name != "key.json" and writing.is_of_journal(file)]
    if kept:
        return f"\ntreeopt: interrupted. What was finished is kept. The same treeopt {command} command continues."
    if any(not writing.is_of_journal(file) for file in files):
        return f"\ntreeopt: interrupted. Every file is whole. The same treeopt {command} command begins anew."
    return "\ntreeopt: interrupted. No result was changed."


def _refused(error: OSError) -> str:
    """What the system would not do, and with which file."""
    if error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}."
    if error.errno in FULL:  # what is written to files names them
        return f"The output cannot be written: {error.strerror}."
    return f"The system refused: {error.strerror}."


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="treeopt")
def cli() -> None:
    """Find the best speculation tree for Medusa-style decoding, and prove it by real decoding.

    \b
    treeopt run             the whole line on the built-in demo model, or on your own
    treeopt COMMAND -h      what a command does, with an example
    """


for _command in (
    run,
    calibrate,
    import_,
    merge,
    profile,
    search,
    bench,
    export,
    compare,
    score,
    import_tree,
    convert,
    plot,
    show,
    report,
    status,
    train,
    list_,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the ``treeopt`` command."""
    cli()
