"""Commands made of option classes: each field of `treeopt.records.options` or `treeopt.records.exchange` is an option.

A command's function gets an instance of each of its classes, with what was typed. --help shows the options that most people
use, --help-all all of them. Results go to stdout as a table or as JSON, notes to stderr.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import wraps
from inspect import cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

import treeopt
from treeopt.errors import spoken
from treeopt.files.options import Option, Options, options_of
from treeopt.files.shell import printable

if TYPE_CHECKING:
    from treeopt.planning.compared import Comparison

Function = Callable[..., Any]
OUTPUT = "Files and output"
RUN = Option("run directory", metavar="FOLDER", default=treeopt.RUN, is_common=True)
JSON = Option("print the result as one JSON document", kind=bool, default=False, is_common=True, flag="--json")


class Command(click.Command):
    """A command whose --help shows the options that most people use, below the headings of their classes with --help-all."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shows_all = ctx.meta.get("shows_all", False)
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not isinstance(parameter, click.Option):
                continue
            record, heading = parameter.get_help_record(ctx), OUTPUT if shows_all else "Options"
            if isinstance(parameter, TypedOption) and shows_all:
                heading = parameter.heading
            elif isinstance(parameter, TypedOption) and not parameter.known.is_common:
                continue
            if record:
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class TypedOption(click.Option):
    """The option of a field. Without --help-all its text is the first clause."""

    def __init__(self, name: str, known: Option, heading: str, flags: Mapping[str, str]) -> None:
        self.known, self.heading, self.flags = known, heading, flags
        is_many = known.many and known.kind is not int
        settings: dict[str, Any] = {"metavar": known.metavar, "default": None, "required": False}
        if flags[name].startswith("--no-"):
            settings |= {"flag_value": False, "type": bool, "metavar": None}
        elif known.kind is bool:
            settings |= {"is_flag": True, "metavar": None}
        elif known.choices:
            settings |= {"type": click.Choice(list(known.choices))}
        else:
            settings |= {"type": Value(replace(known, many=False) if is_many else known), "multiple": is_many}
        super().__init__([name, *flags[name].split("/")], **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        text, _, default = self.known.text.partition("; by default ")
        if not ctx.meta.get("shows_all", False):
            text = _first_clause(text)
        text = f"Do not {text}" if self.flags[str(self.name)].startswith("--no-") else text[:1].upper() + text[1:]
        default = default or self._default
        return record[0], _with_flags(text, self.flags) + (
            "." if not default else f".  [default: {_with_flags(default, self.flags)}]"
        )

    @property
    def _default(self) -> str:
        default = self.known.default
        if default is None or default == () or isinstance(default, bool):
            return ""
        if isinstance(default, tuple):
            return ",".join(map(str, default))
        return (
            f"{100 * default if self.known.percent else default:g}"
            if isinstance(default, int | float)
            else str(default)
        )


def _first_clause(text: str) -> str:
    return re.split(r"(?<!\.\.)[;.] ", text)[0]


def _with_flags(text: str, flags: Mapping[str, str]) -> str:
    """A text with options for the fields that it names between backticks."""
    return re.sub(r"``(\w+)``", lambda match: flags.get(match[1], match[1]), text).rstrip(".")


class Value(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """The value of an option: read and checked as its field is."""

    def __init__(self, known: Option) -> None:
        self.known = known
        name = {int: "integer", float: "float", Path: "path"}.get(known.kind, "text")
        self.name = "N,N,... | N:SHARE,..." if known.shares else "N,N,..." if known.many else name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        converted: Any
        if self.known.shares and ":" in value:
            converted = self._shares(parts, param, ctx)
        elif self.known.many:
            converted = tuple(self._read(part, param, ctx) for part in parts)
        else:
            converted = self._read(value, param, ctx)
        if fault := self.known.fault(converted):
            self.fail(f"{fault}.", param, ctx)
        return converted / 100 if self.known.percent else converted

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")] if self.known.kind is str else []

    def _read(self, text: str, param: Any, ctx: Any) -> Any:
        try:
            return self.known.kind(text)
        except ValueError:
            what = "whole numbers with commas between" if self.known.many else "a number"
            return self.fail(f"must be {what}, but got {text!r}.", param, ctx)

    def _shares(self, parts: Sequence[str], param: Any, ctx: Any) -> dict[int, float]:
        """Batch sizes with the share of the time that each takes."""
        shares: dict[int, float] = {}
        for part in parts:
            number, _, share = part.partition(":")
            batch_size = self._read(number, param, ctx)
            if batch_size in shares:
                self.fail(f"must have each batch size once, but has {batch_size} twice.", param, ctx)
            if not re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", share) or not 0 < float(share) < float("inf"):
                self.fail(f"must have a positive share behind every batch size, but got {part!r}.", param, ctx)
            shares[batch_size] = float(share)
        return shares


def command(
    *kinds: type[Options],
    name: str | None = None,
    without: Collection[str] = (),
    common: Collection[str] = (),
    writes: bool = True,
) -> Callable[[Function], click.Command]:
    """Make a function a command, with the options of some classes; click's decorators add arguments.

    The function gets ``run``, a run directory, where it has such a parameter, ``as_json``, an instance of each class in order, and
    the arguments by name.

    without : fields that are no options of this command
    common  : fields that --help shows of this command too
    writes  : whether it is the run directory's only writer while it runs
    """

    def decorate(function: Function) -> click.Command:
        has_run = "run" in signature(function).parameters
        known = {field: option for kind in kinds for field, option in options_of(kind).items() if field not in without}
        known |= {field: replace(known[field], is_common=True) for field in common}
        heading = {field: kind.heading for kind in kinds for field in options_of(kind)}
        known |= {"run": RUN, "as_json": JSON} if has_run else {"as_json": JSON}
        flags = {field: option.flag or f"--{field.replace('_', '-')}" for field, option in known.items()}
        params = [*reversed(getattr(function, "__click_params__", []))]
        common_first = sorted(known, key=lambda field: not known[field].is_common)
        params += [TypedOption(field, known[field], heading.get(field, OUTPUT), flags) for field in common_first]
        texts = {option.text.partition("; by default ")[0] for option in known.values()}
        if any(not option.is_common for option in known.values()) or any(_first_clause(text) != text for text in texts):
            params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_help_all,
                    help="Show all options and exit.",
                )
            )

        @wraps(function)
        def callback(**values: Any) -> Any:
            typed = {field: values.pop(field) for field in known}
            typed = {field: value for field, value in typed.items() if value is not None and value != ()}
            instances = [kind(**{f.name: typed[f.name] for f in fields(kind) if f.name in typed}) for kind in kinds]
            as_json = typed.get("as_json", False)
            if not has_run:
                return function(as_json, *instances, **values)
            from treeopt.records.rundir import RunDirectory

            run = RunDirectory(typed.get("run", treeopt.RUN))
            with run.writing() if writes else nullcontext():
                return function(run, as_json, *instances, **values)

        text = cleandoc(function.__doc__ or "")
        return Command(
            name or function.__name__, callback=callback, params=params, help=text, short_help=text.partition("\n")[0]
        )

    return decorate


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["shows_all"] = True
        say(ctx.get_help())
        ctx.exit()


def say(text: str, *, err: bool = False) -> None:
    """Print lines as they are, however long; no name in them moves the cursor."""
    click.echo(printable(text), err=err)


def show_result(document: Any, table: Any, as_json: bool) -> None:
    if as_json:
        from treeopt.files.storage import to_json

        say(to_json(document).replace("\x7f", r"\u007f"))
    elif isinstance(table, str):
        say(table)
    else:
        from treeopt.report.terminal import out

        out(table)


def show_files(paths: Sequence[Path], notes: Sequence[str], as_json: bool, *, command: str | None = None) -> None:
    from treeopt.report.terminal import note

    names, notes = list(map(str, paths)), list(map(spoken, notes))
    note(*notes)
    following = {"command": command} if command else {}
    show_result({"files": names, "notes": notes, **following}, "\n".join([*names, *following.values()]), as_json)


def show_comparison(comparison: Comparison, as_json: bool) -> None:
    from treeopt.files.storage import schema
    from treeopt.report.comparison import compared_table, verdict
    from treeopt.report.terminal import note

    note(*comparison.notes)
    document = {"schema": schema("comparison"), "verdict": verdict(comparison), **comparison.document()}
    show_result(document, compared_table(comparison), as_json)
