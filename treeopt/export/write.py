"""An engine's files for a tree, a chain or a plan: what it can take is checked before, and they are read again after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from treeopt import __version__
from treeopt.errors import InvalidInput, Unsupported
from treeopt.export.chains import BLOCKS, merged
from treeopt.export.engine import COMMANDS, Method, Request, Settings, Written
from treeopt.export.table import ENGINES
from treeopt.records.origins import Drafter
from treeopt.records.plan import Plan
from treeopt.records.ranges import each_its_own
from treeopt.records.rules import option_of, rule_of
from treeopt.records.served import setting_of
from treeopt.trees.dynamic import DynamicLimits
from treeopt.trees.shapes import SHAPES
from treeopt.trees.tree import Tree

COMMENTED = (".sh", ".py", ".yml", ".pbtxt")  # files that can hold a comment


def method_of(engine: str, drafter: str | None = None, method: str | None = None) -> Method:
    """The method of an engine that runs a kind of drafter, or the one that is named.

    Without a drafter the engine's usual one. Raises Unsupported for a name that is not known, InvalidInput for
    a drafter that the engine or the method cannot run.

    >>> method_of("vllm", "medusa").shape
    'chain'
    >>> method_of("tgi", "eagle3")
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: tgi runs drafters of the kinds medusa, ngram, but this drafter is eagle3. It runs in \
eagle2, tensorrt-llm, vllm, sglang, fastrl, lmdeploy, llama-cpp, rtp-llm, openvino.
    """
    if engine not in ENGINES:
        raise Unsupported(f"An engine must be one of {', '.join(ENGINES)}, but got {engine!r}.")
    methods = ENGINES[engine].methods
    if method is not None:
        named = {one.name: one for one in methods}
        if method not in named:
            raise Unsupported(f"--method of {engine} must be one of {', '.join(named)}, but got {method!r}.")
        methods = (named[method],)
    for one in methods:
        if drafter is None or drafter in one.drafters:
            return one
    kinds = dict.fromkeys(kind for one in methods for kind in one.drafters)
    others = [name for name, other in ENGINES.items() if any(drafter in m.drafters for m in other.methods)]
    able = f" It runs in {', '.join(others)}." if others else ""
    way = engine if method is None else f"{engine} with {method}"
    raise InvalidInput(f"{way} runs drafters of the kinds {', '.join(kinds)}, but this drafter is {drafter}.{able}")


def tree_method_of(engine: str, drafter: str | None, rule: str, batch_sizes: Iterable[int]) -> Method | None:
    """The engine's method of dynamic trees for a kind of drafter, a rule and batch sizes; None where it has none.

    >>> tree_method_of("sglang", "eagle3", "greedy", [8]).name, tree_method_of("vllm", "eagle3", "greedy", [8])
    ('dynamic-tree', None)
    """
    most = max(batch_sizes, default=1)
    for one in ENGINES[engine].methods:
        able = drafter in one.drafters and rule in one.rules and most <= (one.max_batch_size or most)
        if one.dynamic and able:
            return one
    return None


def grows_trees(drafter: str | None) -> bool:
    """Whether an engine grows dynamic trees of a kind of drafter.

    >>> grows_trees("eagle3"), grows_trees("medusa")
    (True, False)
    """
    return any(one.dynamic and drafter in one.drafters for engine in ENGINES.values() for one in engine.methods)


def runners(drafter: str | None) -> dict[str, Method]:
    """The engines that run a kind of drafter, and their usual method for it; all without a kind.

    >>> list(runners("redrafter"))
    ['redrafter']
    """
    return {
        name: method_of(name, drafter)
        for name, engine in ENGINES.items()
        if drafter is None or any(drafter in one.drafters for one in engine.methods)
    }


def export_request(request: Request, engine: str, *, method: str | None = None) -> Written:
    """An engine's files for a tree or for chain lengths, as the request has them.

    >>> written = export_request(Request(tree=Tree.chain(2), num_heads=4, drafter="medusa"), "medusa")
    >>> written.files["medusa_choices.json"]
    '[[0], [0, 0]]\\n'
    """
    way = method_of(engine, request.drafter, method)
    notes = check_rule_of(request.acceptance, way, engine)
    if request.drafter == "ngram":
        notes.append(
            f"{engine} looks n-grams up in its own way, so its tokens per step differ. Measure them in the "
            "engine, and read them with treeopt import."
        )
    for flag, given, heeded in (
        ("--engine-version", request.version, way.by_version),
        ("--max-draft-len", request.max_draft_len, way.built_for_size),
    ):
        if given is not None and not heeded:
            raise InvalidInput(f"{flag} makes no difference for {engine} with {way.name}: leave it out.")
    if way.shape == "chain" and request.tree is not None:
        check_shape_of(request.tree, way, engine)
        request = replace(request, lengths=((1, None, request.tree.depth),), tree=None)
    asked = request.dynamics if way.dynamic else request.lengths
    if way.dynamic:
        check_dynamics(request.dynamics, way, engine)
    elif request.dynamic or request.settings:
        raise InvalidInput(f"{engine} with {way.name} takes no dynamic trees.")
    if request.tree is not None:
        check(request.tree, way, engine, request)
    elif request.drafter in BLOCKS and (most := max(length for *_, length in request.lengths)):
        notes.append(
            f"DRAFTER must have been trained for blocks that guess {most} tokens or more: engines cut or refuse what is "
            "longer."
        )
    elif request.drafter is None and any(what for *_, what in asked):
        notes.append(f"The plan does not name its drafter; this is written for {way.drafters[0]}.")
    if way.max_batch_size is not None and request.batch_size > way.max_batch_size:
        notes.append(
            f"{engine} decodes at most {way.max_batch_size} sequence at a time this way; this plan is for "
            f"batch size {request.batch_size}."
        )
    notes += standing(way, engine)
    written = completed(way.write(request), way, engine)
    try:
        read = way.parse(written.files)
    except (InvalidInput, LookupError, ValueError) as error:
        raise InvalidInput(f"Nothing was written, since {engine} would not read it: {error}") from None
    wanted = (request.tree or Tree.chain(0)) if isinstance(read, Tree) else merged(asked)
    if (read if isinstance(read, Tree) else merged(read)) != wanted:
        raise InvalidInput(f"Nothing was written, since {engine} would read something else from it.")
    return replace(written, notes=(*written.notes, *notes))


def completed(written: Written, way: Method, engine: str) -> Written:
    """The files with the launch command among them, and a first line that says for which engine they are.

    Files that cannot hold a comment stay as they are.
    """
    line = f"# For {ENGINES[engine].title}, checked against {way.checked}. Written by treeopt {__version__}.\n"
    texts = {**written.files, COMMANDS: written.files.get(COMMANDS, f"{written.command}\n")}
    files = {name: line + text if name.endswith(COMMENTED) else text for name, text in texts.items()}
    return replace(written, files=files)


def way_of(plan: Plan, engine: str, method: str | None = None) -> Method:
    """The method that a plan goes to an engine by: the one named, planned for, of its dynamic trees, or usual."""
    planned, kind = plan.constraint.engine if plan.constraint else None, (plan.drafter or {}).get("kind")
    if method is None and planned is not None and planned.name == engine:
        method = planned.method
    usual = method_of(engine, kind, method)
    chains = plan.constraint is not None and plan.constraint.shape == "chain" and planned_trees(plan) is None
    if method is not None or chains or not all(entry.dynamic for entry in plan.entries):
        return usual
    return tree_method_of(engine, kind, rule_of(plan.acceptance), (e.batch_size for e in plan.entries)) or usual


def planned_trees(plan: Plan) -> Method | None:
    """The method of dynamic trees that the plan was made for; None where it was made for none."""
    planned = plan.constraint.engine if plan.constraint else None
    methods = ENGINES[planned.name].methods if planned and planned.name in ENGINES else ()
    return next((one for one in methods if planned and one.dynamic and one.name == planned.method), None)


def loads_of(plan: Plan, way: Method) -> list[int | None]:
    """The batch sizes that a plan is written for, one by one; None alone where a schedule or one tree serves all.

    An engine that decodes fewer sequences at once gets those that it can decode, if the plan has any and is for no mix.
    """
    sizes: list[int | None] = [entry.batch_size for entry in plan.entries]
    most = way.max_batch_size
    fit = [size for size in sizes if most is None or (size or 0) <= most]
    if len(fit) < len(sizes) and fit and not plan.mix:
        return fit
    if way.dynamic:
        one = way.by_batch_size or len({setting_of(plan, entry) for entry in plan.entries}) == 1
        return [None] if one else sizes
    trees = {tuple(map(tuple, entry.medusa_choices)) for entry in plan.entries}
    lengths = {plan.entries[part.entry].depth for part in plan.schedule}
    if len(trees) == 1 or way.by_batch_size or (way.shape == "chain" and len(lengths) == 1):
        return [None]
    return sizes


def export_plan(
    plan: Plan,
    engine: str,
    *,
    batch_size: int | None = None,
    method: str | None = None,
    version: str | None = None,
    max_draft_len: int | None = None,
) -> Written:
    """An engine's files for a plan: its schedule where the engine takes chains, else the entry of a batch size.

    Without a ``batch_size`` all must have one tree, or the engine decodes one of the plan's alone (`loads_of`).

    Raises InvalidInput for a plan of trees and an engine of chains: the best chain is no path of the best tree.
    """
    drafter = plan.drafter or Drafter()
    num_heads = drafter.get("num_heads")
    if num_heads is None:
        raise InvalidInput("The export needs the number of heads, but the plan has no drafter.num_heads.")
    way = way_of(plan, engine, method)
    request = Request(
        num_heads=num_heads,
        num_layers=drafter.get("num_layers") or 1,
        drafter=drafter.get("kind"),
        drafter_id=drafter.get("id"),
        version=version,
        max_draft_len=max_draft_len,
        batch_size=plan.entries[-1].batch_size,
        acceptance=plan.acceptance,
    )
    loads = loads_of(plan, way) if batch_size is None else [batch_size]
    if way.dynamic:
        request = replace(request, **_dynamic_of(plan, way, loads))
    elif loads != [None] and (len(loads) == 1 or way.shape != "chain"):
        batch_size = loads[0] if len(loads) == 1 else None
        entry = plan.entry(batch_size)
        request = replace(request, tree=entry.tree, batch_size=entry.batch_size)
    elif way.shape == "chain":
        for entry in plan.entries:
            check_shape_of(entry.tree, way, engine)
        lengths = ((part.first, part.last, plan.entries[part.entry].depth) for part in plan.schedule)
        request = replace(request, lengths=tuple(lengths))
    else:
        request = replace(request, tree=plan.entries[plan.schedule[0].entry].tree)
    return export_request(request, engine, method=way.name)


def _dynamic_of(plan: Plan, way: Method, loads: Sequence[int | None]) -> dict[str, Any]:
    """What a request has of a plan's dynamic trees: one setting, or that of every range of batch sizes."""
    if loads[0] is None and way.by_batch_size and not plan.mix:
        ranges = each_its_own([entry.batch_size for entry in plan.entries])
        return {"settings": tuple((r.first, r.last, setting_of(plan, plan.entries[r.entry])) for r in ranges)}
    entry = plan.entries[0] if loads[0] is None else plan.entry(loads[0] if len(loads) == 1 else None)
    return {"dynamic": setting_of(plan, entry)} | ({} if loads[0] is None else {"batch_size": entry.batch_size})


