"""What schedulers of verified guesses read or bring: SGLang's temperatures and table of step costs, vLLM's adaptive verification."""

import json
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treeopt.engines.sglang import COSTS, STS
from treeopt.growth.budget import budget_gain
from treeopt.growth.confidence import fit_temperatures
from treeopt.growth.source import Source
from treeopt.latency.estimate import StepCosts, confident_steps
from treeopt.records.drafters import is_stepwise
from treeopt.records.figure import Ratio
from treeopt.records.profile import LatencyProfile


def tables_of(source: Source | None, profile: LatencyProfile | None) -> dict[str, str]:
    """The temperatures of a trace's confidences, and the cost table of a profile, where there are such."""
    found, trace = dict[str, object](), source.pooled if source else None
    if trace is not None and trace.confidences is not None and trace.num_conversations > 1:
        found[STS] = fit_temperatures(trace) | {"dataset": (trace.meta.get("provenance") or {}).get("dataset")}
    if source is not None and profile is not None:
        found[COSTS] = cost_table(profile, source.num_heads)
    return {name: f"{json.dumps(table)}\n" for name, table in found.items() if table}


def gains_of(source: Source | None, profile: LatencyProfile | None, batch_sizes: Sequence[int]) -> dict[int, Ratio]:
    """By batch size, what a budget over all sequences' guesses brings over one length for all, where the record can say it."""
    trace, found = source.pooled if source else None, dict[int, Ratio]()
    if trace is None or trace.confidences is None or profile is None or is_stepwise(trace.meta):
        return found
    for batch_size in set(batch_sizes) & set(profile.batch_sizes):
        kept = np.arange(1 + trace.num_heads)
        ms = kept_ms(profile, batch_size, trace.num_heads)
        known = ~np.isnan(ms)
        if known[[0, -1]].all():
            each = np.interp(np.arange(batch_size * kept[-1] + 1), batch_size * kept[known], ms[known])
            gain = budget_gain(trace, np.maximum.accumulate(each), batch_size)
            found |= {batch_size: gain} if gain else {}
    return found


def kept_ms(profile: LatencyProfile, batch_size: int, length: int) -> NDArray[np.float64]:
    """(1 + K,) ms of a step that drafts the whole block and verifies 0, 1, ... K guesses of each sequence; NaN where nothing was timed.

    Without timings of blocks that are cut it is one with a chain.
    """
    costs = StepCosts(profile, batch_size)
    found = np.full(1 + length, np.nan)
    for kept in range(1 + length):
        steps = confident_steps(np.eye(1 + length)[kept].tolist())
        found[kept] = np.array([*steps.values()]) @ costs.ms(*np.array([*steps]).T)
        if np.isnan(found[kept]) and kept:
            found[kept] = costs.ms([1 + kept], [kept])[0]
    return found


def cost_table(profile: LatencyProfile, length: int) -> dict[str, object]:
    """Steps per second by tokens that are verified of all sequences, a staircase that never rises; empty where nothing was timed."""
    found = defaultdict[int, list[float]](list)
    for batch_size in profile.batch_sizes:
        for kept, ms in enumerate(kept_ms(profile, batch_size, length).tolist()):
            found[batch_size * (1 + kept)] += [] if np.isnan(ms) else [ms]
    tokens = sorted(n for n, ms in found.items() if ms)
    slowest = np.maximum.accumulate([np.mean(found[n]) for n in tokens])
    table = {"sample_batch_tokens": tokens, "sample_steps_per_sec": (1e3 / slowest).tolist()}
    return {**table, "max_batch_tokens": tokens[-1]} if tokens else {}
