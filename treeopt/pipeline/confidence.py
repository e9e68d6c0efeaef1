"""What SGLang's scheduler of DSpark reads: temperatures of the confidences, and a table of what steps cost."""

import json
from collections import defaultdict
from itertools import product

import numpy as np

from treeopt.engines.sglang import COSTS, STS
from treeopt.growth.confidence import fit_temperatures
from treeopt.growth.source import Source
from treeopt.latency.estimate import StepCosts, confident_steps
from treeopt.records.profile import LatencyProfile


def tables_of(source: Source | None, profile: LatencyProfile | None) -> dict[str, str]:
    """The temperatures of a trace's confidences, and the cost table of a profile, where there are such."""
    found, trace = dict[str, object](), source.pooled if source else None
    if trace is not None and trace.confidences is not None and trace.num_conversations > 1:
        found[STS] = fit_temperatures(trace) | {"dataset": (trace.meta.get("provenance") or {}).get("dataset")}
    if source is not None and profile is not None:
        found[COSTS] = cost_table(profile, source.num_heads)
    return {name: f"{json.dumps(table)}\n" for name, table in found.items() if table}


def cost_table(profile: LatencyProfile, length: int) -> dict[str, object]:
    """Steps per second by tokens that are verified of all sequences, a staircase that never rises; empty where nothing was timed.

    A step drafts the whole block, and of each sequence as many guesses are left; without timings of that it is one with a chain.
    """
    found = defaultdict[int, list[float]](list)
    for batch_size, kept in product(profile.batch_sizes, np.eye(1 + length).tolist()):
        costs, rows = StepCosts(profile, batch_size), 1 + kept.index(1)
        steps = confident_steps(kept)
        ms = np.array([*steps.values()]) @ costs.ms(*np.array([*steps]).T)
        ms = costs.ms([rows], [rows - 1])[0] if np.isnan(ms) and rows > 1 else ms
        found[batch_size * rows] += [] if np.isnan(ms) else [float(ms)]
    tokens = sorted(n for n, ms in found.items() if ms)
    slowest = np.maximum.accumulate([np.mean(found[n]) for n in tokens])
    table = {"sample_batch_tokens": tokens, "sample_steps_per_sec": (1e3 / slowest).tolist()}
    return {**table, "max_batch_tokens": tokens[-1]} if tokens else {}
