"""A plan on its way to an engine: asked once, here, for a `Request` of every batch size that is to be written.

What an engine can take of a request is checked, then its own file writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from treeopt import __version__
from treeopt.engines.base import COMMANDS, EARLIEST, Method, Request, Settings, Written
from treeopt.engines.chains import BLOCKS, LAST, merged
from treeopt.engines.copied import KIND, SHAPE, notes_on
from treeopt.engines.registry import ENGINES, method_of, removal_notes, search_for, tree_method_of
from treeopt.errors import InvalidInput
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import BatchRange, Beyond, Plan, PlanEntry, each_its_own, is_setting
from treeopt.records.rules import marked_rule, option_of, rule_of
from treeopt.trees.draft import CopiedText, DDTree, Draft, DynamicLimits
from treeopt.trees.shapes import SHAPES
from treeopt.trees.tree import Tree

COMMENTED = (".sh", ".py", ".yml", ".pbtxt")  # files that can hold a comment
TAKEN = {  # by shape
    "sibling-closed": "trees whose siblings have ranks without a gap",
    "low-rank-expands": "trees in which the likeliest siblings have the children, without a gap",
    "chain": "chains",
}


@dataclass(frozen=True)
class Asked:
    """What a plan asks of an engine.

    plan     : with the draft of every entry that the method takes
    requests : by batch size; None alone where a schedule or one draft serves all
    notes    : where those are others than were chosen, and batch sizes that are left out
    beyond   : what a schedule does above the largest batch size of the plan, in a sentence; none where there is no schedule
    """

    way: Method
    plan: Plan
    requests: Mapping[int | None, Request]
    notes: tuple[str, ...]
    beyond: tuple[str, ...]


def ask(
    plan: Plan,
    engine: str,
    *,
    batch_size: int | None = None,
    method: str | None = None,
    version: str | None = None,
    max_draft_len: int | None = None,
    beyond: Beyond = "off",
    groups: Mapping[str, Plan] | None = None,
) -> Asked:
    """The requests of a plan to an engine: its schedule where the engine takes one, else one for each batch size.

    Above its largest batch size, where nobody searched, a schedule does not speculate, or goes on as there ("last"). An engine
    that takes chains only gets the fastest of the plan's, and one that takes settings by request those of the ``groups`` too.
    Raises InvalidInput for a plan that has no such draft.
    """
    drafter = plan.drafter or DrafterRecord()
    num_heads = drafter.get("num_heads", 1 if drafter.get("kind") == KIND else None)
    if num_heads is None:
        raise InvalidInput("The export needs the number of heads, but the plan has no drafter.num_heads.")
    way = method_for_plan(plan, engine, method)
    served, notes = _served(plan, way, engine)
    own = {name: _served(one, way, engine)[0] for name, one in (groups or {}).items()} if way.by_request else {}
    sizes = batch_sizes_to_export(served, way, grouped=bool(own)) if batch_size is None else [batch_size]
    left = [str(e.batch_size) for e in plan.entries if e.batch_size not in sizes]
    if left and batch_size is None and None not in sizes:
        notes.append(
            f"{engine} decodes no more sequences at once: nothing was written for batch size {', '.join(left)}."
        )
    request = Request(
        num_heads=num_heads,
        num_layers=drafter.get("num_layers") or 1,
        widest=drafter.get("widest"),
        drafter=drafter.get("kind"),
        drafter_id=drafter.get("id"),
        version=version,
        max_draft_len=max_draft_len,
        batch_size=plan.entries[-1].batch_size,
        acceptance=plan.acceptance,
        runtime=plan.runtime,
    )
    timed = served.entries[-1].chosen.step_ms is not None
    whole, said = served, list[str]()
    if way.by_batch_size and None in sizes and timed and not plan.mix:
        whole, said = _ended(served, way, engine, beyond)
    asked = {
        size: _of_all(request, whole, way) if size is None else _of_one(request, served.entry(size), way)
        for size in sizes
    }
    if own:
        asked = {
            size: replace(one, groups={name: _of_one(request, plan.entry(size), way) for name, plan in own.items()})
            for size, one in asked.items()
        }
    return Asked(way, served, asked, tuple(notes), tuple(said))


def _ended(plan: Plan, way: Method, engine: str, beyond: Beyond) -> tuple[Plan, list[str]]:
    """The plan with an entry not to speculate above the largest batch size that was searched, and that in a sentence."""
    part = plan.schedule[-1]
    largest = max(part.first, *(entry.batch_size for entry in plan.entries))
    last = max(plan.entries, key=lambda entry: entry.batch_size) if way.dynamic else plan.entries[part.entry]
    if not last.speculates or largest >= LAST:
        return plan, []
    said = f"Above batch size {largest} nothing was searched"
    if beyond == "last":
        return plan, [f"{said}: {engine} speculates there as at {largest}, at your risk."]
    off = replace(last, batch_size=largest + 1, chosen=last.plain)
    parts = [replace(part, last=largest), BatchRange(first=largest + 1, entry=len(plan.entries))]
    ended = replace(plan, entries=(*plan.entries, off), schedule=[*plan.schedule[:-1], *parts])
    return ended, [f"{said}, so {engine} does not speculate there. To go on as at {largest}: `beyond=last`."]


def export_plan(plan: Plan, engine: str, **options: int | str | None) -> Written:
    """An engine's files for a plan, of one batch size where they are not those of all; ``options`` are those of `ask`."""
    asked = ask(plan, engine, **options)  # type: ignore[arg-type]
    if len(asked.requests) > 1:
        plan.entry()  # says that one has to be named
    (request,) = asked.requests.values()
    written = write_request(request, asked.way, engine)
    return replace(written, notes=(*asked.beyond, *asked.notes, *written.notes))