def check_rule_of(record: Mapping[str, Any] | None, way: Method, engine: str) -> list[str]:
    """What to say where a plan holds for another rule than greedy decoding; InvalidInput where the engine lacks it."""
    rule = rule_of(record)
    if rule == "greedy" or record is None:
        return []
    asked = option_of(record)
    if rule in way.rules:
        return [f"The plan holds for {asked}: requests must ask for the same."]
    able = [
        name
        for name, other in ENGINES.items()
        for one in other.methods
        if rule in one.rules and set(one.drafters) & set(way.drafters)
    ]
    cure = f"export --to {' or '.join(able)}, or plan" if able else "plan"
    raise InvalidInput(
        f"{engine} with {way.name} accepts by the rule {' or '.join(way.rules)}, but the plan holds for {asked}: {cure} "
        "for greedy decoding (treeopt calibrate --acceptance greedy)."
    )


def standing(way: Method, engine: str) -> list[str]:
    """What to say where the engine's newest releases have not got a method any more.

    >>> standing(method_of("vllm", "medusa"), "vllm")
    ['This way into vLLM was removed upstream in 0.33.0; it is for releases up to 0.32.0.']
    """
    if way.status == "live":
        return []
    return [f"This way into {ENGINES[engine].title} was {way.status}; it is for {way.versions}."]


