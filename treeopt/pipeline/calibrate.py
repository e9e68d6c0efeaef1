"""Calibrate: ranks of the heads on answers, and under typical acceptance what every step would have accepted.

It goes block by block and keeps every finished block in a journal, so that a killed run continues. A probe has two rounds:
round one  decodes with a tree that the greedy trace of the same prompts makes likely
round two  decodes with the tree that a plan on round one chooses, so that its figures are those of its own steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.files import npz
from treeopt.files.journal import Advance, Journal, Say
from treeopt.files.notes import note
from treeopt.files.writing import discard
from treeopt.growth.grow import grow
from treeopt.growth.probed import grow_coverage, probe_tree
from treeopt.growth.rates import rates_by_group
from treeopt.growth.source import source_of
from treeopt.pipeline.session import session_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.merging import WHOLE, Shard, digest, join, settings_of
from treeopt.records.options import CalibrateOptions, Source
from treeopt.records.origins import Origin, Provenance, check_same_origin
from treeopt.records.pools import USUAL, Counts
from treeopt.records.probe import Probe
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import progress
from treeopt.runtime.cluster import cluster_of
from treeopt.runtime.prompts.order import MOST_DRAWN
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.cluster import DoBlock
    from treeopt.runtime.prompts.sets import Conversation, PromptSet
    from treeopt.runtime.session import Session


PROBE_NODES = 96  # rows of the tree that is verified by a probe
POLICY_ROWS = 16  # of the tree that is followed, before latencies say better
GROUP_BUDGET = 64  # rows of the trees that groups are compared by
# Conversations of a block, per row of the batch: a killed run loses one block at most, and at its end
# fewer rows than the batch are live.
BLOCK_WAVES = 4
SAME_TARGET = 0.98  # share of greedy answers' tokens that their target chooses again, rounding aside


def calibrate_run(
    run: RunDirectory, source: Source | Session, options: CalibrateOptions
) -> tuple[Calibration, RankTrace | Probe]:
    """Calibrate a model, here or by workers; see `calibrate`."""
    with run.writing(), cluster_of(options.workers) as cluster:
        session = session_of(run, source, overwrite=options.overwrite, cluster=cluster)
        return calibrate(run, session, options)


def calibrate(
    run: RunDirectory,
    session: Session,
    options: CalibrateOptions,
    *,
    counts: Counts | None = None,
    probe_rounds: int = 2,
) -> tuple[Calibration, RankTrace | Probe]:
    """Measure the drafter's ranks on the session's first conversations, or its shard of them; under typical acceptance,
    probe them too. Returns the summary of the trace, and the trace or the probe.

    counts       : what is recorded; by default the ranks and topks of the options
    probe_rounds : 1 where another one follows as soon as there is a profile (`probe_again`)
    """
    from treeopt.runtime.acceptance.rules import Greedy

    is_typical = session.acceptance.record["rule"] == "typical"
    others = {"responses": session.given, "workers": session.cluster, "shard": options.shard}
    if is_typical and (given := [name for name, value in others.items() if value]):
        raise InvalidInput(f"Typical acceptance is measured by decoding in one process: leave `{given[0]}` out.")
    counts = counts or replace(USUAL, top_k=options.ranks, topks=tuple(sorted(set(options.topks))))
    conversations = first_conversations(session, options.num_prompts)
    asking = replace(session, acceptance=Greedy()) if is_typical else session
    if not options.overwrite:
        recorded = {"max_new_tokens": options.max_new_tokens, **counts.fitting(session.drafter).record}
        blocks = blocks_of(conversations, options).values()
        notes = {**_trace_meta(session), **recorded}
        check_unmeasured(run, notes, {c.sha256: c.row for block in blocks for c in block})
    folder = run.partial("calibrate")
    trace = collect(asking, conversations, folder, options, counts)
    calibration = summary(trace, asking.provenance())
    agreement = calibration.meta.get("target_agreement", 1.0)
    if session.temperature == 0 and agreement < SAME_TARGET:
        raise InvalidInput(
            f"`rule=greedy` is for the target's own `responses`: it chose {agreement:.1%} of these tokens."
        )
    probe = None
    if is_typical:
        probe = collect_probes(run, session, trace, batch_size=options.batch_size, rounds=probe_rounds)
    run.replace_accuracies(calibration, trace, probe)
    discard(run.partial("probe"))
    discard(folder)
    return calibration, trace if probe is None else probe


def summary(trace: RankTrace, provenance: Provenance) -> Calibration:
    calibration = Calibration.from_trace(trace, provenance=provenance)
    if trace.group_names and trace.num_conversations > 1:
        whole = source_of(trace).crossfit(Limits(GROUP_BUDGET))
        for name, rate in rates_by_group(whole.every[-1], trace).items():
            calibration.meta["groups"][name]["tokens_per_step"] = rate
    return calibration


def check_unmeasured(run: RunDirectory, notes: Mapping[str, Any], prompts: Mapping[str, int | None]) -> None:
    """Raise InvalidInput where the run has another measurement than the one of these notes, which would be lost.

    prompts : sha256 of each to its row
    """
    if not run.trace.exists():
        run.check_free("a calibration", run.accuracies())
        return
    meta = run.read_trace().meta
    if run.probe.exists():
        meta = {**meta, "acceptance": run.read_probe().meta.get("acceptance")}
    answered = set(meta.get("prompt_sha256") or [])
    skipped = {row.get("row") for row in meta.get("skipped") or []}
    wanted = {prompt for prompt, row in prompts.items() if prompt in answered or row not in skipped}
    there = replace(Origin.of(meta), settings=settings_of(meta, prompts=digest(sorted(answered))))
    here = replace(Origin.of(notes), settings=settings_of(notes, prompts=digest(sorted(wanted))))
    check_same_origin(there, here, f"{run.trace} (there) and what is asked for (here)", run.remedy)


def first_conversations(session: Session, num_prompts: int) -> tuple[Conversation, ...]:
    """The first of the session's conversations; a quarter is left for bench."""
    conversations = session.prompts.conversations
    if len(conversations) < 2:
        raise InvalidInput(f"`prompts` must leave some for bench, but {session.prompts.name} has {len(conversations)}.")
    most = len(conversations) - max(1, len(conversations) // 4)
    if num_prompts > most:
        drawn = f", {MOST_DRAWN:,} of a file at most" if len(conversations) == MOST_DRAWN else ""
        note(f"Calibrating on {most} of {len(conversations)} prompts{drawn}; the rest are held out for bench.")
    return conversations[: min(num_prompts, most)]


def blocks_of(conversations: Sequence[Conversation], options: CalibrateOptions) -> dict[int, Sequence[Conversation]]:
    """The shard's blocks by their places among all. Raises InvalidInput where there is none for it."""
    size, shard = BLOCK_WAVES * options.batch_size, shard_of(options)
    blocks = [conversations[i : i + size] for i in range(0, len(conversations), size)]
    if shard.count > len(blocks):
        raise InvalidInput(
            f"`shard` divides blocks of {size} prompts, {BLOCK_WAVES} times `batch_size`, and {len(conversations)} prompts "
            f"are {len(blocks)}, but got {shard}: take fewer shards, more prompts or a smaller `batch_size`."
        )
    return {place: blocks[place] for place in shard.places(len(blocks))}


def shard_of(options: CalibrateOptions) -> Shard:
    return Shard.of(options.shard) if options.shard else WHOLE


def collect(
    session: Session,
    conversations: Sequence[Conversation],
    folder: Path,
    options: CalibrateOptions,
    counts: Counts,
    *,
    title: str = "Calibrating",
) -> RankTrace:
    """The trace of the shard of some conversations, through a journal in ``folder``, here or by the session's workers.

    What a block holds depends on its own conversations only, so a continued run ends in the same bytes.
    """
    meta = _trace_meta(session)
    counts, shard = counts.fitting(session.drafter), shard_of(options)
    all_prompts, size = digest(c.sha256 for c in conversations), BLOCK_WAVES * options.batch_size
    limits = {"max_new_tokens": options.max_new_tokens, "batch_size": options.batch_size}
    numbered = blocks_of(conversations, options)
    sizes = {number: len(block) for number, block in enumerate(numbered.values())}
    asked = tuple(c for block in numbered.values() for c in block)
    key = {**meta, **counts.record, "conversations": all_prompts, "shard": str(shard), **limits}
    journal, prompts = Journal(folder.absolute(), key, ".npz"), replace(session.prompts, conversations=asked)
    work = RankBlocks(session.source, session.provenance().threads or 1, prompts, size=size, counts=counts, **limits)
    with progress(title, len(asked)) as advance:
        if session.cluster is None:
            block = work.by(session, advance)
            journal.fill(sizes, lambda numbers: ((n, block(n, note)) for n in numbers), advance, note, in_parts=True)
        else:
            journal.fill(sizes, partial(session.cluster.do, work, note), advance, note)
    traces = [RankTrace.load(journal.block(number)) for number in sizes]
    said: dict[str, object] = {**meta, "skipped": [vars(skipped) for skipped in session.prompts.skipped]}
    if shard != WHOLE:
        said["shard"] = shard.record(all_prompts, size, traces)
    return join(traces, said)


@dataclass(frozen=True)
class RankBlocks:
    """Blocks of a calibration: every worker holds target and drafter.

    size : conversations of a block
    """

    source: Source
    threads: int
    prompts: PromptSet
    size: int
    max_new_tokens: int
    batch_size: int
    counts: Counts

    def open(self) -> DoBlock:
        from treeopt.runtime.session import open_in_worker

        return self.by(open_in_worker(self.source, self.threads, self.prompts))

    def by(self, session: Session, advance: Advance = lambda done: None) -> DoBlock:
        """What makes blocks with a session that is loaded here; it advances by each conversation that ends."""
        from treeopt.runtime.measure.ranks import collect_trace
        from treeopt.runtime.memory import with_less_memory

        rows, setup = self.batch_size, session.setup(self.max_new_tokens)

        def block(number: int, say: Say) -> bytes:
            nonlocal rows
            asked = self.prompts.conversations[number * self.size : (number + 1) * self.size]
            prompts = replace(self.prompts, conversations=asked)

            def attempt(n: int) -> RankTrace:
                return collect_trace(
                    setup,
                    prompts,
                    batch_size=n,
                    counts=self.counts,
                    given=session.given,
                    meta={"batch_size": n},
                    progress=advance,
                )

            trace, rows = with_less_memory(attempt, rows, say)
            return npz.packed(trace.save)

        return block


def _trace_meta(session: Session) -> dict[str, object]:
    """The part of a trace's meta that tells the session it was measured in."""
    given, temperature = session.given, session.temperature
    return {
        "drafter": session.drafter_record,
        "acceptance": session.acceptance.record,
        "answers": {"given": given, "temperature": temperature, "is_estimate": given and temperature is None},
        # When and how the trace was made is in calibration.json: a continued run has the same bytes.
        "provenance": replace(session.provenance(), time=None, command=None).record,
        "prompt_seed": session.prompts.seed,
        "source": session.source.given,
    }


def collect_probes(run: RunDirectory, session: Session, trace: RankTrace, *, batch_size: int, rounds: int) -> Probe:
    """The last of the rounds on the prompts of the ``trace``; a killed run goes on with the round that it was in."""
    found, grown = None, grow(trace, Limits(POLICY_ROWS))
    for number in range(1, rounds + 1):
        policy = next_policy(run, found) if found else grown.largest(POLICY_ROWS)
        key = {**_meta(session, trace), "policy": policy.choices}
        journal = Journal(run.partial("probe") / f"round-{number}", key, ".npz")
        if not journal.is_finished(0):
            collect_round(session, trace, policy, batch_size, f"Probing, round {number}").save(journal.block(0))
        found = Probe.load(journal.block(0))
    assert found is not None, "there is a round at least"
    return found


def probe_again(run: RunDirectory, session: Session) -> None:
    """One more round, with the tree that a plan on the run's probe and profile chooses, unless it was that one's."""
    probe = run.read_probe()
    policy = next_policy(run, probe)
    if policy != probe.policy:
        collect_round(session, run.read_trace(), policy, 16, "Probing, round 2").save(run.probe)


def collect_round(session: Session, trace: RankTrace, policy: Tree, batch_size: int, title: str) -> Probe:
    from treeopt.runtime.measure.probe import collect_probe
    from treeopt.runtime.measure.ranks import turn_prompts
    from treeopt.runtime.memory import with_less_memory

    setup, prompts = session.setup(trace.meta["max_new_tokens"]), turn_prompts(session.prompts, trace)
    tree, meta = probe_tree(Calibration.from_trace(trace), size=PROBE_NODES, policy=policy), _meta(session, trace)
    with progress(title, len(prompts)) as advance:

        def attempt(rows: int) -> Probe:
            return collect_probe(setup, prompts, tree=tree, policy=policy, batch_size=rows, meta=meta, progress=advance)

        return with_less_memory(attempt, batch_size, note)[0]


def next_policy(run: RunDirectory, probe: Probe) -> Tree:
    """The tree that a plan chooses at the first batch size of the run's profile, or one of `POLICY_ROWS` rows."""
    if run.profile.exists():
        profile = run.read_profile()
        entry = plan_trees(probe, profile, PlanRequest(batch_sizes=profile.batch_sizes[:1])).entries[0]
        if entry.chosen.size > 1:
            return entry.tree
    family = grow_coverage(probe, Limits(POLICY_ROWS))
    return family.tree(len(family))


def _meta(session: Session, trace: RankTrace) -> dict[str, object]:
    meta = {key: trace.meta.get(key) for key in ("max_new_tokens", "drafter", "source", "answers", "prompt_sha256")}
    rule = {"acceptance": session.acceptance.record}
    return {
        **meta,
        **rule,
        "top_k": trace.top_k,
        "provenance": replace(Provenance.of(trace.meta), acceptance=session.acceptance.record).record,
    }
