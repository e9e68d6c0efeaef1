"""SmolLM2's answers to prompts, written by OpenVINO GenAI, which takes a quarter of the time: `treeopt train` finds them finished.

    python benchmarks/smollm2_answers.py PROMPTS ANSWERS [--num-prompts 6000] [--part 0/2]

They go where ``treeopt train --model smollm2 --dtype bfloat16 --answers ANSWERS`` with the same prompts looks for its own.
Parts are for several processes at once. A killed one goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from openvino import Tensor
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from treeopt import demo
from treeopt.files import npz
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.engines.openvino import converted
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import load_target
from treeopt.runtime.training.opening import AnswerWriter, Asking, open_seeds, own_texts

MAX_NEW_TOKENS = 128


class Engine:
    """OpenVINO GenAI as it comes, on one core."""

    def __init__(self, folder: Path, stop: StopRule) -> None:
        scheduler = SchedulerConfig()
        scheduler.max_num_batched_tokens = 2**14
        self.stop = stop
        self.pipeline = ContinuousBatchingPipeline(str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1})
        self.config = GenerationConfig(do_sample=False, max_new_tokens=stop.max_new_tokens)
        self.config.stop_token_ids, self.config.eos_token_id = set(stop.eos_ids), min(stop.eos_ids)

    def answer(self, prompts: Sequence[Sequence[int]], context: int) -> list[list[int]]:
        asked = [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        found = self.pipeline.generate(asked, [self.config] * len(asked))
        answers = [result.m_generation_ids[0] for result in found]
        ends = [SequenceEnd(self.stop, context - len(prompt)) for prompt in prompts]
        return [list(a[: len(end.take(a))]) for a, end in zip(answers, ends, strict=True)]


def written(engine: Engine, prompts: PromptSet, conversations: Sequence[Conversation], context: int) -> bytes:
    """A block as `AnswerWriter` makes it, turn by turn."""
    said: list[list[tuple[int, ...]]] = [[] for _ in conversations]
    found = []
    going = list(range(len(conversations)))
    while going:
        asked = [(i, prompts.next_prompt(conversations[i], said[i])) for i in going]
        asked = [(i, tokens) for i, tokens in asked if len(tokens) < context]
        for (i, tokens), answer in zip(asked, engine.answer([t for _, t in asked], context), strict=True):
            said[i].append(tuple(answer))
            found.append((i, tokens, answer))
        going = [i for i, _ in asked if len(said[i]) < conversations[i].num_turns]
    found.sort(key=lambda turn: turn[0])
    texts = [[*prompt, *answer] for _, prompt, answer in found]
    arrays = {
        "tokens": np.array([token for text in texts for token in text], dtype=np.int32),
        "starts": np.cumsum([0, *map(len, texts)], dtype=np.int64),
        "prompt_tokens": np.array([len(prompt) for _, prompt, _ in found], dtype=np.int32),
        "conversation": np.array([i for i, _, _ in found], dtype=np.int32),
    }
    return npz.packed(lambda stream: npz.write(stream, arrays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("answers", type=Path)
    parser.add_argument("--num-prompts", type=int, default=6000)
    parser.add_argument("--part", default="0/1")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    torch.set_num_threads(1)
    target = load_target(demo.SMOLLM2, dtype="float32")
    folder = converted(target, "fp32")
    target = load_target(demo.SMOLLM2, dtype="bfloat16")
    prompts = open_seeds({"model": demo.SMOLLM2, "prompts": asked.prompts}, target, asked.num_prompts)
    stop = StopRule(target.eos_ids, MAX_NEW_TOKENS)
    asking = Asking(stop, Greedy(), target.context)
    blocks, engine = AnswerWriter(target, prompts, asking).blocks, Engine(folder, stop)

    def finish(numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        for number in (n for n in numbers if n % parts == part):
            began = time.perf_counter()
            yield number, written(engine, prompts, blocks[number], target.context)
            print(f"block {number} of {len(blocks)}: {time.perf_counter() - began:.1f} s", flush=True)
        raise SystemExit(f"part {part} of {parts} is written")

    own_texts(target, prompts, asked.answers.absolute(), asking, elsewhere=finish)


if __name__ == "__main__":
    main()