def _served(plan: Plan, way: Method, engine: str) -> tuple[Plan, list[str]]:
    """The plan with the drafts that a method takes, and a note where these are chains that were not chosen."""

    def takes(draft: Draft) -> bool:
        others = ["tree"] * (way.shape != "chain")
        if way.shape == SHAPE:
            return isinstance(draft, CopiedText)
        fixed = draft.kind in ("plain", "chain", *others)
        if isinstance(draft, DDTree):  # over the whole block, whose width is another drafter
            return draft.ranks <= way.marginals and draft.depth == (plan.drafter or {}).get("num_heads")
        return is_setting(draft) if way.dynamic else fixed

    def serving(entry: PlanEntry) -> PlanEntry:
        chosen = entry.serving(takes)
        return entry if chosen is entry.chosen else replace(entry, chosen=chosen, own=None)

    if all(not entry.speculates or takes(entry.draft) for entry in plan.entries):
        return plan, []
    served = replace(plan, entries=tuple(map(serving, plan.entries)))
    if way.dynamic or way.shape != "chain":
        return served, []
    note = f"{engine} takes chains only: written is the best of the plan's chains."
    return replace(served, schedule=[]), [note]


def _of_one(request: Request, entry: PlanEntry, way: Method) -> Request:
    request = replace(request, batch_size=entry.batch_size)
    if way.shape == SHAPE:
        return replace(request, copied=entry.draft if isinstance(entry.draft, CopiedText) else None)
    if isinstance(tree := entry.draft, DDTree):
        return replace(request, lengths=((1, None, tree.depth),), marginals=tree)
    return replace(request, dynamic=entry.setting) if way.dynamic else replace(request, tree=entry.tree)


def _of_all(request: Request, plan: Plan, way: Method) -> Request:
    if way.dynamic and (plan.mix or not way.by_batch_size):
        return replace(request, dynamic=plan.entries[0].setting)
    if way.dynamic:
        ranges = each_its_own([entry.batch_size for entry in plan.entries])
        return replace(request, settings=tuple((r.first, r.last, plan.entries[r.entry].setting) for r in ranges))
    if way.shape == SHAPE:
        return _of_one(request, plan.entries[-1], way)
    if way.shape != "chain":
        return replace(request, tree=plan.entries[plan.schedule[0].entry].tree)
    lengths = ((part.first, part.last, plan.entries[part.entry].chosen.depth) for part in plan.schedule)
    draft = plan.entries[plan.schedule[0].entry].draft
    request = replace(request, marginals=draft if isinstance(draft, DDTree) else None)
    return replace(request, lengths=tuple(lengths))


def method_for_plan(plan: Plan, engine: str, method: str | None = None) -> Method:
    """The method that a plan goes to an engine by: the one named, planned for, of its dynamic trees, or usual."""
    planned, kind = plan.constraint.engine if plan.constraint else None, (plan.drafter or {}).get("kind")
    if method is None and planned is not None and planned.name == engine:
        method = planned.method
    usual = method_of(engine, kind, method)
    planned_for = planned_method(plan)
    takes_trees = planned_for is not None and planned_for.dynamic
    chains = plan.constraint is not None and plan.constraint.shape == "chain" and not takes_trees
    if method is not None or chains or not all(entry.best("dynamic") for entry in plan.entries):
        return usual
    return tree_method_of(engine, kind, rule_of(plan.acceptance), (e.batch_size for e in plan.entries)) or usual


