"""Our steps against the bare model's, on the demo model at batch 1: `python benchmarks/demo.py [DTYPE]`.

Every ratio is of medians over repeats that are interleaved in one run. A bare pass is a forward of
the transformers model with its own cache; bare heads are their matrix products and nothing else.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from transformers import DynamicCache

from treeopt.files.provenance import machine
from treeopt.growth.source import source_of
from treeopt.pipeline.bench import bench
from treeopt.pipeline.calibrate import calibrate
from treeopt.pipeline.profile.placement import timing_trees, tree_families
from treeopt.pipeline.profile.timed import profile
from treeopt.pipeline.search import search
from treeopt.records.options import BenchOptions, CalibrateOptions, ProfileOptions, SearchOptions, Source
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.decode import Decoder, decode
from treeopt.runtime.measure.ranks import collect_trace
from treeopt.runtime.prompts.sets import Conversation
from treeopt.runtime.session import Session, open_session
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import Pass
from treeopt.runtime.stop import StopRule
from treeopt.trees.tree import Tree

PROMPT, ANSWER, REPEATS = 96, 64, 40
SIZES = (9, 16, 64)  # of the trees whose steps are timed
NEVER = StopRule(frozenset(), ANSWER + 1, at_loops=False)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(contenders: dict[str, Callable[[], float]], repeats: int = REPEATS) -> dict[str, float]:
    """Median of what each contender returns [s], called in random order in every repeat."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 2):
        for name in random.sample(list(contenders), len(contenders)):
            value = contenders[name]()
            if repeat >= 2:  # warmed up
                samples[name].append(value)
    return {name: median(values) for name, values in samples.items()}


def report(label: str, ratio: float, bar: str) -> None:
    print(f"  {label:<76} {ratio:6.3f}   {bar}")


@torch.inference_mode()
def plain_step(session: Session, prompts: list[list[int]]) -> None:
    """Per token of a 64-token answer, prefill taken off."""
    model = session.target.model
    model.generation_config.eos_token_id = None

    def ours() -> float:
        prompt = random.choice(prompts)
        passes = Decoder(Setup(session.target, None, NEVER)).answer([prompt], None)
        next(passes)
        return seconds(lambda: [next(passes) for _ in range(ANSWER)]) / ANSWER

    def bare() -> float:
        cache = DynamicCache(config=model.config)
        x = model(torch.tensor([random.choice(prompts)]), past_key_values=cache).logits[:, -1:].argmax(-1)

        def loop() -> None:
            nonlocal x
            for _ in range(ANSWER):
                x = model(x, past_key_values=cache).logits[:, -1:].argmax(-1)

        return seconds(loop) / ANSWER

    def generate() -> float:
        tokens = torch.tensor([random.choice(prompts)])
        options = {"do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
        whole = seconds(lambda: model.generate(tokens, max_new_tokens=ANSWER + 1, **options))
        return (whole - seconds(lambda: model.generate(tokens, max_new_tokens=1, **options))) / ANSWER

    ms = interleaved({"ours": ours, "bare": bare, "generate": generate}, repeats=15)
    print(
        f"plain step: ours {1e3 * ms['ours']:.2f} ms, bare {1e3 * ms['bare']:.2f}, generate {1e3 * ms['generate']:.2f}"
    )
    report("plain step / generate step", ms["ours"] / ms["generate"], "bar 1.05")
    report("plain step / bare forward", ms["ours"] / ms["bare"], "bar 1.15")


@torch.inference_mode()
def tree_step(session: Session, prompts: list[list[int]], trees: dict[int, Tree]) -> None:
    """A whole tree step against a bare pass over as many rows and bare heads on one row."""
    model, heads = session.target.model, session.drafter
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prompts[0]]), past_key_values=cache)
    hidden = torch.randn(1, session.target.width, dtype=session.target.dtype)
    decoder = Decoder(Setup(session.target, heads, StopRule(frozenset(), 10**6, False)))
    decoder.prepare(prompts, trees.values(), 1)

    def step(tree: Tree | None) -> Pass:
        if not decoder.live or decoder.cache.lengths[0] > PROMPT + ANSWER:
            decoder.start([(0, random.choice(prompts))])
            next(decoder.passes())
            next(decoder.passes(tree))
        return next(decoder.passes(tree))

    def ours(tree: Tree | None) -> float:
        return step(tree).seconds

    def bare(rows: int) -> float:
        if (extra := cache.get_seq_length() - PROMPT) > 0:
            cache.crop(-extra)
        tokens = torch.randint(0, session.target.vocab_size, (1, rows))
        return seconds(lambda: model(tokens, past_key_values=cache).logits.argmax(-1))

    def bare_heads() -> float:
        return seconds(lambda: [heads.logits(hidden, k) for k in range(heads.num_heads)])

    for rows, tree in trees.items():
        ms = interleaved({"ours": lambda t=tree: ours(t), "bare": lambda r=rows: bare(r), "heads": bare_heads}, 60)
        print(
            f"tree step, {rows} rows: ours {1e3 * ms['ours']:.2f} ms, bare pass {1e3 * ms['bare']:.2f}, "
            f"bare heads {1e3 * ms['heads']:.2f}"
        )
        report(
            f"tree step at {rows} rows / (bare pass + bare heads)", ms["ours"] / (ms["bare"] + ms["heads"]), "bar 1.15"
        )


