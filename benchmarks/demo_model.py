"""The recipe that made the embedded demo model: base with Medusa heads, self-distillation, draft model, card.

Run it from a checkout; it takes some four hours on two CPU cores:

    torchrun --nproc-per-node 2 benchmarks/demo_model.py --books books_pd_train.txt --work build/demo

Every stage writes its result into ``--work`` and is skipped when that is there; what trains also writes
checkpoints, so the same command continues after an interruption. The Hydra heads come from `treeopt train` on the answers
that it writes.

N answers · P tokens of their prompts · V vocabulary · K heads · d width
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from demo_training import (
    LEARN,
    RANK,
    UNLEARN,
    WORLD,
    batch_of,
    fit,
    heads_loss,
    joint_loss,
    own_loss,
    taught_loss,
    windows,
)
from torch import Tensor, distributed
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treeopt.demo.corpus import standard_library
from treeopt.records.trace import End
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.stop import LOOP_PERIOD, LOOP_REPEATS, StopRule
from treeopt.runtime.target import Target

VOCABULARY, CONTEXT, HEADS = 2048, 512, 4
END = "<|endoftext|>"
# Deep and narrow: a step costs by its layers, and more rows cost little, as on a GPU at small batches.
BASE = {
    "hidden_size": 160,
    "intermediate_size": 432,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
# The draft model: its steps cost by the layer too, and its guesses need to be good for a few tokens only.
DRAFT = {**BASE, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 1}
CODE_SHARE = 0.75  # of the training windows; the rest are books
BATCH, WINDOW = 4096, 256  # tokens; the last tenth of the base's steps has windows of the whole context
ANSWER = 128  # most tokens of the model's own answers
PROMPTS = (64, 24)  # tokens of their prompts; after the shorter ones the model soon leaves its training text
OWN_PROMPTS = 4096  # of each length, answered anew after every round
ROUNDS, ROUND_STEPS = 1, 250  # of self-distillation
HEAD_STEPS, HEAD_STATES = 2000, 2048  # of the heads alone, at the end
DRAFT_STEPS = 400  # of the draft model: on texts, then on answers
EXISTING, FOLDER = click.Path(exists=True, path_type=Path), click.Path(path_type=Path)


@dataclass(frozen=True)
class Texts:
    """What is learned from, as token ids, and the held-out modules."""

    tokenizer: PreTrainedTokenizerFast
    code: np.ndarray
    books: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int

    @property
    def streams(self) -> dict[float, np.ndarray]:
        """Share of the training windows to the token ids that they are cut from."""
        return {CODE_SHARE: self.code, 1 - CODE_SHARE: self.books}


def read_texts(books: Path, tokenizer_folder: Path) -> Texts:
    """The standard library and the books, in the tokens of the tokenizer in a folder, made there if need be."""
    code = [module.text for module in standard_library(held_out=False)]
    random.Random(0).shuffle(code)
    held_out = [module.text for module in standard_library(held_out=True)]
    prose = books.read_text(encoding="utf-8")
    tokenizer = build_tokenizer(tokenizer_folder, code, prose)
    found = Texts(
        tokenizer,
        encode(tokenizer, code),
        encode(tokenizer, re.split(r"\n\n(?=CHAPTER)", prose)),
        encode(tokenizer, held_out),
        sum(len(text.encode()) for text in held_out),
    )
    print(f"{len(found.code)} code tokens, {len(found.books)} book tokens, {len(found.held_out)} held out")
    return found


def build_tokenizer(folder: Path, code: list[str], books: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the training text of both domains, kept in ``folder``."""
    from tokenizers import ByteLevelBPETokenizer

    if not (folder / "tokenizer.json").exists():
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(
            [*code, books[: sum(map(len, code)) // 3]], vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
        )
        PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, eos_token=END, model_max_length=CONTEXT
        ).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """One stream of token ids, each text closed by the end token."""
    end = tokenizer.eos_token_id
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.array([*text, end], dtype=np.uint16) for text in ids])


def untrained(shape: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=None, pad_token_id=None, **shape)
    )
    model.set_attn_implementation("whole")
    return model


