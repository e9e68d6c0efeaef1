"""A plan on its way to an engine's files.

    plan ─ ranges(method) ─► served ─ parts_of ─► what is written at once ─ fault, write ─► Written

``served`` has ranges of batch sizes with the draft of each. A method that takes a schedule gets all of them at once; another
one gets a draft, which serves all batch sizes, or one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treeopt import __version__
from treeopt.engines.base import BLOCKS, COMMANDS, EARLIEST, LAST, About, Method, Written
from treeopt.engines.copied import KIND, notes_on
from treeopt.engines.registry import ENGINES, method_of, removal_notes, search_for, tree_method_of
from treeopt.errors import InvalidInput
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import ROOT, Beyond, Plan, PlanEntry, Ranges, for_all, merged
from treeopt.records.rules import marked_rule, option_of, rule_of
from treeopt.trees.draft import Draft

COMMENTED = (".sh", ".py", ".yml", ".pbtxt")  # files that can hold a comment


@dataclass(frozen=True)
class Asked:
    """What a plan asks of an engine.

    plan   : with the draft of every entry that the method takes
    parts  : what is written at once, by batch size; None alone where a schedule or one draft serves all
    notes  : where those are others than were chosen, and batch sizes that are left out
    beyond : what a schedule does above the largest batch size of the plan, in a sentence; none where there is no schedule
    """

    method: Method
    plan: Plan
    parts: Mapping[int | None, tuple[Ranges[Draft], About]]
    notes: tuple[str, ...]
    beyond: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is asked of an export beside plan and engine; `Plan.export` explains it."""

    batch_size: int | None = None
    method: str | None = None
    version: str | None = None
    beyond: Beyond = "off"
    groups: Mapping[str, Plan] = field(default_factory=dict)


AS_PLANNED = ExportOptions()


def ask(plan: Plan, engine: str, options: ExportOptions = AS_PLANNED) -> Asked:
    """The parts of a plan for an engine: its schedule where the engine takes one, else one for each batch size.

    An engine that takes chains only gets the fastest of the plan's. Raises InvalidInput for a plan that has no such draft.
    """
    method = method_for_plan(plan, engine, options.method)
    about, served = about_plan(plan, options), plan.ranges(method)
    plan_served = plan.served_by(method)
    notes, beyond = list[str](), list[str]()
    if plan_served is not plan and method.limits.only_chains:
        notes.append(f"{engine} takes chains only: written is the best of the plan's chains.")
    groups = {name: own.served_by(method) for name, own in options.groups.items() if "groups" in method.heeds}
    sizes = [options.batch_size] if options.batch_size else batch_sizes_to_export(plan, method, grouped=bool(groups))
    left_out = [str(entry.batch_size) for entry in plan.entries if entry.batch_size not in sizes]
    if left_out and None not in sizes and options.batch_size is None:
        notes.append(
            f"{engine} decodes no more sequences at once: nothing was written for batch size {', '.join(left_out)}."
        )
    if method.by_batch_size and None in sizes and plan_served.entries[-1].chosen.step_ms is not None and not plan.mix:
        served, beyond = _ended(served, max(entry.batch_size for entry in plan.entries), engine, options.beyond)
    parts: dict[int | None, tuple[Ranges[Draft], About]] = {}
    for size in sizes:
        here = replace(about, groups={name: for_all(own.entry(size).draft) for name, own in groups.items()})
        if size is None:
            parts[size] = served, here
        else:
            parts[size] = for_all(plan_served.entry(size).draft), replace(here, batch_size=size)
    return Asked(method, plan_served, parts, tuple(notes), tuple(beyond))