def check_shape_of(tree: Tree, way: Method, engine: str) -> None:
    """Raise InvalidInput for a tree that is not of the method's shape, with the command that finds one that is."""
    if SHAPES[way.shape](tree):
        return
    what = {
        "sibling-closed": "trees whose siblings have ranks without a gap",
        "low-rank-expands": "trees in which the likeliest siblings have the children, without a gap",
        "chain": "chains",
    }[way.shape]
    raise InvalidInput(
        f"{engine} takes {what} only, but this tree of {len(tree)} rows, {tree.depth} deep, is none: "
        f"{search_for(engine, way)}"
    )


def search_for(engine: str, way: Method) -> str:
    """The command that plans what a method takes."""
    return f"treeopt search --for {engine}" + (f" --method {way.name}" if len(ENGINES[engine].methods) > 1 else "")


def check_dynamics(settings: Settings, way: Method, engine: str) -> None:
    """Raise InvalidInput for a dynamic tree that is beyond the method's limits."""
    limits = way.dynamic_limits or DynamicLimits()
    for *_, tree in settings:
        if tree and (tree.levels > limits.levels or tree.rows > limits.most_rows(tree.levels, tree.topk)):
            raise InvalidInput(
                f"{engine} takes up to {limits.levels} levels, and {limits.most_rows(tree.levels, tree.topk)} rows of "
                f"{tree.levels} levels with topk {tree.topk}, but this dynamic tree is {tree.name}: "
                f"{search_for(engine, way)}"
            )


