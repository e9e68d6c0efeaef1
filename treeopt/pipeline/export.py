"""What leaves the run: an engine's configuration, a checkpoint in another layout."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from treeopt.engines.base import About, Names, Written
from treeopt.engines.plans import AS_PLANNED, UNKNOWN, has_dynamic, method_for_plan, prepare, write_served
from treeopt.engines.registry import engine_named, engine_of, method_of, runners
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files.notes import note
from treeopt.files.places import located
from treeopt.files.shell import shell_word
from treeopt.files.storage import read_text
from treeopt.files.writing import LOCK, replace_together, sole_writer, write_text
from treeopt.pipeline.drafters import benches_of
from treeopt.pipeline.trees import named_tree
from treeopt.records.benchmark import Benchmark
from treeopt.records.exchange import ExportOptions
from treeopt.records.inputs import model_and_drafter, read_planned
from treeopt.records.plan import Plan, by_batch_size, for_all
from treeopt.records.rules import marked_rule, rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.records.stale import stale_plan
from treeopt.report.export_notes import load_notes
from treeopt.report.plan_verdict import doubts
from treeopt.report.verdict import slowdown, times
from treeopt.runtime.waiting import import_torch
from treeopt.trees.tree import Tree

WRITTEN = ".written"  # lists the files of an export in its folder
NOTHING_WRITTEN = "Nothing was written for"  # begins the notes on refused batch sizes


def export(
    run: RunDirectory,
    engine: str,
    options: ExportOptions = AS_PLANNED,
    *,
    tree: str | None = None,
    heads: int | None = None,
    anyway: bool = False,
    names: Names | None = None,
) -> tuple[list[Path], Written]:
    """Write the engine's files for the plan, or for a ``tree`` by file or published name: (files, what was written).

    A stale plan is exported ``anyway`` only.

    names : of the model and the drafter; by default those that the run knows
    """
    engine = engine_named(engine)
    folder = run.export / engine
    if tree is not None:
        written = _export_tree(run, engine, named_tree(tree, batch_size=options.batch_size), options, heads)
        return _write(folder, written.files), replace(written, command=written.command_in(folder))
    if heads is not None:
        raise InvalidInput("`heads` goes with `tree`; a plan knows how many heads there are.")
    plan = run.read_plan()
    if (old := stale_plan(run, plan)) and not anyway:
        raise InvalidInput(f"A stale plan is not exported, unless `anyway` is given. {old[0]}")
    note(*old)
    if len(plan.entries) > 1 and options.batch_size is not None:
        folder /= f"batch-size-{options.batch_size}"
    benches: Mapping[int, Benchmark] = {}
    with suppress(InvalidInput):  # one is damaged: the prediction says it too
        benches = benches_of(run, plan)
    names = names or Names(*model_and_drafter(plan, run))
    paths, written = export_to(folder, plan, engine, options, benches=benches, anyway=anyway, names=names)
    return paths, replace(written, notes=(*written.notes, *plan.notes))


def _export_tree(run: RunDirectory, engine: str, tree: Tree, options: ExportOptions, heads: int | None) -> Written:
    """What an engine gets for a tree of no plan."""
    if options.beyond != "off":
        raise InvalidInput("`beyond` goes with a plan's schedule, and a `tree` has none: leave it out.")
    num_heads = heads or _heads_of(run) or max(tree.depth, 1)
    about = About(num_heads=num_heads)
    return write_served(method_of(engine, method=options.method), for_all(tree), about)


def _heads_of(run: RunDirectory) -> int | None:
    """The guesses that the run's drafter has heads or a block for; None where there may be any number."""
    if run.accuracies() in ([], [run.requests]):
        return None
    from treeopt.growth.source import source_of

    return source_of(read_planned(run)[1]).drafter_heads


def export_to(
    folder: Path,
    plan: Plan,
    engine: str,
    options: ExportOptions = AS_PLANNED,
    *,
    benches: Mapping[int, Benchmark] | None = None,
    anyway: bool = False,
    names: Names = UNKNOWN,
) -> tuple[list[Path], Written]:
    """Write a plan as an engine's files: (files, what was written).

    A plan of several drafts for an engine that takes one is written for each batch size into a folder of its own. What speaks
    against the plan's drafts, by their ``benches`` where there are some, is the first of the notes, then for which load it is.
    What was measured slower than plain is written ``anyway`` only.
    """
    prepared = prepare(plan, engine, options, names)
    judged = {size: bench for size, bench in (benches or {}).items() if prepared.plan[size].draft == plan[size].draft}
    slower, notes = [size for size, bench in judged.items() if slowdown(bench)], list[str]()
    if None in prepared.parts and not anyway and not plan.mix and 0 < len(slower) < len(plan.entries):
        prepared = prepare(_plain_at(slower, plan), engine, options, names)
        judged = {size: bench for size, bench in judged.items() if size not in slower}
        notes = [f"Written without speculation, which was measured slower: batch size {size}." for size in slower]
    parts: dict[int | None, Written] = {}
    refused: dict[int | None, InvalidInput] = {}
    for size, part in prepared.parts.items():
        try:
            if not anyway:
                _check_speed(prepared.plan, judged, size)
            parts[size] = write_served(prepared.method, *part)
        except InvalidInput as error:
            refused[size] = error
    if not parts:
        first, earlier = next(iter(refused.values())), any(folder.glob(f"**/{WRITTEN}"))
        raise InvalidInput(f"{first} The files in {folder} are of an earlier export.") if earlier else first
    notes = [*prepared.beyond, *notes, *doubts(prepared.plan, judged, batch_size=options.batch_size)]
    notes += [*load_notes(prepared.plan, list(prepared.parts), prepared.method), *prepared.notes]
    notes += [f"{NOTHING_WRITTEN} batch size {size}. {error}" for size, error in refused.items()]
    notes += by_batch_size({size: part.notes for size, part in parts.items()})
    name = prepared.method.engine
    timed_in = str((plan.runtime or {}).get("name") or name)
    if engine_of(timed_in) != name:
        notes.append(
            f"The plan was made with step latencies of {timed_in}. Steps take another time in {name}, and "
            "another size may be faster there."
        )
    if options.batch_size is not None or None in parts:
        (written,) = parts.values()
        command = written.command_in(folder)
        return _write_all(folder, {folder: written.files}), replace(written, command=command, notes=tuple(notes))
    folders = {size: folder / f"batch-size-{size}" for size in parts}
    paths = _write_all(folder, {folders[size]: part.files for size, part in parts.items()})
    commands = (
        f"# Batch size {n}, in {shell_word(folders[n])}\n{part.command_in(folders[n])}" for n, part in parts.items()
    )
    return paths, Written(files={}, command="\n".join(commands), notes=tuple(notes))


