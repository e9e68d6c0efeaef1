"""Prompts of many kinds for SmolLM2's drafters: train.jsonl to learn from, and foreign.jsonl of kinds that none of them saw.

    python benchmarks/smollm2_prompts.py DATA FOLDER

DATA holds dolly_2000.jsonl (databricks-dolly-15k), gsm8k_train.jsonl and gsm8k_test.jsonl, humaneval.jsonl, mt_bench.jsonl,
seed_tasks_175.jsonl (self-instruct), books_pd_train.txt and books_pd_valid.txt (novels in the public domain, divided by
<|endofbook|>) and tinyshakespeare.txt. Code comes from this interpreter's standard library. A row has its kind as ``category``.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from treeopt.demo.corpus import standard_library

Row = dict[str, object]
SEED = 34
LEARNED = {"dolly": 1_700, "gsm8k": 2_600, "code": 2_000, "chat": 700}  # and of each task on books:
SHORT_TASKS, LONG_TASKS = 1_000, 200
FOREIGN = 80  # prompts of each kind
SHORT, LONG = (500, 1_800), (4_600, 7_000)  # characters of a passage; a token is a little more than four
TASKS = {
    "continue": ("Continue this story:", "Write what happens next.", "Go on with this text in the same style:"),
    "summary": (
        "Summarize the passage below in a few sentences.",
        "What happens in this text? Give a short summary.",
        "Write a brief summary of the following.",
        "List the main points of this passage.",
    ),
    "reading": (
        "Read the passage and answer: who are the people in it, and what do they want?",
        "Using only the text below, say where the scene takes place and how you can tell.",
        "Answer from the passage: what is the mood, and which words show it?",
        "Which events does the following text describe, and in which order?",
        "Who is speaking in this passage, and about what?",
    ),
    "rewrite": (
        "Rewrite the following in plain modern English.",
        "Turn this passage into a short dialogue.",
        "Make this text half as long, and keep its meaning.",
    ),
}
LANGUAGES = ("German", "French", "Spanish", "Italian")
NEW_LANGUAGES = ("Portuguese", "Dutch")
FOLLOW_UPS = (
    "Now say the same in two sentences.",
    "Give me an example.",
    "Why is that so?",
    "Rewrite your answer as a list.",
    "Explain it to a child.",
    "What could be said against it?",
)


def rows_in(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").strip().split("\n")]


def asked_in(row: dict[str, str]) -> str:
    return "\n\n".join(filter(None, (row["instruction"], row["input"])))


def passages(file: Path, chars: tuple[int, int], number: int, rng: random.Random) -> Iterator[str]:
    """Passages of whole paragraphs, drawn from everywhere in the books of a file."""
    text = file.read_text(encoding="utf-8")
    starts = [found.end() for found in re.finditer(r"\n\n", text)]
    while number:
        begin = rng.choice(starts)
        end = text.find("\n\n", begin + rng.randint(*chars))
        passage = text[begin:end].strip()
        if chars[0] <= len(passage) <= 1.2 * chars[1] and "<|endofbook|>" not in passage:
            number -= 1
            yield passage


def sentences(file: Path, number: int, rng: random.Random) -> Iterator[str]:
    for passage in passages(file, SHORT, 8 * number, rng):
        found = [one for one in re.split(r"(?<=[.!?])\s+", " ".join(passage.split())) if 50 <= len(one) <= 220]
        if found and number:
            number -= 1
            yield rng.choice(found)


def task(instructions: Sequence[str], passage: str, rng: random.Random) -> str:
    said = rng.choice(instructions)
    return rng.choice((f"{said}\n\n{passage}", f"{passage}\n\n{said}"))


def functions(number: int, rng: random.Random) -> Iterator[str]:
    """Heads of documented functions of the standard library, their bodies left to be written."""
    found = []
    for module in standard_library(held_out=False):
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.FunctionDef) and 40 <= len(ast.get_docstring(node) or "") <= 700:
                lines = module.text.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
                found.append(textwrap.dedent("\n".join(lines)))
    ask = ("Complete this Python function.", "Write the body of the following function:", "Implement this in Python:")
    yield from (f"{rng.choice(ask)}\n\n```python\n{head}\n```" for head in rng.sample(found, number))


def on_books(file: Path, languages: Sequence[str], short: int, long: int, rng: random.Random) -> Iterator[Row]:
    """Tasks on the passages of a file's books, so many of each."""
    for kind, instructions in TASKS.items():
        for chars, number, name in ((SHORT, short, kind), (LONG, long, f"long {kind}")):
            for passage in passages(file, chars, number, rng):
                yield {"prompt": task(instructions, passage, rng), "category": name}
    for sentence in sentences(file, short, rng):
        asked = f"Translate this sentence into {rng.choice(languages)}."
        yield {"prompt": task((asked,), sentence, rng), "category": "translation"}


def learned(data: Path, rng: random.Random) -> Iterator[Row]:
    dolly = [asked_in(row) for row in rows_in(data / "dolly_2000.jsonl")]
    yield from ({"prompt": said, "category": "dolly"} for said in dolly[: LEARNED["dolly"]])
    for said in rng.sample(dolly[: LEARNED["dolly"]], LEARNED["chat"]):
        yield {"turns": [said, rng.choice(FOLLOW_UPS)], "category": "chat"}
    asked = rng.sample(rows_in(data / "gsm8k_train.jsonl"), LEARNED["gsm8k"])
    yield from ({"prompt": row["question"], "category": "gsm8k"} for row in asked)
    yield from ({"prompt": said, "category": "code"} for said in functions(LEARNED["code"], rng))
    yield from on_books(data / "books_pd_train.txt", LANGUAGES, SHORT_TASKS, LONG_TASKS, rng)


def foreign(data: Path, rng: random.Random) -> Iterator[Row]:
    """MT-bench, HumanEval, self-instruct's tasks and Shakespeare are of kinds that were not learned; the rest is of new texts."""
    yield from ({"turns": row["turns"], "category": "mt-bench"} for row in rows_in(data / "mt_bench.jsonl"))
    code = rng.sample(rows_in(data / "humaneval.jsonl"), FOREIGN)
    yield from ({"prompt": f"Complete this function.\n\n{row['prompt']}", "category": "humaneval"} for row in code)
    asked = rng.sample(rows_in(data / "gsm8k_test.jsonl"), FOREIGN)
    yield from ({"prompt": row["question"], "category": "gsm8k"} for row in asked)
    for row in rng.sample(rows_in(data / "seed_tasks_175.jsonl"), FOREIGN):
        yield {"prompt": asked_in(row), "category": "instructions"}
    ask = ("Say this in modern English.", "What is this scene about?")
    for scene in passages(data / "tinyshakespeare.txt", (600, 2_000), FOREIGN, rng):
        yield {"prompt": task(ask, scene, rng), "category": "shakespeare"}
    found = list(on_books(data / "books_pd_valid.txt", NEW_LANGUAGES, FOREIGN, FOREIGN, rng))
    yield from (row for row in found if row["category"] in ("translation", "summary", "long summary", "long reading"))


def write(file: Path, make: Callable[[Path, random.Random], Iterator[Row]], data: Path) -> None:
    rng = random.Random(SEED)
    rows = list(make(data, rng))
    rng.shuffle(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{file}: {len(rows)} prompts")


if __name__ == "__main__":
    data, folder = map(Path, sys.argv[1:])
    write(folder / "train.jsonl", learned, data)
    write(folder / "foreign.jsonl", foreign, data)