def check(tree: Tree, way: Method, engine: str, request: Request) -> None:
    """Raise InvalidInput where the engine would refuse the tree, or silently use another."""
    search = search_for(engine, way)
    if len(tree) == 1:
        return  # the methods' own files, or their refusal
    if tree.depth > request.num_heads:
        raise InvalidInput(f"A tree may be {request.num_heads} deep, one per head, but this one is {tree.depth} deep.")
    if way.max_depth is not None and tree.depth > way.max_depth:
        raise InvalidInput(f"{engine} takes trees up to depth {way.max_depth}, but this one has {tree.depth}: {search}")
    if way.max_rank is not None and tree.max_rank > way.max_rank:
        raise InvalidInput(
            f"{engine} takes ranks up to {way.max_rank}, but the tree has {tree.max_rank}, which it would read as "
            f"another candidate: {search}"
        )
    if way.max_nodes is not None and len(tree) - 1 > way.max_nodes:
        raise InvalidInput(f"{engine} takes up to {way.max_nodes} choices, but the tree has {len(tree) - 1}: {search}")
    first = [path[0] for path in tree.paths[1:] if len(path) == 1]
    if way.first_depth_closed and first != list(range(len(first))):
        raise InvalidInput(
            f"{engine} needs ranks without gaps at depth 1, but the tree has {first} there, and two of these "
            f"would get the same place: {search}"
        )
    check_shape_of(tree, way, engine)
