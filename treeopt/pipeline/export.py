"""What leaves the run: an engine's configuration, a checkpoint in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files.places import located
from treeopt.files.storage import read_text
from treeopt.files.writing import replace_together, sole_writer, write_text
from treeopt.pipeline.trees import named_tree
from treeopt.records.inputs import STALE, changed
from treeopt.records.plan import Plan
from treeopt.records.rules import option_of
from treeopt.records.rundir import RunDirectory
from treeopt.report.figures.registry import Inputs
from treeopt.report.terminal import note
from treeopt.report.verdict import doubts
from treeopt.trees.shapes import SHAPES

if TYPE_CHECKING:
    from treeopt.export.engine import Written

WRITTEN = ".written"  # lists the files of an export in its folder


def export(
    run: RunDirectory,
    engine: str,
    *,
    batch_size: int | None = None,
    method: str | None = None,
    tree: str | None = None,
    heads: int | None = None,
    **target: Any,
) -> tuple[list[Path], Written]:
    """Write the engine's files for the plan, or for a ``tree`` by file or published name: (files, what was written).

    Of a plan the entry of ``batch_size``, or the whole schedule where the engine takes one. ``target`` says for which
    engine exactly: ``version``, ``max_draft_len``.
    """
    from treeopt.export.engine import Request
    from treeopt.export.write import export_request

    folder = run.export / engine
    if tree is not None:
        given = named_tree(tree, batch_size=batch_size)
        request = Request(tree=given, num_heads=heads or max(given.depth, 1), **target)
        return _write(folder, export_request(request, engine, method=method))
    if heads is not None:
        raise InvalidInput("--heads goes with --tree; a plan knows how many heads there are.")
    plan = run.read_plan()
    if changed(run, plan.inputs, or_gone=True):
        note(STALE)
    if len(plan.entries) > 1 and batch_size is not None:
        folder /= f"batch-size-{batch_size}"
    try:
        benches = Inputs(run).benches()
    except InvalidInput:  # one is damaged: the prediction says it too
        benches = {}
    against = doubts(plan, benches, batch_size=batch_size)
    return export_to(folder, plan, engine, against, batch_size=batch_size, method=method, **target)


def export_to(
    folder: Path, plan: Plan, engine: str, against: Sequence[str] = (), **options: Any
) -> tuple[list[Path], Written]:
    """Write a plan as an engine's files: (files, what was written).

    ``options`` are those of `export_plan`. What speaks ``against`` the plan's trees is the first of the notes.
    """
    from treeopt.export.write import export_plan

    written = export_plan(plan, engine, **options)
    return _write(folder, replace(written, notes=(*against, *written.notes, *_other_runtime(plan, engine))))


def export_all(run: RunDirectory, plan: Plan) -> list[str]:
    """Write the files of every engine that takes the plan's drafter, rule and trees, and name the others: those written.

    A plan of chains goes to the engines of chains too.
    """
    from treeopt.export.write import check_rule_of, runners

    kind = (plan.drafter or {}).get("kind")
    able, written = runners(kind), []
    if all(entry.size == 1 for entry in plan.entries):
        note("The plan is not to speculate: nothing was exported.")
        return []
    if not able:
        note(f"No engine that treeopt knows runs drafters of the kind {kind}: nothing was exported.")
    chains, others = [], []
    for name, way in able.items():
        try:
            check_rule_of(plan.acceptance, way, name)
        except InvalidInput:
            others.append(name)
            continue
        if way.shape == "chain" and not all(SHAPES["chain"](entry.tree) for entry in plan.entries):
            chains.append(name)
            continue
        sizes = [None] if way.shape == "chain" else [entry.batch_size for entry in plan.entries]
        for batch_size in sizes:
            try:
                paths, _ = export(run, name, batch_size=batch_size)
                written += [name] if paths else []
            except TreeoptError as error:
                at = "" if batch_size is None else f" at batch size {batch_size}"
                note(f"Not exported for {name}{at}: {error}")
    if chains:
        note(f"For engines of chains ({', '.join(chains)}) search again: treeopt search --for {chains[0]}")
    if others:
        note(f"Not exported for {', '.join(others)}: none of them decodes by {option_of(plan.acceptance or {})}.")
    return list(dict.fromkeys(written))


def _write(folder: Path, written: Written) -> tuple[list[Path], Written]:
    """Write the files; those of the export before that are no more are deleted, and nothing else."""
    record, texts = folder / WRITTEN, dict(written.files)
    if texts:
        texts = {WRITTEN: "\n".join(texts), **texts}
    before = [*read_text(record).splitlines(), WRITTEN] if record.is_file() else []
    gone = [folder / name for name in before if name not in texts and Path(name).name == name]
    writers = {folder / name: partial(write_text, text=text) for name, text in texts.items()}
    replace_together(writers, [file for file in gone if file.is_file()])
    return [folder / name for name in written.files], written


def _other_runtime(plan: Plan, engine: str) -> tuple[str, ...]:
    """A warning where the plan's latencies were measured in another runtime than the engine's."""
    name = (plan.runtime or {}).get("name")
    if name is None or str(name).startswith(engine):
        return ()
    return (
        f"What was chosen rests on step latencies of {name}; a step costs otherwise in {engine}, where another size "
        "may be faster.",
    )


def convert(
    drafter: str, folder: Path, *, layout: str, model: str | None = None, revision: str | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Write heads in another layout: (files, what was repaired or is worth knowing)."""
    from treeopt.runtime.checkpoints import convert as write

    refusal = f"Another treeopt is writing to {folder}: wait for it, or pass another --output."
    with sole_writer(folder, lambda: [folder], refusal):
        base = None if model is None else located(model)
        heads, files = write(located(drafter), layout, folder, base=base, revision=revision)
    return files, heads.notes
