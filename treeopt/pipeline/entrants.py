"""Who is decoded in a benchmark, and what is predicted of each: the plan's draft, its rivals, and trees that were given.

treeopt's own decoder takes any draft; another engine chains and perhaps dynamic trees. What is judged stands behind plain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.engines.registry import runners
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.notes import note
from treeopt.growth.source import Source
from treeopt.pipeline.trees import named_tree
from treeopt.records.benchmark import AS_IT_COMES, IDLE
from treeopt.records.estimate import Estimate
from treeopt.records.plan import ROOT, Plan, PlanEntry
from treeopt.records.rundir import RunDirectory
from treeopt.report.verdict import PUBLISHED
from treeopt.trees.draft import ANEW, Draft
from treeopt.trees.limits import EngineLimits
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.drafters.protocol import Drafter
    from treeopt.runtime.stepper import Stepper

ONLY_CHAINS = EngineLimits(shape="chain")


@dataclass(frozen=True)
class Entrant:
    """A draft that is decoded, and what the calibration predicts for it.

    predicted          : tokens per step; None where nothing is predicted
    predicted_accepted : share of the steps that emit 0, 1, ... guesses
    is_replayable      : whether its guesses are all of the draft's nodes, and those that the reference ranks
    stepper            : what decodes it, where that is not what decodes the others: the engine as it comes, or a server
    """

    draft: Draft = ROOT
    predicted: Estimate | None = None
    predicted_accepted: list[float] = field(default_factory=list)
    is_replayable: bool = True
    stepper: Stepper | None = None


AT_ONE = Entrant(ROOT, Estimate(1.0, 0.0))


def own_entrants(
    plan: Plan, entry: PlanEntry, source: Source, drafter: Drafter, files: Sequence[str | Path]
) -> dict[str, Entrant]:
    """The contenders of treeopt's own decoder.

    A fixed tree's replay on the calibration prompts is not in-sample; the grown ones are cross-fitted.
    """
    limits = plan.limits(Limits(entry.chosen.size, drafter.num_heads))
    whole = source.crossfit(limits)
    most, chain_of = len(whole.grown), entry.best("chain")
    entrants = plain_and_chosen(entry)
    published = published_tree().cut(max_depth=drafter.num_heads)
    if published.max_rank < drafter.draft_vocab_size:  # not of a draft model's chains, nor with very few tokens
        entrants[PUBLISHED] = fixed(source, published)
    entrants |= rivals(entry)
    chain = Tree.chain(chain_of.depth if chain_of else drafter.num_heads)
    entrants |= {} if chain == entry.draft else {"chain": fixed(source, chain)}
    accepted = source.held_out_shares(whole, most).tolist()
    entrants["budget"] = Entrant(whole.grown.tree(most), whole.rates(most).estimate, accepted)
    return {**entrants, **given_trees(files, source, entrants)}


def engine_entrants(
    run: RunDirectory, plan: Plan, entry: PlanEntry, source: Source, engine: Stepper, files: Sequence[str | Path]
) -> dict[str, Entrant]:
    """The contenders of another engine: plain, what the plan comes to, some chains, and files."""
    entrants, chain_of = plain_and_chosen(entry), entry.best("chain")
    best = chain_of.depth if chain_of else source.num_heads
    has_schedule = entry.chosen.overhead not in (None, 1)  # and so a drafter that its batch size does not use
    is_idle = bool(engine.idle) and not entry.speculates and has_schedule
    if engine.as_it_comes or is_idle:
        entrants["chosen"] = replace(entrants["chosen"], stepper=None if entry.speculates else engine.twin)
    takes_dynamic = engine.takes_trees and entry.batch_size == 1
    lengths = sorted({1, source.num_heads, best})
    if not (ONLY_CHAINS.takes(entry.draft, None) or (takes_dynamic and entry.draft.kind == "dynamic")):
        del entrants["chosen"]
        lengths.sort(key=lambda length: length != best)
        plans = engine.name in runners((plan.drafter or {}).get("kind"))
        note(
            f"{engine.name} takes no draft of the plan's kind, {entry.draft.kind}: its best chain, of {best}, is decoded."
            + f" To plan for it: {run.command('search', '--for', engine.name)}" * plans
        )
    entrants |= {f"chain of {n}": fixed(source, Tree.chain(n)) for n in lengths if Tree.chain(n) != entry.draft}
    entrants |= rivals(entry, ("dynamic",)) if takes_dynamic else {}
    twin_plain = AS_IT_COMES if engine.as_it_comes else IDLE if engine.idle and not is_idle else None
    entrants |= {twin_plain: replace(entrants["plain"], stepper=engine.twin)} if twin_plain else {}
    entrants |= given_trees(files, source, {*entrants, "chosen"})
    return _taken(entrants, source, engine)


def _taken(entrants: Mapping[str, Entrant], source: Source, engine: Stepper) -> dict[str, Entrant]:
    """Contenders that the engine takes, with whether their steps can be replayed; Unsupported for another."""
    found = {}
    for name, entrant in entrants.items():
        draft, is_ours = entrant.draft, not engine.about
        if not (ONLY_CHAINS.takes(draft, None) or draft.kind == "dynamic"):
            raise Unsupported(f"{engine.name} takes chains of the likeliest guesses, but {name} is another tree.")
        if not draft.topk and draft.depth > source.num_heads:
            found[name] = Entrant(draft, is_replayable=False)
        else:
            found[name] = replace(entrant, is_replayable=is_ours or len(draft) == 1)
    return found


def plain_and_chosen(entry: PlanEntry) -> dict[str, Entrant]:
    """Plain decoding and the plan's draft, with what the plan predicts."""
    return {"plain": AT_ONE, "chosen": Entrant(entry.draft, entry.chosen.tokens_per_step, entry.accepted)}


def rivals(entry: PlanEntry, kinds: Sequence[str] = ANEW) -> dict[str, Entrant]:
    """The best draft of each of these kinds by the plan, where it is not what was chosen."""
    figures = {kind: entry.others[kind] for kind in kinds if kind in entry.others}
    return {kind: Entrant(figure.draft, figure.tokens_per_step) for kind, figure in figures.items()}


def given_trees(files: Sequence[str | Path], source: Source, taken: Collection[str]) -> dict[str, Entrant]:
    """More contenders, by file or published name; InvalidInput for a name that is taken."""
    found: dict[str, Entrant] = {}
    for file in files:
        name = Path(file).stem
        if name in (*taken, *found):
            raise InvalidInput(f"Contenders need names of their own, but {name!r} is taken: rename {file}.")
        found[name] = fixed(source, named_tree(str(file)))
    return found


def fixed(source: Source, tree: Tree) -> Entrant:
    """A tree that was not grown here; without predictions where it has nodes that the source does not tell apart."""
    if not source.knows(tree):
        return Entrant(tree)
    return Entrant(tree, source.rates(tree).estimate, source.guess_shares(tree).tolist())
