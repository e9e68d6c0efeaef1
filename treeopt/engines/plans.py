"""A plan on its way to an engine's files.

    plan ─ prepare ─► Export, a part for each folder ─ write_served: fault, write ─► Written

``served`` is the draft of each range of batch sizes. A method that takes a schedule gets all ranges in one part. Another method
gets one draft a part: one part serves all batch sizes, or each batch size has its own.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from treeopt import __version__
from treeopt.engines.base import EARLIEST, LAST, About, Method, Names, Written
from treeopt.engines.copied import KIND, notes_on
from treeopt.engines.registry import (
    ENGINES,
    engine_named,
    method_of,
    methods_for,
    removal_notes,
    search_for,
    tree_method_of,
)
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.records.drafters import BLOCKS
from treeopt.records.exchange import Beyond, ExportOptions
from treeopt.records.figure import Figure
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import ROOT, Plan, PlanEntry, Ranges, for_all, merged
from treeopt.records.rules import marked_rule, option_of, rule_of
from treeopt.trees.draft import Draft

COMMENTED = (".sh", ".py", ".yml")  # endings of files that can hold a comment
AS_PLANNED, UNKNOWN = ExportOptions(), Names()


@dataclass(frozen=True)
class Export:
    """An engine's export of a plan, before it is checked and written.

    plan   : the plan with the draft of each entry that the method takes
    parts  : batch size to what is written for it; None is the only key where a schedule or one draft serves all
    notes  : why drafts are other ones than were chosen, and which batch sizes are left out
    beyond : what a schedule does above the largest batch size of the plan; empty without a schedule
    """

    method: Method
    plan: Plan
    parts: Mapping[int | None, tuple[Ranges[Draft], About]]
    notes: tuple[str, ...]
    beyond: tuple[str, ...]


def prepare(plan: Plan, engine: str, options: ExportOptions = AS_PLANNED, names: Names = UNKNOWN) -> Export:
    """The parts of a plan for an engine. Raises InvalidInput if the plan has no draft that the engine takes."""
    engine = engine_named(engine)
    method = method_for_plan(plan, engine, options.method)
    about, served = replace(about_plan(plan), names=names), plan.ranges(method)
    plan_served = plan.served_by(method)
    notes, beyond = list[str](), list[str]()
    if plan_served is not plan and method.limits.only_chains:
        pairs = zip(plan.entries, plan_served.entries, strict=True)
        notes.append(f"{engine} takes chains only: written is the best of the plan's chains.")
        notes += [instead_of(best.chosen, taken.chosen) for best, taken in pairs if taken.draft != best.draft]
    sizes = [options.batch_size] if options.batch_size else batch_sizes_to_export(plan, method)
    if None not in sizes and len(sizes) < len(plan.entries) and options.batch_size is None:
        notes.append(f"{engine} decodes no more sequences at once.")
    if method.by_batch_size and None in sizes and plan_served.entries[-1].chosen.step_ms is not None and not plan.mix:
        served, beyond = _ended(served, max(entry.batch_size for entry in plan.entries), engine, options.beyond)
    parts: dict[int | None, tuple[Ranges[Draft], About]] = {}
    for size in sizes:
        if size is None:
            parts[size] = served, about
        else:
            parts[size] = for_all(plan_served.entry(size).draft), replace(about, batch_size=size)
    return Export(method, plan_served, parts, tuple(notes), tuple(beyond))


def instead_of(best: Figure, taken: Figure) -> str:
    """What the best draft would bring, and the one that an engine takes in its place."""
    brings = f"At batch size {best.batch_size} the best draft ({best.draft.words}) would bring"
    if best.speedup is None or taken.speedup is None:
        return (
            f"{brings} {best.tokens_per_step:.2f} tokens per step, the {taken.draft.words} {taken.tokens_per_step:.2f}."
        )
    if taken.size == 1:
        return f"{brings} {best.speedup:.2f} times plain decoding, and no chain is faster than that."
    return f"{brings} {best.speedup:.2f} times plain decoding, the {taken.draft.words} {taken.speedup:.2f}."


def about_plan(plan: Plan) -> About:
    """The drafter, rule and runtime of a plan."""
    drafter = plan.drafter or DrafterRecord()
    num_heads = drafter.get("num_heads", 1 if drafter.get("kind") == KIND else None)
    if num_heads is None:
        raise InvalidInput("The export needs the number of heads, but the plan has no drafter.num_heads.")
    return About(
        num_heads=num_heads,
        num_layers=drafter.get("num_layers") or 1,
        widest=drafter.get("widest"),
        drafter=drafter.get("kind") or "",
        drafter_id=drafter.get("id"),
        batch_size=plan.entries[-1].batch_size,
        acceptance=plan.acceptance,
        runtime=plan.runtime,
    )


def _ended(served: Ranges[Draft], planned: int, engine: str, beyond: Beyond) -> tuple[Ranges[Draft], list[str]]:
    """The ranges with plain decoding above the largest batch size that was searched, and a note that says so.

    planned : largest batch size of the plan's entries
    """
    *before, (first, _, draft) = served
    largest = max(first, planned)
    if len(draft) == 1 or largest >= LAST:
        return served, []
    nothing = f"Above batch size {largest} nothing was searched"
    if beyond == "last":
        return served, [f"{nothing}: {engine} speculates there as at {largest}, at your risk."]
    ended = (*before, (first, largest, draft), (largest + 1, None, ROOT))
    return ended, [f"{nothing}, so {engine} does not speculate there. To go on as at {largest}: `beyond=last`."]


def first_taking(
    plan: Plan, engines: Iterable[str], names: Names = UNKNOWN
) -> tuple[str, dict[int | None, Written]] | None:
    """The first of some engines that takes a plan as it is, and what is written there for each part; None where none does."""
    for engine in engines:
        with suppress(TreeoptError):  # not for this plan
            prepared = prepare(plan, engine, names=names)
            return engine, {size: write_served(prepared.method, *part) for size, part in prepared.parts.items()}
    return None


def plain_command(engine: str, names: Names = UNKNOWN) -> str:
    """The command that serves the base model alone; a comment for an engine that decodes with trees alone."""
    for method in ENGINES[engine].methods:
        if method.status == "live":
            with suppress(InvalidInput):
                return write_served(method, for_all(ROOT), About(num_heads=1, names=names)).command
    return f"# {ENGINES[engine].title} decodes with a tree alone"


def method_for_plan(plan: Plan, engine: str, method: str | None = None) -> Method:
    """The method that writes a plan: the named one, the one planned for, that of dynamic trees, or the drafter's usual one."""
    planned, kind = planned_method(plan), (plan.drafter or {}).get("kind")
    if method is None and planned is not None and planned.engine == engine:
        method = planned.name
    usual = method_of(engine, kind, method)
    searched_chains = plan.constraint is not None and plan.constraint.shape == "chain"
    if method is not None or (searched_chains and not (planned and planned.limits.dynamic)):
        return usual
    trees = tree_method_of(engine, kind, rule_of(plan.acceptance), (entry.batch_size for entry in plan.entries))
    return trees if trees and all(has_dynamic(trees, entry) for entry in plan.entries) else usual


