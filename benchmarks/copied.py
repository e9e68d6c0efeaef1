"""A plan of drafters that copy text, proved beside a sweep: what `treeopt bench` decodes, and 11 or 12 settings more.

    python benchmarks/copied.py RUN openvino [--num-prompts 24] [--rounds 1]
    python benchmarks/copied.py RUN llama-cpp --launch 'llama-server -m MODEL.gguf --metrics --port {port} {options}'

All answer the same requests in turn; what is predicted of them is the replay of these very requests, by the run's profile.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

import treeopt
from treeopt.latency.costs import StepCosts
from treeopt.pipeline.copied import tried_on
from treeopt.pipeline.logged import tried_drafts
from treeopt.planning.table import Candidate, mean_ms
from treeopt.records.benchmark import Benchmark
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory


def openvino() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("openvino:prompt-lookup", {"num_assistant_tokens": length, "max_ngram_size": longest})
        for length in (2, 4, 8, 16)
        for longest in (2, 3, 8)
    ]


def llama_cpp() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = [("ngram-cache", {})]
    found += [
        ("ngram-mod", {"n-match": n, "n-max": most, "n-min": most // 2}) for n, most in ((8, 16), (16, 32), (24, 64))
    ]
    for name in ("ngram-simple", "ngram-map-k"):
        found += [(name, {"size-n": n, "size-m": m}) for n, m in ((3, 4), (4, 8), (8, 16), (12, 48))]
    return [
        (f"llama.cpp:{name}", {f"spec_{name.replace('-', '_')}_{o.replace('-', '_')}": v for o, v in options.items()})
        for name, options in found
    ]


SWEEPS = {"openvino": openvino, "llama-cpp": llama_cpp}


def with_sweep(engine: str, known: dict[str, Candidate]) -> Any:
    """`tried_drafts` with the sweep's settings behind the planned and the usual one; all are kept in ``known``."""

    def tried(plan: treeopt.Plan, entry: Any, log: RequestLog, state: Any = "cold") -> Mapping[str, Candidate]:
        found = dict(tried_drafts(plan, entry, log, state))
        every = [np.ones(log.num_conversations, bool)]
        for name, settings in SWEEPS[engine]():
            (one,) = tried_on(log, (name, tuple(sorted(settings.items())), state, None), every)
            if one.draft not in [other.draft for other in found.values()]:
                found[" ".join([name.partition(":")[2], *map(str, settings.values())])] = one
        known.update(found)
        return found

    return tried


def said(found: Benchmark, tried: Mapping[str, Candidate], costs: StepCosts | None) -> str:
    """Every contender's prediction and measurement, and the regret."""
    rates = {one.name: one.tokens_per_s or 0.0 for one in found.contenders}
    best = max((name for name in rates if not name.startswith("default")), key=rates.__getitem__)
    lines = [
        "| contender | tokens/step | replayed | speedup predicted | measured | over the engine as it comes | texts |",
        "|---" * 7 + "|",
    ]
    for one in found.contenders:
        replayed = predicted = ""
        if setting := tried.get(one.name):
            rate = setting.rates.tokens_per_step
            replayed = f"{rate:.3f}"
            predicted = f"{rate * costs.plain.ms / mean_ms([setting], costs)[0]:.2f}" if costs else ""
        cells = (
            one.name,
            f"{one.tokens_per_step:.3f}",
            replayed,
            predicted,
            found.speedup(one.name, "plain"),
            found.speedup(one.name),
        )
        lines.append("| " + " | ".join(map(str, cells)) + f" | {one.identical} of {one.compared} |")
    lines += ["", f"The fastest is {best}: regret {100 * (1 - rates['chosen'] / rates[best]):.1f} %."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("engine", choices=SWEEPS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--launch")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    run, tried = RunDirectory(asked.run), dict[str, Candidate]()
    for module in ("bench", "launched"):
        vars(import_module(f"treeopt.pipeline.{module}"))["tried_drafts"] = with_sweep(asked.engine, tried)
    options = {
        name: getattr(asked, name)
        for name in ("num_prompts", "max_new_tokens", "rounds", "launch")
        if getattr(asked, name)
    }
    if not asked.launch:
        options |= {"model": asked.model}
    found = treeopt.bench(run=run, engine=asked.engine, batch_size=1, **options)
    costs = StepCosts(run.read_profile(), 1) if run.profile.exists() else None
    print(said(found, tried, costs))
    print(run.read_plan().entry(1).chosen)


if __name__ == "__main__":
    main()
