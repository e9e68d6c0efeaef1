"""Commands made of functions: an option is declared by a parameter, its help is the parameter's row in the docstring.

The parameters are those of the function of `treeopt` that a command calls, and the command's own, which only the terminal
has. What differs in the terminal stands here: the words of some options, the headings that --help puts them under, and what
is printed: results as a table or as JSON on stdout, notes on stderr.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

import treeopt
from treeopt.errors import spoken
from treeopt.files.parameters import REQUIRED, Parameter, parameters_of, without_table

if TYPE_CHECKING:
    from treeopt.planning.compared import Comparison


Function = Callable[..., Any]
Built = tuple[list[click.Parameter], str]
# Headings of --help and the parameters below them; what is in none of them comes after the usual ones.
GROUPS = {
    "Usual": ("model", "drafter", "prompts", "num_prompts", "batch_sizes"),
    "Trees and engine": ("budget", "sizes", "engine", "engine_python", "method", "shape", "max_rank", "max_depth", "tree", "heads",
                         "beyond", "tolerance"),
    "A table of settings": ("columns", "lengths", "noise", "tpot_limit", "served", "markdown"),
    "A server that is up": ("minutes", "plain", "drive", "clients"),
    "Latencies from elsewhere": ("from_csv", "launch", "within_s", "runtime", "analytical", "num_heads", "overwrite"),
    "Model and drafter": ("random_weights", "start", "draft_depth", "revision", "dtype", "device", "device_map",
                          "compiled", "mixed_precision", "trust_remote_code"),
    "Several machines": ("workers", "gpus_per_worker", "address"),
    "Prompts and answers": ("from_logs", "tokenizer", "column", "group_by", "responses", "split", "chat_template", "bench_prompts", "max_new_tokens",
                            "tokens", "answers"),
    "How guesses are accepted": ("acceptance", "temperature", "top_p", "top_k", "epsilon", "delta", "seed"),
    "Files and output": ("calibration", "profile", "run", "output", "as_json", "_click_default_help"),
}  # fmt: skip
# Words of options that are not the parameter's name.
WORDS = {
    "batch_sizes": "--batch-size", "contexts": "--context", "topks": "--topk", "trees": "--tree", "formats": "--format",
    "num_heads": "--heads", "num_layers": "--layers", "time_limit_s": "--time-limit",
    "within_s": "--healthy-within", "compiled": "--compile", "layout": "--to", "kind": "--from",
    "chat_template": "--no-chat-template", "output": "-o/--output", "as_json": "--json",
}  # fmt: skip
METAVARS = {
    "shard": "I/N", "random_weights": "CONFIG", "from_csv": "FILE", "from_logs": "FILE", "tokenizer": "FOLDER",
    "runtime": "NAME", "analytical": "DEVICE", "launch": "COMMAND", "present": "OPTIONS", "runs": "RUN...", "files": "FILE...", "sources": "A [B...]", "inputs": "[FILE... | URL]",
    "topic": "[TOPIC]", "name": "[NAME]",
}  # fmt: skip
SHARED = {
    "run": Parameter("run", str, treeopt.RUN, "run directory"),
    "as_json": Parameter("as_json", bool, False, "print the result as one JSON document"),
}


class DeclaredCommand(click.Command):
    """A command whose options are declared elsewhere, and in --help stand in `GROUPS`.

    build : makes the options and the text of --help, when they are asked for first; a single option of a group stands
            among the ungrouped
    """

    # Options and text are those that are built, whatever click sets.
    params = property(lambda self: self.build()[0], lambda self, none: None)
    help = property(lambda self: self.build()[1], lambda self, none: None)

    def __init__(self, name: str, callback: Function, build: Callable[[], Built], said: str):
        self.build = cache(build)
        super().__init__(name, callback=callback, short_help=said)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {name: title for title, names in GROUPS.items() for name in names}
        found: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Usual", "Options", *GROUPS)}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None and isinstance(parameter, click.Option):
                found[group_of.get(parameter.name or "", "Options")].append(record)
        for title in GROUPS:
            found["Options"] += found.pop(title) if len(found[title]) == 1 else []
        for title, records in found.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Value(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """The type of an option, whose value is read and checked as its parameter is declared."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        many = "N" if parameter.kind is int else "NAME"
        if parameter.many:
            self.name = "N,N,... | N:SHARE,..." if parameter.mix else f"{many},{many},..."
        else:
            self.name = {int: "integer", float: "float", Path: "path"}.get(parameter.kind, "text")

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        one = self.parameter
        parts = [part.strip() for part in value.split(",")]
        if one.mix and ":" in value:
            found: Any = self._shares(parts, param, ctx)
        elif one.many:
            found = tuple(self._read(part, param, ctx) for part in parts if part or one.kind is int)
        else:
            found = self._read(value, param, ctx)
        if fault := one.fault(found):
            self.fail(f"{fault}.", param, ctx)
        return found / 100 if one.range is not None and one.range.percent else found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")] if self.parameter.kind is str else []

    def _read(self, text: str, param: Any, ctx: Any) -> Any:
        try:
            return self.parameter.kind(text)
        except ValueError:
            what = "whole numbers with commas between" if self.parameter.many else "a number"
            return self.fail(f"must be {what}, but got {text!r}.", param, ctx)

    def _shares(self, parts: Collection[str], param: Any, ctx: Any) -> dict[int, float]:
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
    *sources: Function | str,
    name: str | None = None,
    names: Collection[str] | None = None,
    without: Collection[str] = (),
    words: Mapping[str, str] | None = None,
    writes: bool = True,
) -> Callable[[Function], click.Command]:
    """Make a function a command, with options for its own parameters and those of ``sources``.

    Of its own parameters those before * are arguments, and ``run`` is the run directory, opened. It is called with what
    was given or has a default.

    sources : functions and classes, or where they are, "MODULE:NAME", where importing that takes long
    names   : the parameters of ``sources`` that are taken, all but those of ``without`` by default
    words   : of options that are called otherwise in this command alone
    writes  : whether it is the run directory's only writer while it runs
    """

    def decorate(function: Function) -> click.Command:
        own = dict(parameters_of(function))
        given = [k for k, one in own.items() if not one.is_keyword and k not in SHARED]

        def build() -> Built:
            known = [parameters_of(resolve_name(source) if isinstance(source, str) else source) for source in sources]
            taken = {k: v for one in known for k, v in one.items() if names is None or k in names}
            every = {k: v for k, v in taken.items() if k not in {*without, "run", "options", "self"}} | own
            left = {k: every[k] for k in dict.fromkeys([*(k for k in GROUPS["Usual"] if k in every), *every])}
            called = WORDS | dict(words or {})
            flags = {k: called.get(k, f"--{k.replace('_', '-')}").rpartition("/")[2] for k in left}
            params: list[click.Parameter] = [_argument(own[k]) for k in given]
            for k, one in left.items():
                if k not in given and k not in SHARED and one.kind is not object:
                    params.append(_option(one, called.get(k, flags[k]), flags))
            params += [_option(SHARED[k], called.get(k, f"--{k}"), flags) for k in SHARED if k in own]
            return params, without_table(function.__doc__ or "", list(left))

        def callback(**values: Any) -> Any:
            asked = {k: v for k, v in values.items() if (v is not None and v != ()) or k in given}
            if "run" not in own:
                return function(**asked)
            from treeopt.records.rundir import RunDirectory

            run = RunDirectory(asked.pop("run"))
            with run.writing() if writes else nullcontext():
                return function(run=run, **asked)

        summary = (function.__doc__ or "").partition("\n")[0]
        return DeclaredCommand(name or function.__name__, callback, build, summary)

    return decorate


