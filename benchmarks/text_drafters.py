"""How long replaying every drafter that copies text takes, and what it accepts: `python benchmarks/text_drafters.py`.

Three logs are made of the project's own sources, in tokens of the demo model: conversations that grow, each prompt the last
one with its answer and a question; summaries, whose answers copy spans of a long prompt; and edits, a file of which most is
said again. Every kind replays them in order in a process of its own, warmed up; seconds are the processor's.

With --looped N every kind replays answers of N tokens at its usual setting: loops, tokens that are all distinct, and usual text.

With --search the settings of an engine's drafters are searched as `treeopt search` does, on such a log, or on that of a run (--run)
which --copies makes longer, each copy with other ids. Memory is the most that all its processes had at once of their own (Linux).
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import treeopt
from treeopt.files.provenance import machine
from treeopt.records.requestlog import Request, RequestLog
from treeopt.text.engines import KINDS, text_drafter
from treeopt.text.replay import replay
from treeopt.text.settings import usual

ROOT = Path(__file__).parents[1]
Pair = tuple[list[int], list[int]]
# Options of each kind, and their values: the engine's defaults, where it has them, short and long.
OPTIONS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "vllm:ngram-v1": ("num_speculative_tokens prompt_lookup_min prompt_lookup_max", [(5,), (3, 2, 2), (16, 8, 8), (5, 2, 5)]),
    "vllm:ngram-v2": ("num_speculative_tokens prompt_lookup_min prompt_lookup_max", [(5,), (3, 2, 2), (16, 8, 8), (5, 2, 5)]),
    "vllm:suffix": ("num_speculative_tokens suffix_decoding_max_tree_depth", [(), (4, 8), (32, 64)]),
    "arctic:suffix": ("suffix_speculative_tokens suffix_cache_max_depth", [(), (4, 8), (32, 64)]),
    "transformers:prompt-lookup": ("prompt_lookup_num_tokens max_matching_ngram_size", [(5,), (3, 2), (16, 8)]),
    "openvino:prompt-lookup": ("num_assistant_tokens max_ngram_size", [(5, 3), (3, 2), (16, 8)]),
    "exllamav3:ngram": ("num_draft_tokens ngram_match_min", [(5, 1), (3, 2), (16, 8)]),
    "llama.cpp:ngram-simple": ("spec_ngram_simple_size_n spec_ngram_simple_size_m", [(), (4, 8), (24, 64)]),
    "llama.cpp:ngram-map-k": ("spec_ngram_map_k_size_n spec_ngram_map_k_size_m", [(), (4, 8), (24, 64)]),
    "llama.cpp:ngram-map-k4v": ("spec_ngram_map_k4v_size_n spec_ngram_map_k4v_size_m", [(), (4, 8), (24, 64)]),
    "llama.cpp:ngram-mod": ("spec_ngram_mod_n_match spec_ngram_mod_n_max spec_ngram_mod_n_min", [(), (4, 8, 2), (24, 64, 2)]),
    "llama.cpp:ngram-cache": ("", [()]),
}  # fmt: skip


def conversations(text: list[int], rng: np.random.Generator) -> Iterator[Pair]:
    while True:
        prompt: list[int] = []
        for _ in range(rng.integers(1, 4)):
            prompt = prompt + span(text, rng, 80)
            answer = [token for _ in range(4) for token in span(text if rng.random() < 0.7 else prompt, rng, 100)]
            yield prompt, answer
            prompt = prompt + answer


def summaries(text: list[int], rng: np.random.Generator) -> Iterator[Pair]:
    while True:
        prompt = span(text, rng, 2400)
        yield prompt, [token for _ in range(24) for token in span(prompt if rng.random() < 0.5 else text, rng, 30)]


def edits(text: list[int], rng: np.random.Generator) -> Iterator[Pair]:
    while True:
        prompt, answer, at = span(text, rng, 1200), list[int](), 0
        while at < len(prompt):
            kept = int(rng.integers(1, 120))
            answer += prompt[at : at + kept] + span(text, rng, 20)
            at += kept + int(rng.integers(0, 20))
        yield prompt, answer


def span(text: list[int], rng: np.random.Generator, most: int) -> list[int]:
    at = int(rng.integers(0, len(text)))
    return text[at : at + int(rng.integers(most // 4, most + 1))] or text[:1]


def make_log(answer_tokens: int) -> RequestLog:
    """A third of the tokens of each, one behind the other."""
    source = "".join(path.read_text("utf-8") for path in sorted(ROOT.glob("t*/**/*.py")))
    text = Tokenizer.from_file(str(ROOT / "treeopt/demo/model/tokenizer.json")).encode(source).ids
    parts, prompts, groups = [], [], []
    for group, kind in enumerate((conversations, summaries, edits)):
        left, pairs = answer_tokens // 3, kind(text, np.random.default_rng(group))
        while left > 0:
            prompt, answer = next(pairs)
            parts.append(np.array(prompt + answer, np.int32))
            prompts.append(len(prompt))
            groups.append(group)
            left -= len(answer)
    starts = np.cumsum([0, *map(len, parts)])
    return RequestLog(np.concatenate(parts), starts, np.array(prompts), np.array(groups))


def row(log: RequestLog, name: str, settings: dict[str, Any]) -> str:
    make = partial(text_drafter, name, settings)
    replay(log.select(np.arange(0, log.num_sequences, log.num_sequences // 4)).requests(), make)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
    run = replay(log.requests(), make)
    seconds, peak = process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    groups = np.repeat(log.group, np.diff(run.starts))
    cells = [" ".join(f"{kind[groups == g].mean():.2f}" for g in range(3)) for kind in (run.emitted, run.rows)]
    asked = ", ".join(f"{option.removeprefix('speculative_')} {value}" for option, value in settings.items())
    seconds *= 1e6 / log.answer_tokens.sum()
    return f"| {name} | {asked} | {seconds:.1f} | {cells[0]} | {cells[1]} | {peak / 1024:.0f} |"


def looped(tokens: int) -> dict[str, list[int]]:
    """Answers of so many tokens."""
    answers = {f"loop of {period}": [i % period for i in range(tokens)] for period in (1, 2, 3, 8)}
    text = make_log(tokens).tokens[:tokens].tolist()
    return {**answers, "all distinct": list(range(tokens)), "usual text": text}


def looped_row(name: str, answers: dict[str, list[int]]) -> str:
    """Seconds of the processor for each answer."""
    make = partial(text_drafter, name, dict(usual(name)))
    replay([Request([0], [0, 1, 0, 1])], make)
    cells = []
    for answer in answers.values():
        begun = process_time()
        replay([Request([0], answer)], make)
        cells.append(f"{process_time() - begun:.1f}")
    return f"| {name} | {' | '.join(cells)} |"


def copied(log: RequestLog, copies: int) -> RequestLog:
    """A log so many times, one behind the other, each with ids that are moved within the vocabulary."""
    most = int(log.tokens.max()) + 1
    tokens = np.concatenate([(log.tokens + i * (most // copies)) % most for i in range(copies)])
    lengths = np.tile(np.diff(log.starts), copies)
    cluster = np.concatenate([log.clusters + i * log.num_conversations for i in range(copies)])
    return RequestLog(tokens, np.cumsum([0, *lengths]), np.tile(log.prompt_tokens, copies), cluster=cluster)


def own_bytes(process: int) -> int:
    """Memory that a process and those that it started have of their own."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except OSError:  # it ended
            continue
        if process in (int(folder.name), int(status["PPid"])) and "RssAnon" in status:
            found += 1024 * int(status["RssAnon"].split()[0])
    return found


