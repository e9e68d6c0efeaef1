"""OpenVINO with prompt lookup on a log's own requests: plain, the usual setting, what `search` plans, and what a user might try.

    python benchmarks/copied.py RUN [--requests 24] [--rounds 3]

RUN has requests.npz of SmolLM2 (`benchmarks/request_log.py`, then `treeopt calibrate --from-logs`). Requests are those of
conversations that settings are not sought on, all contenders answer each in turn, and predictions are of the same requests.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from openvino import Tensor
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from treeopt import demo, pipeline
from treeopt.files.provenance import machine
from treeopt.latency.estimate import StepCosts
from treeopt.pipeline.copied import halves
from treeopt.planning.copied import RowCosts
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.requestlog import Request, RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.engines.openvino import converted
from treeopt.runtime.target import load_target
from treeopt.text.engines import text_drafter
from treeopt.text.replay import replay

NAME = "openvino:prompt-lookup"
SWEEP = [{"num_assistant_tokens": k, "max_ngram_size": n} for k in (2, 4, 8, 16) for n in (2, 3, 8)]
ROWS = (2, 3, 5, 7, 9, 13, 17)
PRECISE = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}  # so that texts are plain decoding's
Settings = dict[str, int]


class Engine:
    """OpenVINO GenAI with or without prompt lookup, on one core."""

    def __init__(self, folder: Path, eos_ids: list[int], *, looks_up: bool) -> None:
        options = {"INFERENCE_NUM_THREADS": 1, **PRECISE, **({"prompt_lookup": True} if looks_up else {})}
        self.pipeline = ContinuousBatchingPipeline(str(folder), SchedulerConfig(), "CPU", options)
        self.eos_ids = set(eos_ids)

    def answer(self, prompt: list[int], most: int, settings: Settings | None) -> tuple[list[int], float]:
        """An answer and the seconds that it took."""
        config = GenerationConfig(do_sample=False, max_new_tokens=most, **(settings or {}))
        config.stop_token_ids, config.eos_token_id = self.eos_ids, min(self.eos_ids)
        began = time.perf_counter()
        (found,) = self.pipeline.generate([Tensor(np.array([prompt], dtype=np.int64))], [config])
        return list(found.m_generation_ids[0]), time.perf_counter() - began


def profiled(plain: Engine, lookup: Engine, prompts: list[list[int]]) -> LatencyProfile:
    """Steps of so many rows: answers of 1 and of many tokens, with a lookup that always verifies all of its length."""
    rounds: dict[int, list[float]] = {rows: [] for rows in (1, *ROWS)}
    for prompt in prompts:
        for rows in rounds:
            engine = plain if rows == 1 else lookup
            settings = None if rows == 1 else {"num_assistant_tokens": rows - 1, "max_ngram_size": 3}
            _, first = engine.answer(prompt, 1, settings)
            answer, whole = engine.answer(prompt, 48, settings)
            steps = len(answer) - 1
            if settings:
                request = Request(prompt, answer, 48)
                steps = len(replay([request], lambda s=settings: text_drafter(NAME, s)).rows)
            rounds[rows].append(1e3 * (whole - first) / max(steps, 1))
    context = int(np.mean([len(prompt) for prompt in prompts])) + 24
    points = [StepTiming(1, context, rows, 1, tuple(ms)) for rows, ms in rounds.items() if rows > 1]
    return LatencyProfile(tuple(points), (StepTiming(1, context, 1, 0, tuple(rounds[1])),), {"name": "openvino"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    run, target = RunDirectory(asked.run), load_target(demo.SMOLLM2, dtype="float32")
    folder, eos_ids = converted(target, "fp32", print), sorted(target.eos_ids)
    plain, lookup = (Engine(folder, eos_ids, looks_up=which) for which in (False, True))
    log = RequestLog.load(run.requests)
    sought_on, held_out = (np.flatnonzero(halves(log)[log.clusters] == half) for half in (0, 1))
    if not run.profile.exists():
        some = [one.prompt for one in log.select(sought_on[:: max(len(sought_on) // 8, 1)]).requests()]
        profiled(plain, lookup, some[:8]).save(run.profile)
    profile = run.read_profile()
    plan = pipeline.search(run, engine="openvino", method="prompt-lookup", batch_sizes=(1,))
    entry = plan.entries[0]
    requests = list(log.select(held_out[: asked.requests]).requests())
    contenders: dict[str, Settings | None] = {"plain": None, "usual": {"num_assistant_tokens": 5, "max_ngram_size": 3}}
    contenders["planned"] = entry.draft.options if entry.speculates else None  # type: ignore[attr-defined]
    contenders |= {f"{s['num_assistant_tokens']}/{s['max_ngram_size']}": s for s in SWEEP}
    seconds = {name: np.zeros((asked.rounds, len(requests))) for name in contenders}
    answers: dict[str, list[list[int]]] = {name: [] for name in contenders}
    for r in range(asked.rounds):
        for i, request in enumerate(requests):
            for name, settings in contenders.items():
                engine = plain if settings is None else lookup
                _, first = engine.answer(request.prompt, 1, settings)
                answer, whole = engine.answer(request.prompt, request.limit or 220, settings)
                seconds[name][r, i] = whole - first
                if r == 0:
                    answers[name].append(answer)
        print(f"round {r + 1} of {asked.rounds}", flush=True)
    taken = {name: np.median(each, axis=0) for name, each in seconds.items()}
    costs = RowCosts(StepCosts(profile, 1), max(ROWS))
    recorded = [one._replace(answer=text) for one, text in zip(requests, answers["plain"], strict=True)]
    print(f"\nSmolLM2, float32, OpenVINO GenAI, batch size 1, one thread, {len(requests)} requests, {machine()}.\n")
    print(
        "| setting | tokens/step replayed | speedup predicted | measured | off % | same text |\n|---|---|---|---|---|---|"
    )
    draws = np.random.default_rng(0).integers(len(requests), size=(1000, len(requests)))
    measured = {}
    for name, settings in contenders.items():
        ratio = taken["plain"][draws].sum(1) / taken[name][draws].sum(1)
        measured[name] = float(taken["plain"].sum() / taken[name].sum())
        rate, predicted = 1.0, 1.0
        if settings is not None:
            found = replay(recorded, lambda s=settings: text_drafter(NAME, s), state="cold")
            rate, rows = found.tokens_per_step, np.bincount(found.rows)
            predicted = rate * costs.plain_ms / costs.step_ms(rows)
        same = sum(a == b for a, b in zip(answers[name], answers["plain"], strict=True))
        low, high = np.quantile(ratio, (0.025, 0.975))
        off = 100 * (predicted / measured[name] - 1)
        said = f"{name} ({settings['num_assistant_tokens']}/{settings['max_ngram_size']})" if settings else name
        print(
            f"| {said} | {rate:.3f} | {predicted:.2f} | {measured[name]:.2f} [{low:.2f}, {high:.2f}] | {off:+.1f} | {same}/{len(requests)} |"
        )
    best = max(measured, key=measured.__getitem__)
    print(f"\nPlanned before: {entry.chosen.speedup:.2f} from {entry.chosen.tokens_per_step:.2f} tokens per step. The fastest is {best}: "
          f"regret {100 * (1 - measured['planned'] / measured[best]):.1f} %.")  # fmt: skip


if __name__ == "__main__":
    main()