def train_base(
    work: Path, texts: Texts, steps: int, teacher: LlamaForCausalLM | None
) -> tuple[LlamaForCausalLM, MedusaHeads]:
    """The base and its heads, which learn together from text."""
    model = untrained(BASE)
    heads = MedusaHeads.like_lm_head(model.lm_head.weight, HEADS)
    loss = joint_loss(model, heads, teacher)

    def loss_of(step: int) -> Tensor:
        return loss(batch_of(texts.streams, step, BATCH, CONTEXT if step >= 0.9 * steps else WINDOW))

    fit(work / "base.pt", {"model": model, "heads": heads}, loss_of, steps=steps)
    return model, heads


@dataclass(frozen=True)
class Answers:
    """Greedy answers of a model: tokens (N, P + ANSWER) with their prompts, padded by 0; lengths (N,); looped (N,)."""

    tokens: Tensor
    lengths: Tensor
    looped: Tensor

    @cached_property
    def kinds(self) -> Tensor:
        """What is to be learned of them (N, P + ANSWER): good answers; the loops of the others are to be unlearned."""
        prompt, place = self.tokens.shape[1] - ANSWER, torch.arange(self.tokens.shape[1])
        ends = prompt + self.lengths[:, None]
        kinds = torch.where((place >= prompt) & (place < ends) & ~self.looped[:, None], LEARN, 0)
        for row in self.looped.nonzero()[:, 0].tolist():
            end = int(ends[row])
            kinds[row, end - loop_tokens(self.tokens[row, :end].tolist()) : end] = UNLEARN
        return kinds


def loop_tokens(tokens: list[int]) -> int:
    """How many of the last tokens repeat the block before them.

    >>> loop_tokens([9, 4, 5, 4, 5, 4, 5])
    4
    """
    for period in range(1, LOOP_PERIOD + 1):
        repeated = period * (LOOP_REPEATS - 1)
        if tokens[-repeated:] == tokens[-repeated - period : -period]:
            return repeated
    raise AssertionError("an answer that ended in a loop has one")


def own_answers(file: Path, model: LlamaForCausalLM, prompts: Tensor, dtype: torch.dtype = torch.bfloat16) -> Answers:
    """Greedy answers to (N, P) prompts, kept in ``file``."""
    if not file.exists():
        writer = copy.deepcopy(model).to(dtype)
        writer.set_attn_implementation("sdpa")
        target = Target(writer)
        stop, found = StopRule(frozenset({0}), ANSWER), []
        for part in prompts.split(512):
            found += decode(target, None, part.tolist(), batch_size=128, stop=stop)
            print(f"{file.stem} {len(found)}/{len(prompts)}", flush=True)
        tokens = torch.zeros((len(prompts), prompts.shape[1] + ANSWER), dtype=torch.int16)
        for row, one in zip(tokens, found, strict=True):
            row[: prompts.shape[1] + len(one.tokens)] = torch.tensor([*one.prompt, *one.tokens])
        looped = torch.tensor([one.end is End.LOOP for one in found])
        torch.save(
            {"tokens": tokens, "lengths": torch.tensor([len(one.tokens) for one in found]), "looped": looped}, file
        )
    known = torch.load(file, weights_only=True)
    answers = Answers(known["tokens"].long(), known["lengths"], known["looped"])
    print(
        f"{file.stem}: {answers.looped.float().mean():.1%} of {len(answers.tokens)} answers end in a loop", flush=True
    )
    return answers


def training_prompts(texts: Texts, count: int, prompt_tokens: int, seed: list[int]) -> Tensor:
    """Pieces of training text."""
    rng, code = np.random.default_rng(seed), round(count * CODE_SHARE)
    pieces = [
        windows(stream, rng.integers(0, len(stream) - prompt_tokens, n), prompt_tokens)
        for stream, n in ((texts.code, code), (texts.books, count - code))
    ]
    return torch.cat(pieces)