def planned_method(plan: Plan) -> Method | None:
    """The engine's method that the plan was made for; None where it was made for no engine."""
    planned = plan.constraint.engine if plan.constraint else None
    methods = ENGINES[planned.name].methods if planned and planned.name in ENGINES else ()
    return next((method for method in methods if planned and method.name == planned.method), None)


def batch_sizes_to_export(plan: Plan, way: Method, *, grouped: bool = False) -> list[int | None]:
    """The batch sizes that a plan is written for, one by one; None alone where a schedule or one tree serves all.

    An engine that decodes fewer sequences at once gets those that it can decode, if the plan has any and is for no mix.
    """
    sizes = [entry.batch_size for entry in plan.entries]
    fit: list[int | None] = [size for size in sizes if way.decodes(size)]
    if len(fit) < len(sizes) and fit and not plan.mix:
        return fit
    entries = (
        plan.entries if way.dynamic or way.shape != "chain" else [plan.entries[part.entry] for part in plan.schedule]
    )
    drafts = {entry.setting if way.dynamic else entry.draft for entry in entries}
    return [None] if way.by_batch_size or len(sizes) == 1 or (len(drafts) == 1 and not grouped) else [*sizes]


def export_request(request: Request, engine: str, *, method: str | None = None) -> Written:
    """An engine's files for a tree, for chain lengths or for dynamic trees, as the request has them.

    >>> written = export_request(Request(tree=Tree.chain(2), num_heads=4, drafter="medusa"), "medusa")
    >>> written.files["medusa_choices.json"]
    '[[0], [0, 0]]\\n'
    """
    return write_request(request, method_of(engine, request.drafter, method), engine)


def write_request(request: Request, way: Method, engine: str) -> Written:
    """The files by one of the engine's methods; InvalidInput for what it would refuse, or silently take for another."""
    asked = check_rule_of(request.acceptance, way, engine)
    for name, heeded in (("version", way.by_version), ("max_draft_len", way.built_for_size)):
        if getattr(request, name) is not None and not heeded:
            raise InvalidInput(f"`{name}` makes no difference for {engine} with {way.name}: leave it out.")
    tree, reason = request.tree, ""
    if way.shape == "chain" and tree is not None:
        request = replace(request, lengths=((1, None, tree.depth),), tree=None)
    longest = max((length for *_, length in merged(request.lengths)), default=0) if request.lengths else 0
    if tree is not None and not SHAPES[way.shape](tree):
        reason = f"takes {TAKEN[way.shape]} only, but this tree of {len(tree)} rows, {tree.depth} deep, is none"
    elif way.dynamic:
        reason = _beyond(merged(request.dynamics), way)
    elif request.tree is not None:
        reason = _misread(request.tree, way, request.num_heads)
    elif request.drafter in BLOCKS and longest > request.num_heads:
        reason = (
            f"takes the length as the width of the block, and with {longest} guesses all would be others than those of the "
            f"{request.num_heads} that this drafter was calibrated with"
        )
    elif way.max_depth is not None and longest > way.max_depth:
        reason = f"takes chains of up to {way.max_depth} guesses, but this one has {longest}"
    if way.wider and request.drafter in BLOCKS and 0 < (request.widest or 0) < longest:
        reason = (
            f"takes chains of up to {request.widest} guesses from this drafter, which was trained for blocks of no more, but this "
            f"one has {longest}, and it {way.wider}"
        )
    if reason:
        raise InvalidInput(f"{engine} {reason}: {search_for(engine, way)}")
    for one in request.groups.values():
        write_request(one, way, engine)  # says what cannot be written for it
    written = way.write(request if request.drafter else replace(request, drafter=way.drafters[0]))
    line = f"# For {ENGINES[engine].title}, checked against {way.checked}. Written by treeopt {__version__}.\n"
    texts = {**written.files, COMMANDS: written.files.get(COMMANDS, f"{written.command}\n")}
    files = {name: line + text if name.endswith(COMMENTED) else text for name, text in texts.items()}
    notes = (*written.notes, *asked, *_notes_on(request, way, engine, longest), *removal_notes(way, engine))
    return replace(written, files=files, notes=notes)


