"""A plan of drafters that copy text, proved beside a sweep: what `treeopt bench` decodes, and 12 settings that a user might try.

python benchmarks/copied.py RUN openvino [--num-prompts 24] [--rounds 1]
python benchmarks/copied.py RUN llama-cpp --launch 'llama-server -m MODEL.gguf --metrics --port {port} {options}'
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

import treeopt
from treeopt.pipeline import bench, launched
from treeopt.pipeline.copied import tried_on
from treeopt.pipeline.logged import tried_drafts
from treeopt.planning.copied import Tried
from treeopt.records.benchmark import Benchmark
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import show


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


def with_sweep(engine: str) -> Any:
    """`tried_drafts` with the sweep's settings behind the planned and the usual one."""

    def tried(plan: treeopt.Plan, entry: Any, log: RequestLog, state: Any = "cold") -> Mapping[str, Tried]:
        found = dict(tried_drafts(plan, entry, log, state))
        known = {one.draft for one in found.values()}
        every = [np.ones(log.num_conversations, bool)]
        for name, settings in SWEEPS[engine]():
            (one,) = tried_on(log, (name, tuple(sorted(settings.items())), state, None), every)
            if one.draft not in known:
                found[" ".join([name.partition(":")[2], *map(str, settings.values())])] = one
        return found

    return tried


def said(found: Benchmark) -> str:
    """Every contender's prediction and measurement, and the regret."""
    rates = {one.name: one.tokens_per_s or 0.0 for one in found.contenders}
    best = max((name for name in rates if name != "as it comes"), key=rates.__getitem__)
    lines = ["| contender | tokens/step | replayed | speedup | texts |", "|---|---|---|---|---|"]
    for one in found.contenders:
        replayed = f"{one.predicted.replayed:.3f}" if one.predicted.replayed else ""
        texts = f"{one.identical} of {one.compared}"
        lines.append(f"| {one.name} | {one.tokens_per_step:.3f} | {replayed} | {found.speedup(one.name)} | {texts} |")
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
    bench.tried_drafts = launched.tried_drafts = with_sweep(asked.engine)  # type: ignore[attr-defined]
    options = {
        name: getattr(asked, name)
        for name in ("num_prompts", "max_new_tokens", "rounds", "launch")
        if getattr(asked, name)
    }
    if not asked.launch:
        options |= {"model": asked.model, "threads": 1}
    found = treeopt.bench(run=RunDirectory(asked.run), engine=asked.engine, batch_size=1, **options)
    show(said(found))
    print(RunDirectory(asked.run).read_plan().entry(1).chosen)


if __name__ == "__main__":
    main()