def has_dynamic(method: Method, entry: PlanEntry) -> bool:
    """Whether the best draft of an entry, or one beside it, is a dynamic tree that the method takes."""
    figures = entry.chosen, *entry.others.values()
    return method.limits.dynamic is not None and any(figure.draft.kind == "dynamic" for figure in figures)


def planned_method(plan: Plan) -> Method | None:
    """The engine's method that the plan was made for; None if it was made for no engine."""
    planned = plan.constraint.engine if plan.constraint else None
    if planned is None or planned.name not in ENGINES:
        return None
    return next((method for method in ENGINES[planned.name].methods if method.name == planned.method), None)


def batch_sizes_to_export(plan: Plan, method: Method) -> list[int | None]:
    """The batch sizes that have files of their own; None alone if a schedule or one draft serves all.

    An engine that decodes fewer sequences at once gets the batch sizes that it can decode, if there are any. A plan for a mix of
    batch sizes is not cut so.
    """
    sizes = [entry.batch_size for entry in plan.entries]
    decoded: list[int | None] = [size for size in sizes if method.decodes(size)]
    if 0 < len(decoded) < len(sizes) and not plan.mix:
        return decoded
    is_one = len(sizes) == 1 or len(plan.ranges(method)) == 1
    return [None] if method.by_batch_size or is_one else [*sizes]


