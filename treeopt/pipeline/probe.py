"""Probe: what every step of decoding under typical acceptance would have accepted, in two rounds.

round one  decodes with a tree that the greedy trace of the same prompts makes likely
round two  decodes with the tree that a plan on round one chooses, so that its figures are those of its own steps
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.growth.objectives import grow
from treeopt.growth.probed import grow_coverage, probe_tree
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.probe import Probe
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note, progress
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.session import Session

PROBE_NODES = 96  # rows of the tree that is verified
POLICY_ROWS = 16  # of the tree that is followed, before latencies say better
ROUNDS = 2


def collect_probes(
    run: RunDirectory, session: Session, trace: RankTrace, *, batch_size: int, rounds: int = ROUNDS
) -> Probe:
    """The last of the rounds on the prompts of the ``trace``; a killed run goes on with the round that it was in."""
    found, family = None, grow(trace, Limits(POLICY_ROWS), objective="joint")
    for number in range(1, rounds + 1):
        policy = next_policy(run, found) if found else family.tree(len(family))
        file = run.partial("probe") / f"round-{number}.npz"
        found = _finished(file, session, trace, policy) or collect_round(
            session, trace, policy, batch_size=batch_size, title=f"Probing, round {number}"
        )
        found.save(file)
    assert found is not None, "there is a round at least"
    return found


def probe_again(run: RunDirectory, session: Session) -> None:
    """One more round, with the tree that a plan on the run's probe and profile chooses, unless it was that one's."""
    probe = run.read_probe()
    policy = next_policy(run, probe)
    if policy != probe.policy:
        title = "Probing, round 2"
        collect_round(session, run.read_trace(), policy, batch_size=16, title=title).save(run.probe)


def collect_round(session: Session, trace: RankTrace, policy: Tree, *, batch_size: int, title: str) -> Probe:
    """The probe of the trace's prompts under a policy."""
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


def _meta(session: Session, trace: RankTrace) -> dict[str, Any]:
    """Metadata of a probe of the trace's prompts."""
    meta = {key: trace.meta.get(key) for key in ("max_new_tokens", "drafter", "source", "answers", "prompt_sha256")}
    rule = {"acceptance": session.acceptance.record}
    return {**meta, **rule, "top_k": trace.top_k, "provenance": {**(trace.meta.get("provenance") or {}), **rule}}


def _finished(file: Path, session: Session, trace: RankTrace, policy: Tree) -> Probe | None:
    """A round that an earlier run has finished, if it is the same."""
    try:
        probe = Probe.load(file)
    except InvalidInput:
        return None
    expected = json.loads(json.dumps(_meta(session, trace)))
    same = all(probe.meta.get(key) == value for key, value in expected.items())
    return probe if same and probe.policy == policy else None
