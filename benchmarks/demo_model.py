"""The recipe that made the embedded demo model: tokenizer, base, continuations, draft model, Medusa heads, card.

Run it from a checkout; it takes about two hours on two CPU cores, minutes on a GPU:

    python benchmarks/demo_model.py --books books_pd_train.txt --work build/demo

Every stage writes its result into ``--work`` and is skipped when that is there; the base and the
heads also write checkpoints, so the same command continues after an interruption.

B windows per batch · T tokens per window · V vocabulary · K heads · d width
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treeopt.demo.corpus import standard_library
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.stop import StopRule, sequence_end

VOCABULARY, CONTEXT, HEADS = 2048, 512, 4
END = "<|endoftext|>"
BASE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
# The draft model: its steps cost by the layer, and its guesses need to be good for a few tokens only.
DRAFT = {**BASE, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 1}
CODE_SHARE = 0.75  # of the training windows; the rest are books
BATCH, WARMUP = 16, 50  # windows, optimiser steps
ANSWER = 128  # tokens of the answers that the heads learn from
PROMPTS = (64, 24)  # tokens of their prompts; after the shorter ones the model soon leaves its training text
HEAD_BATCH, HEAD_STATES = 64, 4096  # sequences, states
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


def windows(stream: np.ndarray, starts: np.ndarray, length: int) -> torch.Tensor:
    return torch.from_numpy(stream[starts[:, None] + np.arange(length)].astype(np.int64))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero; a factor of the peak."""
    return min((step + 1) / WARMUP, 1.0) * (1 - step / steps)


def untrained(shape: dict[str, Any], device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=None, pad_token_id=None, **shape)
    ).to(device)


