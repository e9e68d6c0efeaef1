"""Tables of settings that were run: read into the run's arms, decided, and written as an engine's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path

from treeopt.arms.arm import OFF, Arms
from treeopt.arms.choices import Decided, decide_arms, title_of
from treeopt.arms.decide import Choice
from treeopt.arms.tables import read_tables
from treeopt.arms.tools import read_sweep, read_tool
from treeopt.engines.base import About, Names, Written
from treeopt.engines.measured.files import load_file
from treeopt.engines.plans import plain_command, write_served
from treeopt.engines.registry import engine_named, engine_of, method_of
from treeopt.errors import InvalidInput
from treeopt.records.display import Displayed
from treeopt.records.drafters import kind_of_name
from treeopt.records.exchange import TableOptions
from treeopt.records.plan import for_all, merged
from treeopt.records.rundir import RunDirectory
from treeopt.trees.tree import Tree

AS_THE_FILES_SAY = TableOptions()


def read_arms(paths: Sequence[Path], columns: Mapping[str, str] | None = None) -> Arms:
    """The arms in some files: tables, results of benchmarking tools, folders of sweeps, or runs that have arms.

    columns : name of a column to what it means
    """
    return _joined([_read(path, columns or {}) for path in paths])


def read_results(paths: Sequence[Path]) -> Arms | None:
    """Arms whose throughput benchmarking tools measured, beside which they may count drafts; None where a file has none."""
    read = [read_tool(load_file(path), path) if path.is_file() else None for path in paths]
    arms = [results for results in read if results and any(arm.tokens_per_s for arm in results.arms)]
    return _joined(arms) if len(arms) == len(paths) else None


def _joined(parts: Sequence[Arms]) -> Arms:
    meanings = {name: meaning for arms in parts for name, meaning in arms.meanings.items()}
    notes = tuple(dict.fromkeys(note for arms in parts for note in arms.notes))
    return Arms(arms=tuple(arm for arms in parts for arm in arms.arms), meanings=meanings, notes=notes)


def _read(path: Path, columns: Mapping[str, str]) -> Arms:
    if not path.exists():
        raise InvalidInput(f"{path} does not exist.")
    if path.is_dir():
        file = RunDirectory(path).arms
        return Arms.load(file) if file.exists() else read_sweep(path)
    content = load_file(path)
    if isinstance(content, dict) and str(content.get("schema")).startswith("treeopt."):
        return Arms.load(path)
    return read_tool(content, path) or read_tables(path.read_text("utf-8-sig"), path, columns)


def keep_arms(run: RunDirectory, arms: Arms, *, overwrite: bool = False) -> None:
    """Make the arms those of the run. Raises InvalidInput where it has some, unless they are to be overwritten."""
    if not overwrite:
        run.check_free("an import", [run.arms])
    arms.save(run.arms)


@dataclass(frozen=True, eq=False, repr=False)
class TunedArms(Displayed):
    """The decision among some arms, and the lines that start an engine with it.

    commands : launch lines, each with a comment that says what it is for
    """

    decided: Decided
    commands: tuple[str, ...]
    notes: tuple[str, ...]


def tune_arms(arms: Arms, options: TableOptions = AS_THE_FILES_SAY) -> TunedArms:
    """Decide among settings that were run."""
    engine = engine_named(options.engine) if options.engine else engine_of_all(arms)
    noise = options.noise and options.noise / 100
    decided = decide_arms(arms, lengths=options.lengths, noise=noise, tpot_limit=options.tpot_limit)
    commands, notes = launch_lines(decided, engine, options.drafter)
    return TunedArms(decided, tuple(commands), tuple(notes))


def columns_of(columns: Sequence[str]) -> dict[str, str]:
    """Names of columns to what they mean."""
    pairs = [column.rpartition("=") for column in columns]
    if wrong := [column for column, (name, _, meaning) in zip(columns, pairs, strict=True) if not name or not meaning]:
        raise InvalidInput(f"`columns` must be like 'accept len=tokens_per_step', but got {wrong[0]!r}.")
    return {name.strip(): meaning.strip() for name, _, meaning in pairs}


def engine_of_all(arms: Arms) -> str | None:
    """The engine that the arms name; None where they name none, or several."""
    engines = {engine_of(arm.about.get("engine", "")) for arm in arms.arms} - {None}
    return engines.pop() if len(engines) == 1 else None


def launch_lines(decided: Decided, engine: str | None, kind: str | None = None) -> tuple[list[str], list[str]]:
    """The lines that start an engine for each model and data set, and notes.

    kind : of the drafter; None for that which its name says
    """
    if engine is None:
        return [], ["The engine's launch line is printed with `engine`."]
    lines, notes = list[str](), list[str]()
    for key, choices in decided.groups.items():
        drafter, lengths = _one_drafter(choices)
        unknown = [choice.arm.name for choice in choices if choice.arm.k is None]
        if drafter == OFF and unknown:
            notes.append(
                f"There is no launch line, since how many guesses {unknown[0]} makes is not known: `columns` says which column has "
                "them, as NAME=k."
            )
            continue
        drafter_kind = kind_of_name(kind or drafter) or kind
        if drafter != OFF and drafter_kind is None:
            notes.append(
                f"There is no launch line, since {drafter} is of no kind that treeopt knows: name one with `drafter`."
            )
            continue
        loads = [choice.arm.concurrency for choice in choices]
        names = Names(*(name if "/" in name else None for name in (key[0], drafter)))
        for at, command, its_notes in _launches(engine, drafter_kind or "", loads, lengths, names):
            lines.append(f"# {title_of(*key)}, {', '.join(map(str, at))} at once\n{command}")
            notes += its_notes
    return lines, list(dict.fromkeys(notes))


def _launches(
    engine: str, kind: str, loads: Sequence[int], lengths: Sequence[int], names: Names
) -> Iterator[tuple[list[int], str, tuple[str, ...]]]:
    """Concurrencies, the line that starts the engine for them, and notes; one line where the engine takes a schedule."""
    about = About(num_heads=max(1, *lengths), drafter=kind, batch_size=loads[-1], names=names)
    method = method_of(engine, kind) if any(lengths) else None
    if method and method.by_batch_size:
        # Each load serves those nearest to it, in ratios.
        starts = [1, *(ceil(sqrt(below * above)) for below, above in pairwise(loads))]
        ends = [*(start - 1 for start in starts[1:]), None]
        served = merged(tuple(zip(starts, ends, map(Tree.chain, lengths), strict=True)))
        written = write_served(method, served, about)
        beyond = f"Above {loads[-1]} requests at once nothing was run: the last length is served there unproven."
        yield list(loads), _with_files(written), (*written.notes, *([beyond] if lengths[-1] else []))
        return
    for length in dict.fromkeys(lengths):
        at = [load for load, k in zip(loads, lengths, strict=True) if k == length]
        if method and length:
            written = write_served(method, for_all(Tree.chain(length)), replace(about, batch_size=at[-1]))
            yield at, _with_files(written), written.notes
        else:
            yield at, plain_command(engine, names), ()


def _with_files(written: Written) -> str:
    """The command, behind those that write the files that it and they read."""
    read = "\n".join([written.command, *written.files.values()])
    files = {name: text for name, text in written.files.items() if name in read}
    return "".join(f"cat > {name} <<'END'\n{text.rstrip()}\nEND\n" for name, text in files.items()) + written.command


def _one_drafter(choices: Sequence[Choice]) -> tuple[str, list[int]]:
    """The drafter that one server should have for all concurrencies, and its length at each; 0 without speculation."""
    served = {}
    for drafter in dict.fromkeys(choice.posterior.arms[i].drafter for choice in choices for i in choice.cell):
        fastest = [_fastest(choice, drafter) for choice in choices]
        if None not in fastest:
            served[drafter] = [place for place in fastest if place is not None]
    if not served:
        return OFF, [0] * len(choices)

    def speed(drafter: str) -> float:
        return sum(float(choice.posterior.mean[i]) for choice, i in zip(choices, served[drafter], strict=True))

    drafter = max(served, key=speed)
    lengths = [choice.posterior.arms[i].k or 0 for choice, i in zip(choices, served[drafter], strict=True)]
    return drafter if any(lengths) else OFF, lengths


def _fastest(choice: Choice, drafter: str) -> int | None:
    """The place of the fastest arm that a server with the drafter has: the chosen one where it has that."""
    arms, places = choice.posterior.arms, {choice.chosen, *choice.run.values()}
    able = [i for i in places if arms[i].drafter in (drafter, OFF) and arms[i].k is not None]
    return choice.chosen if choice.chosen in able else max(able, key=lambda i: choice.posterior.mean[i], default=None)