def _notes_on(request: Request, way: Method, engine: str, longest: int) -> list[str]:
    """Notes on a request that an engine can take: what differs there, and what the plan leaves open."""
    notes = notes_on(request.copied) if request.copied else []
    if request.drafter == "ngram":
        said = f"{engine} looks n-grams up in its own way{way.looks_up and f', {way.looks_up}'}, so its tokens per step differ. "
        said += "Measure them in the engine, and read them with treeopt import."
        fits = request.drafter_id == "ngram:earliest" and way.looks_up == EARLIEST
        notes.append(f"{engine} looks n-grams up as ngram:earliest does: {way.looks_up}." if fits else said)
    speculates = any(what for *_, what in (request.dynamics if way.dynamic else request.lengths))
    if request.drafter in BLOCKS and longest and not request.marginals:
        notes.append(
            f"DRAFTER must have been trained for blocks that guess {longest} tokens or more: engines cut what is "
            f"longer, refuse it, or draft it without a word, untrained. The length is the block's width: all {longest} guesses are verified, and it is neither a prefix of a wider "
            f"block nor a tree. Blocks of other widths guess otherwise, unless all layers are causal: tokens per step hold where "
            f"the drafter was calibrated with --draft-depth {longest}, and this plan's with {request.num_heads}."
        )
    elif request.drafter is None and request.tree is None and speculates:
        notes.append(f"The plan does not name its drafter; this is written for {way.drafters[0]}.")
    if not way.decodes(request.batch_size):
        notes.append(
            f"{engine} decodes at most {way.max_batch_size} sequence at a time this way; this plan is for "
            f"batch size {request.batch_size}."
        )
    return notes


def check_rule_of(record: Mapping[str, Any] | None, way: Method, engine: str) -> list[str]:
    """A note where a plan holds for another rule than greedy decoding; InvalidInput where the engine lacks it."""
    rule = rule_of(record)
    if rule == "greedy" or record is None:
        return []
    if rule in way.rules:
        return [f"The plan holds for {option_of(record)}: requests must ask for the same."]
    every = [(name, one) for name, other in ENGINES.items() for one in other.methods if rule in one.rules]
    able = [name for name, one in every if set(one.drafters) & set(way.drafters)]
    cure = f"export --to {' or '.join(able)}, or plan" if able else "plan"
    raise InvalidInput(
        f"{engine} with {way.name} accepts by the rule {' or '.join(way.rules)}, but the plan holds for {marked_rule(record)}: {cure} "
        "for greedy decoding (treeopt calibrate --acceptance greedy)."
    )


def _beyond(settings: Settings, way: Method) -> str:
    """Which dynamic tree is beyond a method's limits; empty for none."""
    limits = way.dynamic_limits or DynamicLimits()
    for tree in (tree for *_, tree in settings if tree):
        most = limits.most_rows(tree.levels, tree.topk)
        if tree.levels > limits.levels or tree.rows > most:
            return (
                f"takes up to {limits.levels} levels, and {most} rows of {tree.levels} levels with topk {tree.topk}, "
                f"but this dynamic tree is {tree.name}"
            )
        filled = way.fills_levels == "all" or (way.fills_levels == "chains" and tree.topk == 1)
        if filled and tree.rows <= tree.levels:
            return f"needs a row for each of {tree.levels} levels and one more, but this dynamic tree has {tree.rows}"
    return ""


def _misread(tree: Tree, way: Method, num_heads: int) -> str:
    """Why a method would refuse a tree, or silently use another; empty where it takes it."""
    if len(tree) == 1:
        return ""  # the methods' own files, or their refusal
    first = [path[0] for path in tree.paths[1:] if len(path) == 1]
    limits = (
        (num_heads, tree.depth, "takes trees up to {} deep, one per head, but this one is {} deep"),
        (way.max_depth, tree.depth, "takes trees up to depth {}, but this one has {}"),
        (
            way.max_rank,
            tree.max_rank,
            "takes ranks up to {}, but the tree has {}, which it would read as another candidate",
        ),
        (way.max_nodes, len(tree) - 1, "takes up to {} choices, but the tree has {}"),
    )
    for most, has, words in limits:
        if most is not None and has > most:
            return words.format(most, has)
    if way.first_depth_closed and first != list(range(len(first))):
        return (
            f"needs ranks without gaps at depth 1, but the tree has {first} there, and two of these would get one place"
        )
    return ""