def answer_training_prompts(work: Path, name: str, model: LlamaForCausalLM, texts: Texts, count: int) -> list[Answers]:
    """Answers to this process' share of ``count`` pieces of training text of each length."""
    return [
        own_answers(work / f"{name}-{n}-{RANK}.pt", model, training_prompts(texts, count // WORLD, n, seed=[RANK, n]))
        for n in PROMPTS
    ]


def own_batches(answers: list[Answers], step: int) -> tuple[Tensor, Tensor]:
    """Tokens and kinds of the answers that a step learns from, all with prompts of one length."""
    rng = np.random.default_rng([1, RANK, step])
    some = answers[step % len(answers)]
    rows = torch.from_numpy(rng.integers(0, len(some.tokens), BATCH // some.tokens.shape[1]))
    return some.tokens[rows], some.kinds[rows]


def distil(
    work: Path, name: str, model: LlamaForCausalLM, heads: MedusaHeads, texts: Texts, answers: list[Answers], steps: int
) -> None:
    """Base and heads learn from the base's own good answers, unlearn its loops, and see as much text beside them."""
    text, own = joint_loss(model, heads), own_loss(model, heads)

    def loss_of(step: int) -> Tensor:
        return text(batch_of(texts.streams, 10**6 + step, BATCH, WINDOW)) + own(*own_batches(answers, step))

    for part in (model, heads):
        part.train().requires_grad_(True)
    fit(work / f"{name}.pt", {"model": model, "heads": heads}, loss_of, steps=steps, scale=0.3)


def train_draft(work: Path, teacher: LlamaForCausalLM, texts: Texts, answers: list[Answers], steps: int) -> None:
    """WORK/draft: a model that learns the base's distributions, on its training texts and then on its own answers."""
    draft, teacher = untrained(DRAFT), teacher.requires_grad_(False)
    loss = taught_loss(draft, teacher)
    fit(
        work / "draft-texts.pt",
        {"draft": draft},
        lambda step: loss(batch_of(texts.streams, step, BATCH, WINDOW)),
        steps=steps,
    )
    draft.train().requires_grad_(True)
    fit(
        work / "draft.pt", {"draft": draft}, lambda step: loss(own_batches(answers, step)[0]), steps=steps, scale=0.5
    )  # fmt: skip
    if RANK == 0:
        draft.set_attn_implementation("sdpa")
        draft.half().save_pretrained(work / "draft")
        texts.tokenizer.save_pretrained(work / "draft")


def write_answers(file: Path, texts: Texts, answers: list[Answers]) -> None:
    """Prompts and answers as JSON Lines, but for those in a loop: what `treeopt train --responses response` reads."""
    decode = texts.tokenizer.decode
    with file.open("w", encoding="utf-8") as lines:
        for some in answers:
            prompt = some.tokens.shape[1] - ANSWER
            for row in (~some.looped).nonzero()[:, 0].tolist():
                tokens = some.tokens[row, : prompt + int(some.lengths[row])].tolist()
                asked, said = decode(tokens[:prompt]), decode(tokens[prompt:], skip_special_tokens=True)
                if asked.strip() and said.strip():
                    lines.write(f"{json.dumps({'prompt': asked, 'response': said})}\n")


@torch.inference_mode()
def head_states(model: LlamaForCausalLM, answers: Answers) -> tuple[Tensor, Tensor]:
    """Hidden states (M, d) of all answers and the tokens (M, K) that the heads have to guess there, -100 past the end."""
    hidden, labels, prompt = [], [], answers.tokens.shape[1] - ANSWER
    ends = prompt + answers.lengths[:, None]
    known = torch.where(torch.arange(answers.tokens.shape[1]) < ends, answers.tokens, -100)
    # The state before the answer's first token guesses the second one, and so on.
    places = F.pad(known, (0, HEADS), value=-100).unfold(1, HEADS, 1)[:, prompt + 1 :]  # (N, ANSWER, K)
    for x, y in zip(answers.tokens.split(64), places[:, :ANSWER].split(64), strict=True):
        with torch.autocast(model.device.type, torch.bfloat16):
            states = model.model(x, use_cache=False).last_hidden_state[:, prompt - 1 : prompt - 1 + y.shape[1]]
        kept = y[..., 0] != -100
        hidden.append(states[kept].half())
        labels.append(y[kept])
    return torch.cat(hidden), torch.cat(labels)


def train_heads(work: Path, heads: MedusaHeads, states: list[tuple[Tensor, Tensor]], steps: int) -> None:
    """Medusa-1: the heads go on alone, from the states of the finished base on its own answers."""
    hidden, labels = (torch.cat(parts) for parts in zip(*states, strict=True))

    def loss_of(step: int) -> Tensor:
        rows = torch.from_numpy(np.random.default_rng([2, RANK, step]).integers(0, len(hidden), HEAD_STATES))
        with torch.autocast(hidden.device.type, torch.bfloat16):
            return heads_loss(heads, hidden[rows].float(), labels[rows])

    heads.train().requires_grad_(True)
    fit(work / "heads.pt", {"heads": heads}, loss_of, steps=steps, scale=0.5)


@torch.inference_mode()
def judge(model: LlamaForCausalLM, heads: MedusaHeads, texts: Texts, file: Path) -> dict[str, Any]:
    """Bits per byte of the held-out modules; the heads' top-1 and the share of loops on answers to 512 pieces of them."""
    if RANK:
        return {}
    prompts = windows(texts.held_out, np.linspace(0, len(texts.held_out) - 65, 512).astype(int), 64)
    answers = own_answers(file, model, prompts, torch.float32)
    hidden, labels = head_states(model, answers)
    hits = heads.first(HEADS)(hidden.float()).argmax(-1) == labels
    return {
        "held_out_bits_per_byte": bits_per_byte(model, texts.held_out, texts.held_out_bytes),
        "head_top1": (hits.sum(0) / (labels != -100).sum(0)).tolist(),
        "loop_share": answers.looped.float().mean().item(),
    }


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, stream: np.ndarray, n_bytes: int) -> float:
    """Negative log2-likelihood of the stream over its bytes, in windows of the whole context."""
    nats, length = 0.0, (len(stream) - 1) // CONTEXT * CONTEXT
    for i in range(0, length, CONTEXT * 16):
        x = windows(stream, np.arange(i, min(i + CONTEXT * 16, length), CONTEXT), CONTEXT + 1)
        logits = model(x[:, :-1], use_cache=False).logits
        nats += F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item()
    return nats / math.log(2) / (n_bytes * length / len(stream))


def bigram_bits_per_byte(train: np.ndarray, held_out: np.ndarray, n_bytes: int) -> float:
    """The same figure for an interpolated bigram: what counting alone reaches."""
    v = VOCABULARY
    pairs = np.bincount(train[:-1].astype(np.int64) * v + train[1:], minlength=v * v).reshape(v, v)
    unigram = (np.bincount(train, minlength=v) + 1) / (len(train) + v)
    strength = 5.0
    probs = (pairs + strength * unigram) / (pairs.sum(1, keepdims=True) + strength)
    return float(-np.log2(probs[held_out[:-1], held_out[1:]]).sum() / n_bytes)


@click.command()
@click.option("--books", type=EXISTING, required=True, help="Plain text of the second domain.")
@click.option("--work", type=FOLDER, default="build/demo", show_default=True, help="For the result and checkpoints.")
@click.option(
    "--teacher", type=EXISTING, help="A model with the same tokenizer, whose distributions the base learns too."
)
@click.option("--steps", default=2000, show_default=True, help="Of the base, 4,096 tokens in each process.")
def main(books: Path, work: Path, teacher: Path | None, steps: int) -> None:
    """Train the embedded demo model and its drafters: WORK/model, WORK/draft, WORK/heads, WORK/card.json."""
    if WORLD > 1:
        distributed.init_process_group("gloo")
    (work / "model").mkdir(parents=True, exist_ok=True)
    texts = read_texts(books, teacher or work / "model")
    card: dict[str, Any] = {"bigram": bigram_bits_per_byte(texts.code, texts.held_out, texts.held_out_bytes)}
    taught_by = (
        LlamaForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16).requires_grad_(False) if teacher else None
    )
    model, heads = train_base(work, texts, steps, taught_by)
    card["base"] = judge(model, heads, texts, work / "held-out-base.pt")
    print(json.dumps(card), flush=True)
    answers = answer_training_prompts(work, "answers-0", model, texts, OWN_PROMPTS)
    for i in range(1, ROUNDS + 1):
        distil(work, f"round-{i}", model, heads, texts, answers, ROUND_STEPS)
        card[f"round {i}"] = judge(model, heads, texts, work / f"held-out-{i}.pt")
        print(json.dumps(card), flush=True)
        answers = answer_training_prompts(work, f"answers-{i}", model, texts, OWN_PROMPTS)
    model.half().float()  # the drafters learn from the weights as shipped
    train_heads(work, heads, [head_states(model, some) for some in answers], HEAD_STEPS)
    heads.half().float()
    card["finished"] = judge(model, heads, texts, work / "held-out.pt")
    train_draft(work, model, texts, answers, DRAFT_STEPS)
    write_answers(work / f"answers-{RANK}.jsonl", texts, answers)
    if RANK:
        return
    model.set_attn_implementation("sdpa")
    model.half().save_pretrained(work / "model")
    texts.tokenizer.save_pretrained(work / "model")
    save_heads(heads.half(), "medusa", work / "heads", base="treeopt demo model")
    (work / "card.json").write_text(json.dumps(card, indent=2))
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