@torch.inference_mode()
def calibration(session: Session, prompts: list[list[int]], rows: int = 16) -> None:
    """The same prompts and tokens: ours, bare batched decoding plus bare heads, and one at a time."""
    model, heads = session.target.model, session.drafter
    batch = prompts[:rows]

    def ours() -> float:
        asked = [Conversation(tuple(p), (("user", ""),)) for p in batch]
        chosen = replace(session.prompts, conversations=tuple(asked))
        return seconds(lambda: collect_trace(Setup(session.target, heads, NEVER), chosen, batch_size=rows))

    def decode_bare(tokens: torch.Tensor) -> list[torch.Tensor]:
        cache, states = DynamicCache(config=model.config), []
        for _ in range(ANSWER + 1):
            hidden = model.model(tokens, past_key_values=cache).last_hidden_state[:, -1]
            states.append(hidden)
            tokens = model.lm_head(hidden).argmax(-1, keepdim=True)
        return states

    def bare() -> float:
        def work() -> None:
            hidden = torch.cat(decode_bare(torch.tensor(batch))[:-1])
            for k in range(heads.num_heads):
                heads.logits(hidden, k)

        return seconds(work)

    def one_at_a_time() -> float:
        def work() -> None:
            for prompt in batch:
                cache, tokens = DynamicCache(config=model.config), torch.tensor([prompt])
                for _ in range(ANSWER + 1):
                    hidden = model.model(tokens, past_key_values=cache).last_hidden_state[:, -1]
                    for k in range(heads.num_heads):
                        heads.logits(hidden, k).topk(10)
                    tokens = model.lm_head(hidden).argmax(-1, keepdim=True)

        return seconds(work)

    s = interleaved({"ours": ours, "bare": bare}, 9)
    print(f"calibration of {rows} x {ANSWER} states: ours {s['ours']:.2f} s, bare decoding and heads {s['bare']:.2f} s")
    report("calibration / (bare batched decoding + bare heads)", s["ours"] / s["bare"], "bar 1.15")
    slow = median(one_at_a_time() for _ in range(2))
    report("one token at a time, as others calibrate / calibration", slow / s["ours"], "reported")


def speedups(session: Session) -> dict[int, Tree]:
    """The line itself: the chosen tree, paired by prompt and round. Returns trees to time."""
    run = RunDirectory(tempfile.mkdtemp(prefix="treeopt-benchmark-"))
    calibrate(run, session, CalibrateOptions(num_prompts=192))
    profile(run, session, ProfileOptions())
    chosen = search(run, SearchOptions(batch_sizes=(1,))).entries[0].chosen
    result = bench(run, session, BenchOptions(num_prompts=32, rounds=3))
    print(
        f"chosen: {chosen.size} rows, depth {chosen.depth}; {chosen.tokens_per_step:.3f} tokens per step predicted, "
        f"{result.contender('chosen').tokens_per_step:.3f} measured; speedup {chosen.speedup:.2f} predicted"
    )
    for baseline, bar in (("plain", "bar 1.25"), ("mc_sim_7b_63", "bar 1.15"), ("chain", ""), ("budget", "")):
        ratio = result.speedup("chosen", baseline)
        assert ratio is not None
        report(f"chosen tree / {baseline}, tokens/s  [{ratio.low:.2f}, {ratio.high:.2f}]", ratio.value, bar)
    trees = timing_trees(tree_families(source_of(run.read_trace()), session.drafter.num_heads, 64), SIZES, given=True)
    return {n: next(t for t in reversed(trees) if len(t) == n) for n in SIZES}


def main() -> None:
    random.seed(0)
    dtype = sys.argv[1] if len(sys.argv) > 1 else "float32"
    session = open_session(Source(dtype=dtype))
    threads = torch.get_num_threads()
    print(f"demo model, {dtype}, batch 1, torch {torch.__version__}, {threads} threads, {machine()}")
    prompts = [list((c.first * 4)[:PROMPT]) for c in session.prompts.conversations[:64]]
    decode(session.target, session.drafter, prompts[:2], Tree.chain(2), batch_size=1, stop=NEVER)
    trees = speedups(session)
    plain_step(session, prompts)
    tree_step(session, prompts, trees)
    calibration(session, prompts)


if __name__ == "__main__":
    main()
