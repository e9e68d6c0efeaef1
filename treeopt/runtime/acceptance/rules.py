"""Acceptance rules: greedy decoding, lossless sampling, and Medusa's typical acceptance.

A rule chooses the target's own token after every node of a tree, and decides which guesses are accepted. It is lossless where
the text is what plain decoding under the same rule would write, whatever the tree.

Sampling fixes the noise for each position of a text. It is a function of seed, sequence, position and token alone, and the
token is the argmax of log-probability plus Gumbel noise (the Gumbel-max trick), which is a draw from the softmax. So the text
is the same for every tree, batch size and order of the prompts, and a step accepts just the guesses that are in it. Bits come
from SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): output i of state s is
mix(s + i * GOLDEN), so any of them can be had without the others, on any device.

Typical acceptance passes a guess where the target finds it likely enough, so that the text may change (Medusa, section 2.3.1,
after Hewitt et al., "Truncation Sampling as Language Model Desmoothing", 2022): with p the target's softmax at a temperature
and H its entropy in nats, guess x after an accepted path is accepted where

    p(x | path) > min(epsilon, delta exp(-H(p(. | path))))

Several siblings may pass. The longest accepted path is emitted, of equally long ones the likeliest; the token after
it, the next root, is the target's argmax. So what a tree reaches cannot be told from its ranks in a given text,
and steps are probed instead (`measure/probe.py`); and what the text loses has to be measured (`measure/quality.py`).

b live rows · T nodes of the tree · E of them with children · R rows, one for each token to choose · V vocabulary
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.origins import RuleRecord
from treeopt.trees.tree import BoolArray, Tree

Nodes = list[list[int]]  # (b, T) of every row and node


def sequence_key(prompt: Sequence[int]) -> int:
    """A 63-bit number for a sequence, by the tokens of its prompt alone.

    >>> sequence_key([1, 2]) == sequence_key((1, 2)) != sequence_key([2, 1])
    True
    """
    digest = hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Greedy:
    """The target chooses its likeliest token, of equal ones the smallest id; guesses that equal it are accepted.

    All rules are of this class.
    """

    @property
    def record(self) -> RuleRecord:
        """The name of the rule, the temperature, and whatever else it depends on."""
        return {"rule": "greedy", "temperature": 0.0}

    def choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """(..., V) logits to the (...) tokens that the target chooses there.

        keys      : (...) int64  of each row's sequence, from its prompt alone
        positions : (...) int64  place in its sequence, prompt included, of the token that is chosen
        """
        return logits.argmax(-1)

    def accept(self, tree: Tree, tokens: Nodes, choices: Nodes, logits: Tensor) -> list[int]:
        """The last accepted node of each of b rows; 0 for none.

        tokens  : of every node, the root's first; -1 for no guess
        choices : the target's token after every node; a rule may change that after the last accepted one
        logits  : (b, T, V)
        """
        return [path[-1] for path in follow_each([tree.parents.tolist()] * len(tokens), tokens, choices)]


def follow_each(parents: Nodes, tokens: Nodes, choices: Nodes) -> Nodes:
    """The accepted paths, root first, of rows with trees of their own, by the (b, T) parents of their nodes.

    >>> follow_each([[-1, 0, 1]], [[7, 8, 9]], [[8, 9, 1]])
    [[0, 1, 2]]
    """
    paths = []
    for above, guesses, chosen in zip(parents, tokens, choices, strict=True):
        path, at = [0], 0
        for node in range(1, len(above)):  # children come after their parents
            if above[node] == at and guesses[node] == chosen[at]:
                path.append(at := node)
        paths.append(path)
    return paths


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
            raise InvalidInput(f"top_p must be above 0 and at most 1, but got {self.top_p}.")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInput(f"top_k must be at least 1, but got {self.top_k}.")

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
        raise InvalidInput(f"temperature must be above 0, but got {temperature}: greedy decoding is `rule=greedy`.")


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
    return (number + 2**63) % 2**64 - 2**63


GOLDEN, FIRST, SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Typical(Greedy):
    """The rule; ``delta`` is the square root of epsilon by default, as in Medusa.

    >>> Typical(epsilon=0.25).record
    {'rule': 'typical', 'temperature': 0.7, 'epsilon': 0.25, 'delta': 0.5}
    """

    temperature: float = 0.7
    epsilon: float = 0.09
    delta: float | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not 0 < self.epsilon < 1:
            raise InvalidInput(f"epsilon must be a probability above 0 and below 1, but got {self.epsilon}.")
        if self.delta is not None and not 0 < self.delta < math.inf:
            raise InvalidInput(f"delta must be above 0, but got {self.delta}.")

    @property
    def record(self) -> RuleRecord:
        delta = math.sqrt(self.epsilon) if self.delta is None else self.delta
        return cast(RuleRecord, {"rule": "typical", **vars(self), "delta": delta})

    def accept(self, tree: Tree, tokens: Nodes, choices: Nodes, logits: Tensor) -> list[int]:
        return longest(tree, *self.judge(tree, np.array(tokens), logits))

    def judge(self, tree: Tree, tokens: NDArray[np.int64], logits: Tensor) -> tuple[BoolArray, Floats]:
        """(b, T) nodes that are accepted with all their ancestors, and the log-likelihood of the path to each.

        tokens : (b, T) of every node, -1 for no guess · logits : (b, T, V)
        """
        passes, own = self._passes(tree, tokens, logits)
        accepted, likelihood = np.ones(tokens.shape, dtype=bool), np.zeros(tokens.shape, dtype=np.float32)
        for depth in range(1, tree.depth + 1):
            nodes = np.flatnonzero(tree.depths == depth)
            likelihood[:, nodes] = likelihood[:, tree.parents[nodes]] + own[:, nodes - 1]
            accepted[:, nodes] = accepted[:, tree.parents[nodes]] & passes[:, nodes - 1]
        return accepted, likelihood

    @torch.inference_mode()
    def _passes(self, tree: Tree, tokens: NDArray[np.int64], logits: Tensor) -> tuple[BoolArray, Floats]:
        """(b, T-1) guesses that the rule takes after their parents, and the log-probability of each."""
        expanding, of = np.unique(tree.parents[1:], return_inverse=True)
        guesses = torch.from_numpy(tokens[:, 1:]).to(logits.device)
        children = torch.from_numpy(of).to(logits.device)
        found, each = [], max(1, rows_at_once(logits.shape[-1]) // len(expanding))  # rows
        for part, guess in zip(logits.split(each), guesses.split(each), strict=True):
            log_p = (part[:, expanding].float() / self.temperature).log_softmax(-1)  # (rows, E, V)
            entropy = torch.special.entr(log_p.exp()).sum(-1)
            bound = (self.record["delta"] * (-entropy).exp()).clamp_max(self.epsilon)
            rows = torch.arange(len(part), device=logits.device)[:, None]
            own = log_p[rows, children, guess.clamp_min(0)]
            found.append(torch.stack([((own.exp() > bound[:, children]) & (guess >= 0)).float(), own]))
        passes, likelihood = torch.cat(found, 1).cpu().numpy()
        return passes > 0, likelihood


def longest(tree: Tree, accepted: BoolArray, likelihood: Floats) -> list[int]:
    """The end of each row's longest accepted path, the likeliest of equal ones, then the first.

    >>> tree, both = Tree.from_choices([[0], [1]]), np.ones((1, 3), dtype=bool)
    >>> longest(tree, both, np.array([[0.0, -3.0, -2.0]], dtype=np.float32))
    [2]
    """
    depths = np.where(accepted, tree.depths, -1)
    deepest = depths == depths.max(1, keepdims=True)
    return np.where(deepest, likelihood, -np.inf).argmax(1).tolist()