def optimisers_of(model: LlamaForCausalLM) -> list[Any]:
    """Muon for the matrices, AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=6e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_model(
    work: Path,
    name: str,
    model: LlamaForCausalLM,
    streams: dict[float, np.ndarray],
    *,
    tokens: int,
    teacher: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """Train a model on random windows.

    streams : share of the windows to the token ids that they are cut from
    teacher : whose distributions to learn instead of the text's tokens
    """
    device = str(model.device)
    checkpoint, steps = work / f"{name}.pt", tokens // (BATCH * CONTEXT)
    optimisers = optimisers_of(model)
    peaks = [o.param_groups[0]["lr"] for o in optimisers]
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        first = state["step"]
    started = time.time()
    for step in range(first, steps):
        rng = np.random.default_rng(step)  # a step's batch depends on nothing but its number
        counts = rng.multinomial(BATCH, list(streams))
        x = torch.cat(
            [
                windows(stream, rng.integers(0, len(stream) - CONTEXT - 1, n), CONTEXT + 1)
                for stream, n in zip(streams.values(), counts, strict=True)
            ]
        ).to(device)  # (B, T+1)
        with torch.autocast(device, torch.bfloat16):
            logits = model(x[:, :-1]).logits
            said = None if teacher is None else teacher(x[:, :-1]).logits.float().softmax(-1).flatten(0, 1)
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten() if said is None else said)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * learning_rate(step, steps)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if step % 20 == 0:
            speed = (step + 1 - first) * BATCH * CONTEXT / (time.time() - started)
            print(f"{name} {step}/{steps} loss {loss.item():.3f} {speed:.0f} tokens/s", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            save_checkpoint(
                checkpoint, model=model.state_dict(), step=step + 1, optimisers=[o.state_dict() for o in optimisers]
            )
    model.eval().requires_grad_(False)
    return model


def save_checkpoint(path: Path, **state: Any) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, stream: np.ndarray, n_bytes: int) -> float:
    """Negative log2-likelihood of the stream over its bytes, in windows of the whole context."""
    nats, device = 0.0, model.device
    length = (len(stream) - 1) // CONTEXT * CONTEXT
    for i in range(0, length, CONTEXT * BATCH):
        starts = np.arange(i, min(i + CONTEXT * BATCH, length), CONTEXT)
        x = windows(stream, starts, CONTEXT + 1).to(device)
        logits = model(x[:, :-1]).logits
        nats += F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item()
    return nats / math.log(2) / (n_bytes * length / len(stream))


def bigram_bits_per_byte(train: np.ndarray, held_out: np.ndarray, n_bytes: int) -> float:
    """The same figure for an interpolated bigram: what counting alone reaches."""
    v = VOCABULARY
    pairs = np.bincount(train[:-1].astype(np.int64) * v + train[1:], minlength=v * v).reshape(v, v)
    unigram = (np.bincount(train, minlength=v) + 1) / (len(train) + v)
    strength = 5.0
    probs = (pairs + strength * unigram) / (pairs.sum(1, keepdims=True) + strength)
    return float(-np.log2(probs[held_out[:-1], held_out[1:]]).sum() / n_bytes)


@torch.inference_mode()
def continuations(model: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """The model's own greedy answers to (N, T) prompts: (N, T + ANSWER) tokens."""
    out = []
    for chunk in prompts.split(256):
        cache, x, answer = None, chunk.to(model.device), [chunk.to(model.device)]
        for _ in range(ANSWER):
            with torch.autocast(model.device.type, torch.bfloat16):
                step = model(x, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, x = step.past_key_values, step.logits[:, -1:].float().argmax(-1)
            answer.append(x)
        out.append(torch.cat(answer, 1).to("cpu", torch.int16))
        print(f"continuations {sum(map(len, out))}/{len(prompts)}", flush=True)
    return torch.cat(out)


def own_answers(
    work: Path, model: LlamaForCausalLM, code: np.ndarray, books: np.ndarray, prompt_tokens: int, count: int
) -> torch.Tensor:
    """Greedy continuations of ``count`` pieces of training text, kept in ``work``."""
    file = work / f"continuations-{prompt_tokens}.pt"
    if not file.exists():
        rng, n_code = np.random.default_rng(2), round(count * CODE_SHARE)
        pieces = [
            windows(stream, rng.integers(0, len(stream) - prompt_tokens, n), prompt_tokens)
            for stream, n in ((code, n_code), (books, count - n_code))
        ]
        save_checkpoint(file, sequences=continuations(model, torch.cat(pieces)))
    return torch.load(file, weights_only=True)["sequences"]


def answer_lengths(sequences: torch.Tensor, end: int) -> tuple[torch.Tensor, Counter[str]]:
    """Tokens of each answer up to its end token or loop (N,), and why each one ended."""
    ends = [sequence_end(row[-ANSWER:].tolist(), StopRule(frozenset({end}), ANSWER)) for row in sequences]
    return torch.tensor([n for n, _ in ends]), Counter(reason.name for _, reason in ends)


def until_ends(sequences: torch.Tensor, end: int) -> np.ndarray:
    """One stream of prompts with their answers, each up to where it ends."""
    lengths = answer_lengths(sequences, end)[0] + sequences.shape[1] - ANSWER
    return np.concatenate([row[:n].numpy() for row, n in zip(sequences, lengths.tolist(), strict=True)])


@torch.inference_mode()
def head_states(
    model: LlamaForCausalLM, sequences: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (N, d) of all answers and the tokens (N, K) that the heads have to guess there.

    State t is at the position before the answer's token t + 1; head k guesses token t + 1 + k, and
    nothing (-100) past its end.
    """
    hidden, labels = [], []
    for x, n in zip(sequences.split(HEAD_BATCH), lengths.split(HEAD_BATCH), strict=True):
        x, n = x.long().to(model.device), n.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            states = model.model(x).last_hidden_state
        t = torch.arange(ANSWER, device=x.device)
        guessed = torch.stack(
            [torch.where(t + k < n[:, None], x[:, -ANSWER:].roll(-k, 1), -100) for k in range(1, HEADS + 1)], dim=-1
        )  # (B, ANSWER, K)
        kept = guessed[..., 0] != -100
        hidden.append(states[:, -ANSWER - 1 : -1][kept].half())
        labels.append(guessed[kept])
    return torch.cat(hidden), torch.cat(labels)


def train_heads(
    work: Path, model: LlamaForCausalLM, hidden: torch.Tensor, labels: torch.Tensor, *, epochs: int
) -> MedusaHeads:
    """Medusa-1: the base frozen, loss sum_k 0.8^k CE_k (Medusa, section 2.2.1)."""
    heads = MedusaHeads.like_lm_head(model.lm_head.weight, HEADS).to(model.device)
    checkpoint, steps = work / "heads.pt", epochs * len(hidden) // HEAD_STATES
    optimiser = torch.optim.AdamW(heads.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    weight = 0.8 ** torch.arange(1, HEADS + 1, device=model.device)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=model.device)
        heads.load_state_dict(state["heads"])
        optimiser.load_state_dict(state["optimiser"])
        first = state["step"]
    for step in range(first, steps):
        rows = torch.from_numpy(np.random.default_rng(step).integers(0, len(hidden), HEAD_STATES))
        x, y = hidden[rows].float(), labels[rows]
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = [heads.logits(x, k) for k in range(HEADS)]
        losses = [F.cross_entropy(logits[k].float(), y[:, k]) for k in range(HEADS)]
        (torch.stack(losses) * weight).sum().backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimiser.param_groups[0]["lr"] = 1.5e-3 * learning_rate(step, steps)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"heads {step}/{steps} loss {[round(x.item(), 3) for x in losses]}", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            save_checkpoint(checkpoint, heads=heads.state_dict(), step=step + 1, optimiser=optimiser.state_dict())
    return heads.eval().requires_grad_(False)


@torch.inference_mode()
def head_accuracy(heads: MedusaHeads, hidden: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Top-1 accuracy of every head over the loop-free states."""
    hits = [
        torch.cat([heads.logits(x.float(), k).argmax(-1) for x in hidden.split(HEAD_STATES)]) == labels[:, k]
        for k in range(HEADS)
    ]
    return [float(hit.sum() / (labels[:, k] != -100).sum()) for k, hit in enumerate(hits)]


def judge_heads(model: LlamaForCausalLM, heads: MedusaHeads, held_out: np.ndarray) -> dict[str, Any]:
    """Accuracy of the heads on answers to held-out prompts, and the share of these answers that ends in a loop."""
    n = max(PROMPTS)
    prompts = windows(held_out, np.linspace(0, len(held_out) - n - 1, 512).astype(int), n)
    answers = continuations(model, prompts)
    lengths, reasons = answer_lengths(answers, 0)
    accuracy = head_accuracy(heads.float(), *head_states(model, answers, lengths))
    return {"head_top1": accuracy, "loop_share": reasons["LOOP"] / len(answers)}


@click.command()
@click.option("--books", type=EXISTING, required=True, help="Plain text of the second domain.")
@click.option("--work", type=FOLDER, default="build/demo", show_default=True, help="For the result and checkpoints.")
@click.option("--tokens", default=14_000_000, show_default=True, help="Training tokens of the base.")
@click.option("--prompts", default=12_288, show_default=True, help="Continuations for the heads, per prompt length.")
@click.option("--epochs", default=5, show_default=True, help="Passes of the heads over them.")
@click.option("--draft-tokens", default=4_000_000, show_default=True, help="Training tokens of the draft model.")
@click.option("--base", type=EXISTING, help="A model to take instead of training one.")
@click.option("--device", default="cpu", show_default=True)
def main(
    books: Path, work: Path, tokens: int, prompts: int, epochs: int, draft_tokens: int, base: Path | None, device: str
) -> None:
    """Train the embedded demo model and its drafters: WORK/model, WORK/draft, WORK/heads."""
    (work / "model").mkdir(parents=True, exist_ok=True)
    texts = read_texts(books, base or work / "model")
    if base is not None:
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).to(device).requires_grad_(False)
    else:
        model = train_model(work, "base", untrained(BASE, device), texts.streams, tokens=tokens)
    model.eval()
    card: dict[str, Any] = {
        "train_tokens": tokens,
        "held_out_bits_per_byte": bits_per_byte(model, texts.held_out, texts.held_out_bytes),
        "bigram_bits_per_byte": bigram_bits_per_byte(texts.code, texts.held_out, texts.held_out_bytes),
    }
    print(json.dumps(card), flush=True)
    model.to(torch.float16).save_pretrained(work / "model")
    model.to(torch.float32)  # the heads learn from the weights as shipped

    answers = [own_answers(work, model, texts.code, texts.books, n, prompts) for n in PROMPTS]
    if draft_tokens:
        own = {1.0: np.concatenate([until_ends(x, 0) for x in answers])}
        draft = train_model(
            work, "draft-texts", untrained(DRAFT, device), texts.streams, tokens=draft_tokens, teacher=model
        )
        draft = train_model(work, "draft", draft.requires_grad_(True), own, tokens=draft_tokens, teacher=model)
        draft.to(torch.float16).save_pretrained(work / "draft")
        texts.tokenizer.save_pretrained(work / "draft")
    if not epochs:
        return
    states = [head_states(model, x, answer_lengths(x, 0)[0]) for x in answers]
    hidden, labels = (torch.cat(parts) for parts in zip(*states, strict=True))
    print(f"{len(hidden)} loop-free states of {sum(map(len, answers))} answers", flush=True)
    heads = train_heads(work, model, hidden, labels, epochs=epochs)
    save_heads(heads.half(), "medusa", work / "heads", base="treeopt demo model")
    card |= judge_heads(model, heads, texts.held_out)
    (work / "card.json").write_text(json.dumps(card, indent=2))
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
