"""Profile by a user's own benchmark: a command that is run for every tree, in interleaved rounds (`calls`).

The rules of noise are those of `treeopt.latency.rounds`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treeopt.files.journal import Journal
from treeopt.files.provenance import Provenance
from treeopt.growth.source import source_of
from treeopt.latency.rounds import drifts, timings
from treeopt.pipeline.profile.calls import Calls, Template
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import Wanted, check_sizes, deepest_trees, timing_trees, tree_families
from treeopt.pipeline.profile.table import NUM_HEADS, UNKNOWN_CONTEXT
from treeopt.records.inputs import find_accuracies, inputs_of
from treeopt.records.origins import Runtime
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory


def profile_command(
    run: RunDirectory,
    command: str,
    *,
    calibration: str | None = None,
    num_heads: int | None = None,
    runtime: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> LatencyProfile:
    """Run ``command`` for trees of the wanted sizes until latencies are known; ``options`` are those of `Wanted`.

    At least three rounds, each with all trees of a setting and plain decoding in random order; more until every
    latency is known well enough or the time is up. Settings of the run's profile that the same command measured
    before are kept.
    """
    template, wanted = Template.parse(command), Wanted(**options)
    template.check(wanted)
    whose: Runtime = {"name": runtime or Path(template.words[0]).name, "command": command}
    provenance = Provenance().record()
    check_can_join(run, whose, provenance, overwrite=overwrite)
    used, record = find_accuracies(run, calibration) or (None, None)
    source = source_of(record) if record else None
    families = tree_families(source, num_heads or (source.num_heads if source else NUM_HEADS), wanted.largest)
    check_sizes(wanted.sizes or (), families)
    shapes = template.has("tree") or template.has("depth")
    contexts = sorted(set(wanted.contexts)) or [UNKNOWN_CONTEXT]
    settings = [(batch_size, context) for batch_size in sorted(set(wanted.batch_sizes)) for context in contexts]
    points: list[StepTiming] = []
    plain: list[StepTiming] = []
    left_s = wanted.time_limit_s
    for i, (batch_size, context) in enumerate(settings):
        sizes = wanted.sizes_at(batch_size)
        trees = timing_trees(families, sizes, given=bool(wanted.sizes)) if shapes else deepest_trees(families, sizes)
        key = {
            "command": command,
            "batch_size": batch_size,
            "context": context,
            "trees": [tree.choices for tree in trees],
            "precision": wanted.precision,
            "time_limit_s": wanted.time_limit_s,
        }
        folder = run.partial("profile") / f"command-batch-size-{batch_size}-context-{context}"
        calls = Calls(template, batch_size, context, trees, folder / "trees", Journal(folder, key))
        rounds = calls.rounds(left_s / (len(settings) - i), wanted.precision)
        left_s -= sum(round_["seconds"] for round_ in rounds)
        timed, reference = timings(rounds, trees, batch_size, context_tokens=context)
        points += timed
        plain.append(reference)
    info = {
        "measures": "step",
        "drift": drifts(plain),
        "provenance": provenance,
        "inputs": inputs_of(used) if used else {},
    }
    return finish(run, LatencyProfile(tuple(points), tuple(plain), whose, info), wanted.precision)
