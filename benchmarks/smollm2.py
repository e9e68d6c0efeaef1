"""The recipe of SmolLM2's drafters: its prompts, and a draft model of its first layers. `treeopt train` makes the others.

    python benchmarks/smollm2.py prompts DOLLY.jsonl GSM8K_TRAIN.jsonl GSM8K_TEST.jsonl FOLDER
    treeopt train --kind eagle3 --draft-vocab 8192 --learning-rate 0.001 --minutes 90 --model smollm2 --dtype bfloat16 \\
        --mixed-precision bf16 --prompts FOLDER/train.jsonl --num-prompts 6000 --tokens 640 --answers FOLDER/answers -o FOLDER/eagle3
    treeopt train --kind medusa-shared --minutes 36 ... -o FOLDER/medusa     # the rest as above
    python benchmarks/smollm2.py draft FOLDER/answers OUTPUT [--layers 4] [--epochs 1]
    python benchmarks/smollm2.py block FOLDER/answers FOLDER/narrow          # DFlash's 2 layers with a narrow MLP, to train
    treeopt train --kind dflash --heads 5 --start FOLDER/narrow --learning-rate 0.002 --minutes 60 ... -o FOLDER/dflash

DOLLY has the instructions of databricks-dolly-15k (2,000 of them are taken), the others are GSM8K's two files. The draft
model learns the target's own distributions on its answers, which `treeopt train --answers FOLDER/answers` left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from demo_training import fit
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from treeopt import demo
from treeopt.files import npz
from treeopt.runtime.checkpoints.save import save_heads
from treeopt.runtime.target import Target, load_target
from treeopt.runtime.training.batches import Batch, Text, make_batch
from treeopt.runtime.training.opening import make_heads
from treeopt.runtime.training.recipe import Recipe

DOLLY, DOLLY_TEST, GSM8K, GSM8K_TEST = 1_700, 300, 4_300, 300  # prompts
BLOCK, MLP = 5, 768  # guesses of a block, and width of its layers' MLP: they are 11 MB
TEXTS, MOST_TOKENS = 8, 640  # texts of a step, and the longest text
RATE = 0.15  # of the learning rates of a model that begins with nothing


def rows(file: Path) -> Iterator[dict[str, str]]:
    """Of JSON, or of JSON lines."""
    text = file.read_text(encoding="utf-8")
    yield from json.loads(text) if text.startswith("[") else map(json.loads, text.strip().split("\n"))


def make_prompts(dolly: Path, gsm8k: Path, gsm8k_test: Path, folder: Path) -> None:
    """train.jsonl and test.jsonl: no prompt is in both."""
    said = [{"prompt": "\n\n".join(filter(None, (r["instruction"], r["input"]))), "set": "dolly"} for r in rows(dolly)]
    asked, tested = ([{"prompt": r["question"], "set": "gsm8k"} for r in rows(file)] for file in (gsm8k, gsm8k_test))
    train = said[:DOLLY] + asked[:GSM8K]
    known = {row["prompt"] for row in train}
    test = [r for r in said[DOLLY : DOLLY + DOLLY_TEST] + tested[:GSM8K_TEST] if r["prompt"] not in known]
    folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("train", train), ("test", test)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(prompts)} prompts")


def texts_in(answers: Path) -> list[Text]:
    """The answers in the journals of `treeopt train`."""
    found = []
    for file in sorted(answers.rglob("*.npz")):
        arrays = npz.read(file, ("tokens", "starts", "prompt_tokens"))
        for (begin, end), prompt_tokens in zip(pairwise(arrays["starts"]), arrays["prompt_tokens"], strict=True):
            tokens = arrays["tokens"][begin:end][:MOST_TOKENS]
            if len(tokens) > prompt_tokens + 1:
                found.append(Text(tokens, int(prompt_tokens), ""))
    return found


def first_layers(target: Target, layers: int) -> LlamaForCausalLM:
    """A model of the target's first layers, its final norm and its embedding, which stays as it is."""
    config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(target.model.float().state_dict(), strict=False)
    model.get_input_embeddings().requires_grad_(False)
    target.model.bfloat16()
    return model


def draft_loss(model: LlamaForCausalLM, target: Target, texts: list[Text]) -> Callable[[int], Tensor]:
    """The loss of a step: cross-entropy of the model's guesses against the target's distributions [nats per token]."""
    batches_of_epoch = len(texts) // TEXTS

    def loss(step: int) -> Tensor:
        epoch, place = divmod(step, batches_of_epoch)
        chosen = np.random.default_rng(epoch).permutation(len(texts))[place * TEXTS : (place + 1) * TEXTS].tolist()
        batch: Batch = make_batch([texts[i] for i in chosen], 0, "cpu")
        with torch.no_grad():
            hidden = target.states(input_ids=batch.tokens, use_cache=False)
            wanted = target.lm_head(batch.states(hidden)).float().softmax(-1)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(batch.tokens, use_cache=False).last_hidden_state
            guesses = model.lm_head(batch.states(hidden)).float()
        return F.cross_entropy(guesses, wanted)

    return loss


def make_draft(answers: Path, output: Path, layers: int, epochs: float) -> None:
    torch.manual_seed(0)
    target, texts = load_target(demo.SMOLLM2, dtype="bfloat16"), texts_in(answers)
    model = first_layers(target, layers)
    print(f"{len(texts):,} answers; {layers} of {target.num_layers} layers.", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    fit(
        output / "training.pt",
        {"draft": model},
        draft_loss(model, target, texts),
        steps=int(epochs * (len(texts) // TEXTS)),
        scale=RATE,
    )
    model.to(torch.float16).save_pretrained(output)
    target.tokenizer.save_pretrained(output)


def make_block(answers: Path, output: Path) -> None:
    target = load_target(demo.SMOLLM2, dtype="bfloat16")
    target.config.intermediate_size = MLP
    recipe = Recipe("dflash", num_heads=BLOCK)
    heads = make_heads(target, recipe, texts_in(answers))
    save_heads(heads.to(target.dtype), "dflash", output, base=target.name, lm_head=target.lm_head.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts")
    for name in ("dolly", "gsm8k", "gsm8k_test", "folder"):
        prompts.add_argument(name, type=Path)
    draft = commands.add_parser("draft")
    draft.add_argument("answers", type=Path)
    draft.add_argument("output", type=Path)
    draft.add_argument("--layers", type=int, default=4)
    draft.add_argument("--epochs", type=float, default=1.0)
    block = commands.add_parser("block")
    for name in ("answers", "output"):
        block.add_argument(name, type=Path)
    asked = vars(parser.parse_args())
    make: dict[str, Callable[..., None]] = {"prompts": make_prompts, "draft": make_draft, "block": make_block}
    make[asked.pop("command")](**asked)


if __name__ == "__main__":
    main()