def write_served(method: Method, served: Ranges[Draft], about: About) -> Written:
    """A method's files for drafts by batch size. Raises InvalidInput for drafts that its engine would refuse or misread.

    >>> from treeopt.trees.tree import Tree
    >>> written = write_served(method_of("medusa"), for_all(Tree.chain(2)), About(num_heads=4))
    >>> written.files["medusa_choices.json"]
    '[[0], [0, 0]]\\n'
    """
    engine, served = method.engine, merged(served)
    rule_notes = check_rule_of(about.acceptance, method)
    known = about if about.drafter else replace(about, drafter=method.drafters[0])
    if fault := method.fault(served, known):
        raise InvalidInput(f"{engine} {fault}: {search_for(method)}")
    written = method.write(served, known)
    line = f"# For {ENGINES[engine].title}, checked against {method.checked}. Written by treeopt {__version__}.\n"
    files = {name: line + text if name.endswith(COMMENTED) else text for name, text in written.files.items()}
    notes = (*written.notes, *rule_notes, *_notes_on(method, served, about), *removal_notes(method))
    return _named(replace(written, files=files, notes=notes), known.names)


def _named(written: Written, names: Names) -> Written:
    """What is written with the names of the model and the drafter, unless a note says how to make what stands there."""
    made = {match[1] for note in written.notes for match in re.finditer(r"--output (\w+)", note)}
    put = partial(names.put_into, kept=made)
    return replace(
        written,
        files={name: put(text) for name, text in written.files.items()},
        command=put(written.command),
        notes=tuple(map(put, written.notes)),
        options=tuple(map(put, written.options)),
    )


def _notes_on(method: Method, served: Ranges[Draft], about: About) -> list[str]:
    """Notes on what the engine does otherwise than the plan, and on what the plan leaves open."""
    engine, longest = method.engine, max(draft.depth for *_, draft in served)
    notes = [note for *_, draft in served for note in notes_on(draft)]
    if about.drafter == "ngram" and about.drafter_id == "ngram" and method.looks_up == EARLIEST:
        notes.append(f"{engine} looks n-grams up as treeopt does: {EARLIEST}.")
    elif about.drafter == "ngram":
        manner = f", {method.looks_up}" if method.looks_up else ""
        notes.append(
            f"{engine} looks n-grams up in its own way{manner}, so its tokens per step differ. Measure them in the engine, and "
            "read them with treeopt import."
        )
    is_block = all(len(draft) == draft.depth + 1 for *_, draft in served)
    if about.drafter in BLOCKS and longest and is_block:
        notes.append(
            f"DRAFTER must have been trained for blocks of {longest} guesses or more: engines cut a wider block than that of the "
            f"training, refuse it, or silently draft it. The length is the width of the block: all {longest} guesses are verified, "
            f"not a prefix of a wider block. Unless all layers are causal, a block of another width has other guesses: tokens per step "
            f"hold for a drafter that was calibrated with --draft-depth {longest}, and this one was with {about.num_heads}."
        )
    elif not about.drafter and longest and method.limits.shape == "chain" and not method.limits.copies:
        notes.append(f"The plan does not name its drafter; this is written for {method.drafters[0]}.")
    if not method.decodes(about.batch_size):
        notes.append(
            f"{engine} decodes at most {method.max_batch_size} sequence at a time this way; this plan is for "
            f"batch size {about.batch_size}."
        )
    return notes


def check_rule_of(record: Mapping[str, Any] | None, method: Method) -> list[str]:
    """A note if a plan holds for another rule than greedy decoding. Raises InvalidInput if the engine lacks the rule."""
    rule = rule_of(record)
    if rule == "greedy" or record is None:
        return []
    if rule in method.rules:
        return [f"The plan holds for {option_of(record)}: requests must ask for the same."]
    able = [
        other.engine
        for other in methods_for(None)
        if rule in other.rules and set(other.drafters) & set(method.drafters)
    ]
    cure = f"export --to {' or '.join(able)}, or plan" if able else "plan"
    raise InvalidInput(
        f"{method.engine} with {method.name} accepts by the rule {' or '.join(method.rules)}, but the plan holds for "
        f"{marked_rule(record)}: {cure} for greedy decoding (treeopt calibrate --rule greedy)."
    )