def searched(run: str, engine: str, workers: int) -> tuple[float, float, str]:
    """Seconds, those of processors, and what is chosen."""
    if workers:
        os.sched_getaffinity = lambda process: set(range(workers))
    begun = perf_counter()
    plan = treeopt.search(run=run, engine=engine)
    seconds = [
        one.ru_utime + one.ru_stime for one in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ]
    chosen = plan.entries[0].chosen
    return (perf_counter() - begun, sum(seconds), f"{chosen.draft.name} | {chosen.tokens_per_step:.3f}")


def search_row(log: RequestLog, engine: str, workers: int) -> str:
    most, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.2):
            most = max(most, own_bytes(process))

    with tempfile.TemporaryDirectory() as run, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        log.save(Path(run) / "requests.npz")
        process = pool.submit(os.getpid).result()
        watching = threading.Thread(target=watch)
        watching.start()
        wall, processors, said = pool.submit(searched, run, engine, workers).result()
        is_done.set()
        watching.join()
    return f"| {engine} | {wall:.0f} | {processors:.0f} | {most / 1e6:.0f} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer-tokens", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="Kinds whose names have this part.")
    parser.add_argument("--search", default="", help="Engines whose settings are searched, as vllm,openvino.")
    parser.add_argument("--run", help="A run directory whose log is searched on.")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="Processes that replay; one for each core if 0.")
    parser.add_argument("--looped", type=int, default=0, help="Tokens of answers that loop.")
    options = parser.parse_args()
    if options.looped:
        answers = looped(options.looped)
        print(f"{machine()}\n\n| drafter | {' | '.join(answers)} |\n{'|---' * (len(answers) + 1)}|")
        for name in KINDS:
            if options.only in name:
                print(looped_row(name, answers), flush=True)
        return
    log = RequestLog.load(Path(options.run) / "requests.npz") if options.run else make_log(options.answer_tokens)
    log = copied(log, options.copies)
    prompts = int(log.prompt_tokens.sum()) / 1e6
    print(f"{machine()}, {log.answer_tokens.sum() / 1e6:.2f} million answer tokens, {prompts:.2f} of prompts.\n")
    if options.search:
        print("| engine | s | processors s | MB | chosen | tokens per step |\n" + 6 * "|---" + "|", flush=True)
        for engine in options.search.split(","):
            print(search_row(log, engine, options.workers), flush=True)
        return
    print(
        "| drafter | options | s per million | tokens per step | rows per step | MB |\n" + 6 * "|---" + "|", flush=True
    )
    for name, (names, rows) in ((name, OPTIONS[name]) for name in KINDS if options.only in name):
        for values in rows:
            with get_context("fork").Pool(1) as pool:
                print(pool.apply(row, (log, name, dict(zip(names.split(), values, strict=False)))), flush=True)


if __name__ == "__main__":
    main()
