"""Real decoding: contenders decode the same prompts, interleaved, block by block through journals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.latency.rounds import busy, processor_share
from treeopt.pipeline.calibrate import collect, first_conversations
from treeopt.records.contender import Quality
from treeopt.records.pools import Counts
from treeopt.records.rules import SAME_TEXT, check_drafter, check_rule
from treeopt.records.rundir import RunDirectory
from treeopt.records.stopping import LOOKS
from treeopt.records.trace import Answers, RankTrace
from treeopt.report.terminal import note, progress
from treeopt.trees.dynamic import AnyTree
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.engines import Engine
    from treeopt.runtime.measure.bench import Entrant, Run
    from treeopt.runtime.measure.ranks import Prompt
    from treeopt.runtime.prompts.sets import Conversation
    from treeopt.runtime.session import Session

ANSWERED_AT_ONCE = 16  # prompts, where plain answers are wanted alone
OTHER_GROUPS = 0.1  # share of the prompts that may be of other groups than those calibrated on


@dataclass(frozen=True)
class Decoding:
    """Who decodes, and how.

    source   : what the entrants were predicted from
    entrants : name to its tree, and what is predicted of it
    folder   : of the journals
    engine   : another runtime that decodes
    """

    session: Session
    source: Answers
    entrants: Mapping[str, Entrant]
    batch_size: int
    rounds: int
    max_new_tokens: int
    folder: Path
    engine: Engine | None = None

    def __post_init__(self) -> None:
        check_drafter(self.source.meta.get("drafter"), self.session.drafter_record, "Bench decodes")
        check_rule(self.source.meta.get("acceptance"), self.rule, "the run's calibration holds")

    @property
    def rule(self) -> Mapping[str, Any]:
        return self.session.acceptance.record

    @property
    def trees(self) -> dict[str, AnyTree | None]:
        return {name: entrant.tree for name, entrant in self.entrants.items()}

    @property
    def origin(self) -> dict[str, Any]:
        """What a benchmark says of who decoded it."""
        known, engine = self.session.provenance(seed=0).record(), self.engine
        if engine is None:
            return known
        about = {"about": engine.about} if engine.about else {}
        return {**known, "engine": {"name": engine.name, "version": engine.version, **about}}

    @property
    def counts(self) -> Counts:
        """What to record of the plain answers so that every contender can be replayed.

        Ranks beyond those told apart would be misses in replay, but decoding accepts them.
        """
        trees = [tree for tree in self.trees.values() if tree]
        ranks = [1 + tree.max_rank for tree in trees if isinstance(tree, Tree)]
        most = [tree.most for tree in trees if not isinstance(tree, Tree)]
        return Counts(
            max(self.source.meta.get("top_k") or 1, *ranks, 1),
            max((tree.levels for tree in most), default=0),
            tuple(sorted({tree.topk for tree in most})),
        )


def decode(
    decoding: Decoding, conversations: Sequence[Conversation], *, reference: RankTrace | None = None
) -> Benchmark:
    """What all contenders answer to some conversations.

    reference  the trace of the conversations' plain answers; they are answered where it is missing
    """
    from treeopt.runtime.measure.bench import Contest
    from treeopt.runtime.measure.ranks import turn_prompts
    from treeopt.runtime.memory import with_less_memory

    session = decoding.session
    reference = reference or _plain_answers(decoding, conversations)
    prompts = turn_prompts(session.prompts, reference)
    visits, rows = with_less_memory(lambda rows: _visits(decoding, prompts, rows), decoding.batch_size, note)
    has_one_text, quality = decoding.rule["rule"] in SAME_TEXT, None
    if not has_one_text:
        quality, _ = with_less_memory(
            lambda rows: _quality(session, visits, decoding.trees, prompts, reference, batch_size=rows), rows, note
        )
    compared = _engine_answers(decoding, prompts, visits) if decoding.engine else reference
    return replace(
        Contest(session.target, prompts, compared, rows, has_one_text).result(visits, decoding.entrants),
        quality=quality,
        max_new_tokens=decoding.max_new_tokens,
        loop_share=compared.loop_share(),
        skipped=reference.meta.get("skipped", []),
        provenance=decoding.origin,
    )


def _plain_answers(decoding: Decoding, conversations: Sequence[Conversation]) -> RankTrace:
    """The trace of what the target answers without speculation."""
    from treeopt.runtime.acceptance.greedy import Greedy

    session = replace(decoding.session, given=False)
    if decoding.rule["rule"] == "typical":
        session = replace(session, acceptance=Greedy())
    return collect(
        session,
        conversations,
        decoding.folder / "answers",
        max_new_tokens=decoding.max_new_tokens,
        batch_size=ANSWERED_AT_ONCE,
        counts=decoding.counts,
        title="Plain answers of the bench prompts",
    )


def _engine_answers(decoding: Decoding, prompts: Sequence[Prompt], visits: Sequence[dict[str, Any]]) -> RankTrace:
    """The plain answers of another runtime, with the drafter's ranks."""
    from treeopt.runtime.measure.ranks import rank_answers

    rows = [row for visit in visits if visit["round"] == 0 for row in visit["runs"]["plain"]["rows"]]
    answers = [row["tokens"] for row in sorted(rows, key=lambda row: row["id"])]
    setup, tokens = decoding.session.setup(decoding.max_new_tokens), [prompt.tokens for prompt in prompts]
    return rank_answers(setup, tokens, answers, batch_size=ANSWERED_AT_ONCE, counts=decoding.counts)