def _argument(one: Parameter) -> click.Argument:
    kind, is_needed = click.Path(path_type=one.kind), one.default is REQUIRED
    nargs = -1 if one.many else 1
    return click.Argument([one.name], nargs=nargs, type=kind, required=is_needed, metavar=METAVARS.get(one.name))


def _option(one: Parameter, word: str, flags: Mapping[str, str]) -> click.Option:
    text, _, otherwise = one.text.partition("; by default ")
    text = said(text, flags)
    text = f"{text[:1].upper()}{text[1:]}." + (f"  [default: {said(otherwise, flags)}]" if otherwise else "")
    kind, default = click.Path(path_type=Path) if one.kind is Path else None, one.default
    about: dict[str, Any] = {"help": text, "metavar": METAVARS.get(one.name)}
    if word.startswith("--no-"):
        about |= {"help": f"Do not {text[0].lower()}{text[1:]}", "flag_value": False, "default": None, "type": bool}
    elif one.kind is bool:
        about |= {"is_flag": True, "default": default, "metavar": None}
    elif one.choices:
        about |= {"type": click.Choice(one.choices), "default": default, "show_default": default is not None}
    elif one.many and one.kind is not int and not one.mix and default == ():
        about |= {"multiple": True, "type": kind or Value(replace(one, many=False))}
    else:
        if isinstance(default, tuple):
            default = ",".join(map(str, default)) or None
        elif isinstance(default, int | float):
            default = f"{100 * default if one.range and one.range.percent else default:g}"
        about |= {"type": kind or Value(one), "default": default, "show_default": default is not None}
    if default is REQUIRED:
        about["required"] = True
        for key in ("default", "show_default"):  # click takes a default of None as given
            about.pop(key, None)
    return click.Option([one.name, *word.split("/")], **about)


def said(text: str, flags: Mapping[str, str]) -> str:
    """A row's text with options for the parameters that it names."""
    return re.sub(r"``?(\w+)``?", lambda match: flags.get(match[1], match[1]), text).rstrip(".")


def typed_options() -> dict[str, str]:
    """Name to option of the parameters that the command line says."""
    context = click.get_current_context()
    return {
        str(parameter.name): parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    }


def show_result(document: Any, table: Any, as_json: bool) -> None:
    from treeopt.files.storage import to_json
    from treeopt.report.terminal import out

    if as_json or isinstance(table, str):
        click.echo(to_json(document) if as_json else table)
    else:
        out(table)


def show_files(paths: Sequence[Path], notes: Sequence[str], as_json: bool, *, command: str | None = None) -> None:
    from treeopt.report.terminal import note

    names, notes = list(map(str, paths)), list(map(spoken, notes))
    note(*notes)
    told = {"command": command} if command else {}
    show_result({"files": names, "notes": notes, **told}, "\n".join([*names, *told.values()]), as_json)


def show_comparison(found: Comparison, as_json: bool) -> None:
    from treeopt.files.storage import schema
    from treeopt.report.comparison import compared_table, verdict
    from treeopt.report.terminal import note

    note(*getattr(found, "notes", ()))
    document = {"schema": schema("comparison"), "verdict": verdict(found), **found.document()}
    show_result(document, compared_table(found), as_json)