def _plain_at(batch_sizes: Collection[int], plan: Plan) -> Plan:
    entries = (replace(e.served(e.plain), others={}) if e.batch_size in batch_sizes else e for e in plan.entries)
    return replace(plan, entries=tuple(entries), schedule=[])


def _check_speed(plan: Plan, benches: Mapping[int, Benchmark], size: int | None) -> None:
    """Raise InvalidInput where a draft was measured slower than plain decoding, of all batch sizes where ``size`` is None."""
    slower = {n: ratio for n, bench in benches.items() if size in (None, n) and (ratio := slowdown(bench))}
    if slower and not (plan.mix and len(slower) < len(plan.entries)):
        each = ", ".join(f"batch size {n} ({times(ratio)} as fast)" for n, ratio in slower.items())
        raise InvalidInput(
            f"A draft measured slower than plain decoding is not exported, unless `anyway` is given: {each}."
        )


def export_all(run: RunDirectory, plan: Plan, engines: Sequence[str] = ()) -> list[str]:
    """Write the files of every engine, or of these, that takes the plan's drafter, rule and trees: those written.

    The others are named. A plan that is not to speculate goes to those that can serve the model alone.
    """
    kind = (plan.drafter or {}).get("kind")
    able, written, refused = engines or runners(kind), [], dict[str, list[str]]()
    if not able:
        note(f"No engine that treeopt knows runs drafters of the kind {kind}: nothing was exported.")
    for name in able:
        way = method_for_plan(plan, name)
        if way.limits.dynamic and not all(has_dynamic(way, entry) or not entry.speculates for entry in plan.entries):
            continue
        if rule_of(plan.acceptance) not in way.rules:
            refused.setdefault(f"none of them decodes by {marked_rule(plan.acceptance or {})}.", []).append(name)
            continue
        try:
            paths, files = export(run, name)
        except TreeoptError as error:
            refused.setdefault(str(error).removeprefix(f"{name} "), []).append(name)
            continue
        written += [name] if paths else []
        note(*(f"{name}: {said}" for said in files.notes if said.startswith(NOTHING_WRITTEN)))
    note(*(f"Not exported for {', '.join(names)}: {why}" for why, names in refused.items()))
    return written


def _write_all(folder: Path, contents: Mapping[Path, Mapping[str, str]]) -> list[Path]:
    """Write the files of each folder; those that an earlier export wrote in ``folder``, or for a batch size in it, go."""
    earlier = [place for place in (folder, *folder.glob("batch-size-*")) if (place / WRITTEN).is_file()]
    for place in earlier:
        if place not in contents:
            _write(place, {})
            if place != folder and not any(place.iterdir()):
                place.rmdir()
    return [path for place, files in contents.items() for path in _write(place, files)]


def _write(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write the files; those of the export before that are no more are deleted, and nothing else."""
    record, texts = folder / WRITTEN, dict(files)
    if texts:
        texts = {WRITTEN: "\n".join(texts), **texts}
    before = [*read_text(record).splitlines(), WRITTEN] if record.is_file() else []
    gone = [folder / name for name in before if name not in texts and Path(name).name == name]
    writers = {folder / name: partial(write_text, text=text) for name, text in texts.items()}
    replace_together(writers, [file for file in gone if file.is_file()])
    return [folder / name for name in files]


def convert(
    drafter: str, *, output: Path, layout: str, model: str | None = None, revision: str | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Write heads in another layout: (files, what was repaired or is worth knowing).

    output   : folder to write to
    layout   : layout to write; treeopt list names them
    model    : folder of the base model: for shared heads
    revision : revision of a hub checkpoint
    """
    import_torch()
    from treeopt.runtime.checkpoints import convert as write

    refusal = f"Another treeopt is writing to {output}: wait for it, or pass another `output`."
    with sole_writer(output, [output], refusal):
        base = None if model is None else located(model)
        heads, files = write(located(drafter), layout, output, base=base, revision=revision)
        with suppress(OSError):
            (output / LOCK).unlink()  # the folder is a checkpoint
    return files, heads.notes