def _visits(decoding: Decoding, prompts: Sequence[Prompt], rows: int) -> list[dict[str, Any]]:
    """Every block of prompts decoded by every contender in every round, ``rows`` at once, through a journal."""
    from treeopt.runtime.measure.bench import decode_contenders

    session, trees = decoding.session, decoding.trees
    key = {
        **decoding.origin,
        "time": None,
        "command": None,
        "rounds": decoding.rounds,
        "trees": {name: written(tree) for name, tree in trees.items()},
        "prompts": [prompt.sha256 for prompt in prompts],
        "max_new_tokens": decoding.max_new_tokens,
        "batch_size": rows,
        "looks": LOOKS,
    }
    journal = Journal(decoding.folder / f"batch-size-{rows}", key)
    with progress(f"Decoding with {len(trees)} contenders", len(prompts) * len(trees) * decoding.rounds) as advance:
        visits = decode_contenders(
            _decoder(decoding, prompts, rows),
            prompts,
            trees,
            batch_size=rows,
            rounds=decoding.rounds,
            journal=journal,
            progress=advance,
        )
    share = processor_share([run for visit in visits for run in visit["runs"].values()])
    if session.target.device.type == "cpu" and (caution := busy(share)):
        note(caution)
    return visits


def written(tree: AnyTree | None) -> Any:
    """A tree as JSON, to tell one benchmark from another."""
    return None if tree is None else tree.choices if isinstance(tree, Tree) else str(tree)


def _decoder(decoding: Decoding, prompts: Sequence[Prompt], rows: int) -> Callable[[str, Any], Run]:
    """What decodes some prompts with a contender, by its name."""
    from treeopt.runtime.decode import Decoder
    from treeopt.runtime.measure.bench import ask_engine, decode_block

    setup, trees, engine = decoding.session.setup(decoding.max_new_tokens), decoding.trees, decoding.engine
    if engine is None:
        decoder = Decoder.for_prompts(setup, [prompt.tokens for prompt in prompts], trees.values(), batch_size=rows)
        return lambda name, asked: decode_block(decoder, trees[name], asked)
    told = {name: None if e.is_own else e.tree or Tree.chain(0) for name, e in decoding.entrants.items()}
    return lambda name, asked: ask_engine(engine, told[name], setup.stop, asked, rows)


def _quality(
    session: Session,
    visits: Sequence[dict[str, Any]],
    contenders: Iterable[str],
    prompts: Sequence[Prompt],
    reference: RankTrace,
    *,
    batch_size: int,
) -> dict[str, Quality]:
    """What the target thinks of every contender's texts, and how far they are from the plain ones."""
    from treeopt.runtime.measure.quality import measure_quality

    found = {}
    with progress("Judging the texts", None):
        for name in contenders:
            runs = [visit["runs"][name] for visit in visits if visit["round"] == 0 and name in visit["runs"]]
            texts = dict(sorted((row["id"], row["tokens"]) for run in runs for row in run["rows"]))
            quality = measure_quality(
                session.target,
                [prompts[i].tokens for i in texts],
                list(texts.values()),
                [reference.texts[i] for i in texts],
                conversations=[prompts[i].cluster for i in texts],
                batch_size=batch_size,
            )
            found[name] = Quality(**quality)  # type: ignore[arg-type]  # one of the figures is a number of answers
    return found


def held_out_conversations(
    run: RunDirectory, session: Session, trace: Answers, wanted: int
) -> tuple[Conversation, ...]:
    """The first of the session's conversations that the trace was not measured on."""
    hashes = trace.meta.get("prompt_sha256")
    if hashes is None:
        raise InvalidInput(f"Held-out prompts need to know those of the trace, but {run.trace} has no prompt_sha256.")
    return first_conversations(replace(session, prompts=session.prompts.without(hashes)), wanted)


def other_groups(calibrated: Sequence[str], decoded: Sequence[str]) -> str | None:
    """Says so where prompts are of other groups than those calibrated on; None where their shares are alike.

    Each of them is the group of a conversation. Shares may differ by a conversation of every group.

    >>> other_groups(["a", "b"] * 8, ["a", "b", "a"])
    >>> other_groups(["a"] * 9 + ["b"], ["b"] * 8)
    "The prompts are of other groups than the calibration's: b 100% (calibrated: 10%), a 0% (calibrated: 90%)."
    """
    ours, theirs, n = Counter(decoded), Counter(calibrated), len(decoded)
    expected = {group: n * theirs[group] / len(calibrated) for group in (*ours, *theirs)}
    too_many = {group: ours[group] - expected[group] for group in expected}
    if sum(max(more - 1, 0) for more in too_many.values()) <= OTHER_GROUPS * n:
        return None
    most = sorted(too_many, key=lambda group: -abs(too_many[group]))[:3]
    shares = [f"{g or '(none)'} {ours[g] / n:.0%} (calibrated: {theirs[g] / len(calibrated):.0%})" for g in most]
    return f"The prompts are of other groups than the calibration's: {', '.join(shares)}."
