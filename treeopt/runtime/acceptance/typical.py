"""Typical acceptance: a guess passes where the target finds it likely enough, so that the text may change.

Medusa, section 2.3.1, after Hewitt et al., "Truncation Sampling as Language Model Desmoothing", 2022: with p the
target's softmax at a temperature and H its entropy in nats, guess x after an accepted path is accepted where

    p(x | path) > min(epsilon, delta exp(-H(p(. | path))))

Several siblings may pass. The longest accepted path is emitted, of equally long ones the likeliest; the token after
it, the next root, is the target's argmax. So what a tree reaches cannot be told from its ranks in a given text,
and steps are probed instead (`measure/probe.py`); and what the text loses has to be measured (`measure/bench.py`).

b live rows · T nodes of the tree · E of them with children · V vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.origins import RuleRecord
from treeopt.runtime.acceptance.greedy import Greedy, Nodes
from treeopt.runtime.acceptance.sampling import check_temperature
from treeopt.runtime.drafters.states import states_at_once
from treeopt.trees.tree import BoolArray, Tree

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
            raise InvalidInput(f"`epsilon` must be a probability above 0 and below 1, but got {self.epsilon}.")
        if self.delta is not None and not 0 < self.delta < math.inf:
            raise InvalidInput(f"`delta` must be above 0, but got {self.delta}.")

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
        found, each = [], max(1, states_at_once(logits.shape[-1]) // len(expanding))  # rows
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
