"""Lossless sampling: the noise is fixed for each position of a text, and a guess is accepted if it is the sampled token.

The noise is a function of seed, sequence, position and token alone, and the token is the argmax of log-probability
plus Gumbel noise (the Gumbel-max trick), which is a draw from the softmax. So the text is the same for every
tree, batch size and order of the prompts, and a step accepts just the guesses that are in it.

Bits come from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014):
output i of state s is mix(s + i * GOLDEN), so any of them can be had without the others, on any device.

R rows, one for each token to choose · V vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.origins import RuleRecord
from treeopt.runtime.acceptance.greedy import Greedy

CHUNK_NUMBERS = 2**22  # logits handled at once; each takes some 50 bytes meanwhile


class NoiseStream(IntEnum):
    """Uses of noise: streams at the same place of the same text are independent of each other."""

    TOKEN = 0  # the target's choice
    DRAFT = 1  # the draft model's choice
    ACCEPT = 2  # whether the draft model's choice is accepted


@dataclass(frozen=True)
class Sampling(Greedy):
    """Sample at a temperature, among the ``top_k`` likeliest tokens, of these among the likeliest that make ``top_p``.

    >>> sampling = Sampling(0.8, top_k=2)
    >>> keys, positions = torch.zeros(6, dtype=torch.long), torch.arange(6)
    >>> sampling.choose(torch.tensor([0.5, 0.4, 0.3]).expand(6, 3), keys, positions).tolist()
    [1, 0, 0, 0, 1, 0]
    """

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidInput(f"`top_p` must be above 0 and at most 1, but got {self.top_p}.")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInput(f"`top_k` must be at least 1, but got {self.top_k}.")

    @property
    def record(self) -> RuleRecord:
        known = {**vars(self), "top_p": None if self.top_p == 1 else self.top_p}  # which is the same rule
        return cast(RuleRecord, {"rule": "sample-then-match", **known})

    def choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """(..., V) logits to (...) tokens, each with the noise of its place; keys and positions may broadcast to (...)."""
        shape = logits.shape[:-1]
        states = stream_states(self.seed, NoiseStream.TOKEN, keys.to(logits.device), positions.to(logits.device))
        rows = rows_at_once(logits.shape[-1])
        parts = logits.reshape(-1, logits.shape[-1]).split(rows)
        of = states.broadcast_to(shape).flatten().split(rows)
        drawn = [gumbel_argmax(self.filtered(part), states) for part, states in zip(parts, of, strict=True)]
        return torch.cat(drawn).reshape(shape)

    def filtered(self, logits: Tensor) -> Tensor:
        """(..., V) float64 logits by temperature, then top_k, then top_p: -inf for tokens that drop out.

        As in transformers, equals of the last of the top_k stay, and so does the token that first reaches
        top_p. Of equals that top_p tells apart the smaller id stays.
        """
        logits = logits.double()
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
            drops = torch.zeros_like(ordered, dtype=torch.bool)
            drops[..., 1:] = ordered.softmax(-1).cumsum(-1)[..., :-1] >= self.top_p  # those before make top_p
            logits = logits.masked_fill(torch.zeros_like(drops).scatter_(-1, ids, drops), -math.inf)
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """(..., V) float64: what `choose` draws from."""
        return self.filtered(logits).softmax(-1)


def check_temperature(temperature: float) -> None:
    """Raise InvalidInput for a temperature that nothing can be drawn at."""
    if not 0 < temperature < math.inf:
        raise InvalidInput(
            f"`temperature` must be above 0, but got {temperature}: greedy decoding is `acceptance=greedy`."
        )


def rows_at_once(vocab_size: int) -> int:
    """Rows of logits to handle at once, so that float64 copies of them stay small."""
    return max(1, CHUNK_NUMBERS // vocab_size)


def gumbel_argmax(scores: Tensor, states: Tensor) -> Tensor:
    """(R,) tokens drawn from the softmax of (R, V) float64 scores, with the noise of (R,) states."""
    known, which = states.unique(return_inverse=True)  # nodes of the same depth share their row's noise
    noise = -(-uniforms(known, scores.shape[-1]).log()).log()  # Gumbel, always finite
    return (scores + noise[which]).argmax(-1)


def stream_states(seed: int, stream: NoiseStream, keys: Tensor, positions: Tensor) -> Tensor:
    """(...) int64 states of the noise at positions of sequences; keys and positions broadcast."""
    state = _mixed(torch.full_like(keys, _signed(seed)) + GOLDEN)
    for part in (int(stream), keys, positions):
        state = _mixed(state + part + GOLDEN)
    return state


def uniforms(states: Tensor, n: int) -> Tensor:
    """(..., n) float64 inside (0, 1): the first 52 bits of the first outputs of every state, and half a step."""
    bits = _shifted(splitmix64(states, n), 12)
    return (bits.double() + 0.5) * 2.0**-52


def splitmix64(states: Tensor, n: int) -> Tensor:
    """(...) int64 states to their first (..., n) outputs.

    >>> [token % 2**64 for token in splitmix64(torch.tensor([1234567]), 2)[0].tolist()]
    [6457827717110365317, 3203168211198807973]
    """
    steps = torch.arange(1, n + 1, device=states.device) * GOLDEN
    return _mixed(states[..., None] + steps)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's mix of int64 as unsigned numbers: products and sums wrap around."""
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left; torch's own shift repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


GOLDEN, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
