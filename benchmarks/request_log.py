"""A log of requests that SmolLM2 answered: an agent's edits of functions, summaries of long texts, or single questions.

    python benchmarks/request_log.py edits LOG.jsonl [--conversations 40]
    python benchmarks/request_log.py summaries LOG.jsonl
    python benchmarks/request_log.py questions LOG.jsonl --prompts PROMPTS.jsonl

Functions and texts are this project's own. Each row is one request with all that was said before, as servers of the OpenAI
interface log it, with token ids and times. `treeopt calibrate --from-logs LOG.jsonl --tokenizer FOLDER` reads it. A killed
run goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import time
from pathlib import Path

import numpy as np
from openvino import Tensor
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from treeopt import demo
from treeopt.runtime.engines.openvino import converted
from treeopt.runtime.target import load_target

ROOT = Path(__file__).resolve().parents[1]
LONGEST, SHORT, MAX_NEW_TOKENS = 700, 300, 220  # characters of a function and of a question; tokens of an answer
TURNS = (
    "Repeat this function, and add a comment above each line that returns something:\n\n```python\n{code}\n```",
    "Now write the whole function again, with its name in capital letters.",
    "Write the final version of the whole function once more, without the comments.",
)


def shuffled(found: list[str]) -> list[str]:
    """In an order of no kind."""
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def functions() -> list[str]:
    """Functions of the project."""
    found = []
    for file in sorted((ROOT / "treeopt").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        sources = [ast.get_source_segment(text, node) or "" for node in nodes]
        found += [source for source in sources if 250 <= len(source) <= LONGEST]
    return shuffled(found)


def conversations(kind: str, prompts: Path) -> list[list[str]]:
    """What the user says in each conversation, turn by turn."""
    if kind == "edits":
        return [[turn.format(code=code) for turn in TURNS] for code in functions()]
    if kind == "questions":
        rows = map(json.loads, prompts.read_text(encoding="utf-8").splitlines())
        asked = [row.get("prompt") or row["turns"][0] for row in rows]
        return [[prompt] for prompt in shuffled([one for one in asked if len(one) < SHORT])]
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    sections = [section for page in pages for section in re.split(r"\n(?=## )", page) if 1500 <= len(section) <= 4000]
    return [[f"{section}\n\nSummarise the text above."] for section in shuffled(sections)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("edits", "summaries", "questions"))
    parser.add_argument("log", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--conversations", type=int, default=40)
    asked = parser.parse_args()
    if asked.kind == "questions" and asked.prompts is None:
        parser.error("questions are those of a file: --prompts PROMPTS.jsonl")
    target = load_target(demo.SMOLLM2, dtype="float32")
    cores = {"INFERENCE_NUM_THREADS": 1}
    pipeline = ContinuousBatchingPipeline(str(converted(target, "fp32")), SchedulerConfig(), "CPU", cores)
    config = GenerationConfig(do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    config.stop_token_ids, config.eos_token_id = set(target.eos_ids), min(target.eos_ids)
    text = asked.log.read_text(encoding="utf-8") if asked.log.exists() else ""
    rows = [row for row in text.splitlines(keepends=True) if row.endswith("\n")]  # a killed run may leave half a row
    wanted = conversations(asked.kind, asked.prompts)[: asked.conversations]
    turns = len(wanted[0])
    done = len(rows) // turns
    asked.log.write_text("".join(rows[: done * turns]), encoding="utf-8")
    with asked.log.open("a", encoding="utf-8") as log:
        for number, said in list(enumerate(wanted))[done:]:
            messages: list[dict[str, str]] = []
            for turn in said:
                messages.append({"role": "user", "content": turn})
                prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                began = time.time()
                (result,) = pipeline.generate([Tensor(np.array([prompt], dtype=np.int64))], [config])
                answer = result.m_generation_ids[0]
                text = target.tokenizer.decode(answer, skip_special_tokens=True)
                row = {
                    "conversation": f"{asked.kind}-{number}",
                    "messages": list(messages),
                    "choices": [{"message": {"role": "assistant", "content": text}}],
                    "max_tokens": MAX_NEW_TOKENS,
                    "prompt_token_ids": prompt,
                    "token_ids": answer,
                    "start_time": began,
                    "end_time": time.time(),
                }
                print(json.dumps(row), file=log, flush=True)
                messages.append({"role": "assistant", "content": text})
            print(f"conversation {number + 1}: {len(answer)} tokens in the last answer", flush=True)


if __name__ == "__main__":
    main()