def about_plan(plan: Plan, options: ExportOptions) -> About:
    """The drafter, rule and latencies of a plan, and the release or build that is asked for."""
    drafter = plan.drafter or DrafterRecord()
    num_heads = drafter.get("num_heads", 1 if drafter.get("kind") == KIND else None)
    if num_heads is None:
        raise InvalidInput("The export needs the number of heads, but the plan has no drafter.num_heads.")
    return About(
        num_heads=num_heads,
        num_layers=drafter.get("num_layers") or 1,
        widest=drafter.get("widest"),
        drafter=drafter.get("kind"),
        drafter_id=drafter.get("id"),
        version=options.version,
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


def export_plan(plan: Plan, engine: str, options: ExportOptions = AS_PLANNED) -> Written:
    """An engine's files for a plan, of one batch size where they are not those of all."""
    asked = ask(plan, engine, options)
    if len(asked.parts) > 1:
        plan.entry()  # says that one has to be named
    (part,) = asked.parts.values()
    written = write_served(asked.method, *part)
    return replace(written, notes=(*asked.beyond, *asked.notes, *written.notes))


def method_for_plan(plan: Plan, engine: str, method: str | None = None) -> Method:
    """The method that writes a plan: the named one, the one planned for, that of dynamic trees, or the drafter's usual one."""
    planned, kind = plan.constraint.engine if plan.constraint else None, (plan.drafter or {}).get("kind")
    if method is None and planned is not None and planned.name == engine:
        method = planned.method
    usual = method_of(engine, kind, method)
    planned_for = planned_method(plan)
    chains = plan.constraint is not None and plan.constraint.shape == "chain"
    if method is not None or (chains and not (planned_for and planned_for.limits.dynamic)):
        return usual
    trees = tree_method_of(engine, kind, rule_of(plan.acceptance), (e.batch_size for e in plan.entries))
    return trees if trees and all(has_dynamic(trees, entry) for entry in plan.entries) else usual


def has_dynamic(method: Method, entry: PlanEntry) -> bool:
    """Whether the best draft of an entry, or one beside it, is a dynamic tree that the method takes."""
    return any(method.limits.grows(figure.draft) for figure in (entry.chosen, *entry.others.values()))


def planned_method(plan: Plan) -> Method | None:
    """The engine's method that the plan was made for; None where it was made for no engine."""
    planned = plan.constraint.engine if plan.constraint else None
    methods = ENGINES[planned.name].methods if planned and planned.name in ENGINES else ()
    return next((method for method in methods if planned and method.name == planned.method), None)


def batch_sizes_to_export(plan: Plan, method: Method, *, grouped: bool = False) -> list[int | None]:
    """The batch sizes that a plan is written for, one by one; None alone where a schedule or one draft serves all.

    An engine that decodes fewer sequences at once gets those that it can decode, if the plan has any and is for no mix.
    """
    sizes = [entry.batch_size for entry in plan.entries]
    fit: list[int | None] = [size for size in sizes if method.decodes(size)]
    if len(fit) < len(sizes) and fit and not plan.mix:
        return fit
    is_one = len(sizes) == 1 or (len(plan.ranges(method)) == 1 and not grouped)
    return [None] if method.by_batch_size or is_one else [*sizes]


def write_served(method: Method, served: Ranges[Draft], about: About) -> Written:
    """A method's files for drafts by batch size; InvalidInput for what its engine would refuse, or take for something else.

    >>> from treeopt.trees.tree import Tree
    >>> written = write_served(method_of("medusa"), for_all(Tree.chain(2)), About(num_heads=4))
    >>> written.files["medusa_choices.json"]
    '[[0], [0, 0]]\\n'
    """
    engine, served = method.engine, merged(served)
    rule_notes = check_rule_of(about.acceptance, method)
    if about.version is not None and "version" not in method.heeds:
        raise InvalidInput(f"`version` makes no difference for {engine} with {method.name}: leave it out.")
    for ranges in (served, *about.groups.values()):
        if fault := method.fault(ranges, about):
            raise InvalidInput(f"{engine} {fault}: {search_for(method)}")
    written = method.write(served, method.for_drafter(about))
    line = f"# For {ENGINES[engine].title}, checked against {method.checked}. Written by treeopt {__version__}.\n"
    texts = {**written.files, COMMANDS: written.files.get(COMMANDS, f"{written.command}\n")}
    files = {name: line + text if name.endswith(COMMENTED) else text for name, text in texts.items()}
    notes = (*written.notes, *rule_notes, *_notes_on(method, served, about), *removal_notes(method))
    return replace(written, files=files, notes=notes)


def _notes_on(method: Method, served: Ranges[Draft], about: About) -> list[str]:
    """Notes on what differs in the engine, and on what the plan leaves open."""
    engine, longest = method.engine, max(draft.depth for *_, draft in served)
    notes = [note for *_, draft in served for note in notes_on(draft)]
    if about.drafter == "ngram":
        lookup = method.looks_up and f", {method.looks_up}"
        if about.drafter_id == "ngram:earliest" and method.looks_up == EARLIEST:
            notes.append(f"{engine} looks n-grams up as ngram:earliest does: {method.looks_up}.")
        else:
            notes.append(
                f"{engine} looks n-grams up in its own way{lookup}, so its tokens per step differ. Measure them in the engine, "
                "and read them with treeopt import."
            )
    if about.drafter in BLOCKS and longest and all(len(draft) == draft.depth + 1 for *_, draft in served):
        notes.append(
            f"DRAFTER must have been trained for blocks that guess {longest} tokens or more: engines cut what is "
            f"longer, refuse it, or draft it without a word, untrained. The length is the block's width: all {longest} guesses are verified, and it is neither a prefix of a wider "
            f"block nor a tree. Blocks of other widths guess otherwise, unless all layers are causal: tokens per step hold where "
            f"the drafter was calibrated with --draft-depth {longest}, and this plan's with {about.num_heads}."
        )
    elif about.drafter is None and longest and method.limits.shape == "chain" and not method.limits.copies:
        notes.append(f"The plan does not name its drafter; this is written for {method.drafters[0]}.")
    if not method.decodes(about.batch_size):
        notes.append(
            f"{engine} decodes at most {method.max_batch_size} sequence at a time this way; this plan is for "
            f"batch size {about.batch_size}."
        )
    return notes


def check_rule_of(record: Mapping[str, Any] | None, method: Method) -> list[str]:
    """A note where a plan holds for another rule than greedy decoding; InvalidInput where the engine lacks it."""
    rule = rule_of(record)
    if rule == "greedy" or record is None:
        return []
    if rule in method.rules:
        return [f"The plan holds for {option_of(record)}: requests must ask for the same."]
    others = [other for engine in ENGINES.values() for other in engine.methods if rule in other.rules]
    able = [other.engine for other in others if set(other.drafters) & set(method.drafters)]
    cure = f"export --to {' or '.join(able)}, or plan" if able else "plan"
    raise InvalidInput(
        f"{method.engine} with {method.name} accepts by the rule {' or '.join(method.rules)}, but the plan holds for "
        f"{marked_rule(record)}: {cure} for greedy decoding (treeopt calibrate --acceptance greedy)."
    )
