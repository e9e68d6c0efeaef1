"""Typical acceptance: a guess passes where the target finds it likely enough, so that the text may change.

Medusa, section 2.3.1, after Hewitt et al., "Truncation Sampling as Language Model Desmoothing", 2022: with p the
target's softmax at a temperature and H its entropy in nats, guess x after an accepted path is accepted where

    p(x | path) > min(epsilon, delta exp(-H(p(. | path))))

Several siblings may pass. The longest accepted path is emitted, of equally long ones the likeliest; the token after
it, the next root, is the target's argmax. So what a tree reaches cannot be told from its ranks in a given text,
and steps are probed instead (`collect_probe`); and what the text loses has to be measured (`measure_quality`).

b live rows · T nodes of the tree · E of them with children · V vocabulary · A answers
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.probe import Probe
from treeopt.runtime.acceptance.greedy import with_ancestors
from treeopt.runtime.decode import Decoder, Row, capacity_for
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.drafters.states import states_at_once
from treeopt.runtime.measure.ranks import Prompt, read_answers
from treeopt.runtime.stop import LOOP_PERIOD, LOOP_REPEATS, SequenceEnd, StopRule
from treeopt.runtime.target import Target
from treeopt.trees.tree import BoolArray, IntArray, Tree

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Typical:
    """The rule; ``delta`` is the square root of epsilon by default, as in Medusa.

    >>> Typical(epsilon=0.25).record
    {'rule': 'typical', 'temperature': 0.7, 'epsilon': 0.25, 'delta': 0.5}
    """

    temperature: float = 0.7
    epsilon: float = 0.09
    delta: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InvalidInput(
                f"--temperature must be above 0 for typical acceptance, but got {self.temperature}: for greedy decoding "
                "use --acceptance greedy."
            )
        if not 0 < self.epsilon < 1:
            raise InvalidInput(f"--epsilon must be a probability above 0 and below 1, but got {self.epsilon}.")
        if self.delta is not None and not 0 < self.delta < math.inf:
            raise InvalidInput(f"--delta must be above 0, but got {self.delta}.")

    @property
    def record(self) -> dict[str, Any]:
        return {
            "rule": "typical",
            "temperature": self.temperature,
            "epsilon": self.epsilon,
            "delta": math.sqrt(self.epsilon) if self.delta is None else self.delta,
        }

    def choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        return logits.argmax(-1)

    def accept(
        self, tree: Tree, tokens: NDArray[np.int64], choices: NDArray[np.int64], logits: Tensor
    ) -> tuple[IntArray, IntArray]:
        return longest(tree, *self.judge(tree, tokens, logits))

    def judge(self, tree: Tree, tokens: NDArray[np.int64], logits: Tensor) -> tuple[BoolArray, Floats]:
        """(b, T) nodes that are accepted with all their ancestors, and the log-likelihood of the path to each.

        tokens : (b, T) of every node, -1 for no guess · logits : (b, T, V)
        """
        passes, own = self._passes(tree, tokens, logits)
        likelihood = np.zeros(tokens.shape, dtype=np.float32)
        for depth in range(1, tree.depth + 1):
            nodes = np.flatnonzero(tree.depths == depth)
            likelihood[:, nodes] = likelihood[:, tree.parents[nodes]] + own[:, nodes - 1]
        root = np.ones((len(tokens), 1), dtype=bool)
        return with_ancestors(tree, np.concatenate([root, passes], axis=1)), likelihood

    @torch.inference_mode()
    def _passes(self, tree: Tree, tokens: NDArray[np.int64], logits: Tensor) -> tuple[BoolArray, Floats]:
        """(b, T-1) guesses that the rule takes after their parents, and the log-probability of each."""
        expanding, of = np.unique(tree.parents[1:], return_inverse=True)
        b, n = len(tokens), len(tree)
        parent = torch.from_numpy((np.arange(b)[:, None] * n + expanding).ravel())  # (b * E,) rows of the logits
        place = (np.arange(b)[:, None] * len(expanding) + of).ravel()  # (b * (T-1),) of each guess in these
        guesses = torch.from_numpy(tokens[:, 1:].ravel()).to(logits.device)
        rows, at_once = logits.flatten(0, 1), states_at_once(logits.shape[-1])
        log_p = torch.empty(len(place), device=logits.device)
        least = torch.empty(len(place), device=logits.device)
        for first in range(0, len(parent), at_once):
            chunk = rows[parent[first : first + at_once].to(logits.device)].float() / self.temperature
            chunk = chunk.log_softmax(-1)
            entropy = torch.special.entr(chunk.exp()).sum(-1)
            bound = (self.record["delta"] * (-entropy).exp()).clamp_max(self.epsilon)
            which = np.flatnonzero((place >= first) & (place < first + at_once))
            among = torch.from_numpy(place[which] - first).to(logits.device)
            here = torch.from_numpy(which).to(logits.device)
            log_p[here] = chunk[among, guesses[here].clamp_min(0)]
            least[here] = bound[among]
        passes = (log_p.exp() > least) & (guesses >= 0)
        found = torch.stack([passes.float(), log_p]).cpu().numpy().reshape(2, b, n - 1)
        return found[0] > 0, found[1]


def longest(tree: Tree, accepted: BoolArray, likelihood: Floats) -> tuple[IntArray, IntArray]:
    """(b,) the end of the longest accepted path, the likeliest of equal ones, then the first; (b,) its depth.

    >>> tree, both = Tree.from_choices([[0], [1]]), np.ones((1, 3), dtype=bool)
    >>> longest(tree, both, np.array([[0.0, -3.0, -2.0]], dtype=np.float32))
    (array([2]), array([1]))
    """
    depths = np.where(accepted, tree.depths, -1)
    deepest = depths == depths.max(1, keepdims=True)
    last = np.where(deepest, likelihood, -np.inf).argmax(1)
    return last, tree.depths[last]


class Probing:
    """Judges every node of the probe tree, but emits only what the policy, a part of it, has accepted."""

    def __init__(self, rule: Typical, tree: Tree, policy: Tree) -> None:
        self.rule = rule
        self._followed = np.array([path in set(policy.paths) for path in tree.paths])
        self.verdict: tuple[NDArray[np.int64], BoolArray, Floats]  # of the last step: tokens, accepted, likelihood

    @property
    def record(self) -> dict[str, Any]:
        return self.rule.record

    def choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        return self.rule.choose(logits, keys, positions)

    def accept(
        self, tree: Tree, tokens: NDArray[np.int64], choices: NDArray[np.int64], logits: Tensor
    ) -> tuple[IntArray, IntArray]:
        accepted, likelihood = self.rule.judge(tree, tokens, logits)
        self.verdict = tokens, accepted, likelihood
        return longest(tree, accepted & self._followed, likelihood)


def collect_probe(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    rule: Typical,
    tree: Tree,
    policy: Tree,
    batch_size: int = 16,
    stop: StopRule,
    meta: dict[str, Any] | None = None,
    progress: Callable[[int], None] = lambda answers: None,
) -> Probe:
    """Answer every prompt with the ``policy`` tree while the larger probe ``tree`` is verified in the same passes.

    ``progress`` is called with the number of answers that ended.
    """
    if len(tree) < 2 or not set(policy.paths) <= set(tree.paths):
        raise InvalidInput(
            "A probe tree must have guesses, and all nodes of the policy among them: add the policy's nodes to it."
        )
    asked = [prompt.tokens for prompt in prompts]
    probing = Probing(rule, tree, policy)
    decoder = Decoder(
        target,
        drafter,
        batch_size=batch_size,
        capacity=capacity_for(asked, stop, target),
        stop=stop,
        most_nodes=len(tree),
        acceptance=probing,
    )
    decoder.start(enumerate(asked))
    steps: list[list[tuple[BoolArray, BoolArray, Floats]]] = [[] for _ in prompts]
    ended = 0
    while not decoder.is_done:
        decoder.refill()
        if decoder.live:
            before = [(row, list(row.tokens)) for row in decoder.live]
            decoder.step(tree)
            for (row, text), tokens, accepted, likelihood in zip(before, *probing.verdict, strict=True):
                room = min(stop.max_new_tokens, target.context - row.prompt_tokens) - len(text)
                ends = ends_of(tree, accepted, tokens.tolist(), text, stop, room)
                steps[row.id].append((accepted, ends, likelihood[1:][accepted[1:]]))
        progress(len(decoder.finished) - ended)
        ended = len(decoder.finished)
    rows = sorted(decoder.finished, key=lambda row: row.id)
    flat = [step for answer in steps for step in answer]
    none = np.zeros((0, len(tree)), dtype=bool)
    groups = list(dict.fromkeys(prompt.group for prompt in prompts))
    return Probe(
        tree=tree,
        policy=policy,
        accepted=np.stack([step[0] for step in flat]) if flat else none,
        ends=np.stack([step[1] for step in flat]) if flat else none,
        log_likelihood=np.concatenate([np.zeros(0, np.float32), *(step[2] for step in flat)]),
        starts=np.cumsum([0, *map(len, steps)]),
        lengths=np.array([len(row.tokens) for row in rows]),
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        end=np.array([row.end for row in rows]),
        group=np.array([groups.index(prompt.group) for prompt in prompts]),
        cluster=np.array([prompt.cluster for prompt in prompts]),
        meta={
            "acceptance": rule.record,
            "eos_ids": sorted(stop.eos_ids),
            "max_new_tokens": stop.max_new_tokens,
            "prompt_sha256": [prompt.sha256 for prompt in prompts],
            "group_names": groups,
            **(meta or {}),
        },
    )


def ends_of(
    tree: Tree, accepted: BoolArray, tokens: Sequence[int], text: Sequence[int], stop: StopRule, room: int
) -> BoolArray:
    """(T,) accepted nodes of a step at which the answer would end, had the path to them been emitted.

    tokens : (T,) of the tree · text : emitted so far · room : how many more tokens may be emitted

    >>> path = np.ones(3, dtype=bool)
    >>> ends_of(Tree.chain(2), path, [7, 0, 8], [7], StopRule(frozenset({0}), 9), 8).tolist()
    [False, True, False]
    """
    found = np.zeros(len(tree), dtype=bool)
    recent = text[-LOOP_PERIOD * LOOP_REPEATS :]  # all that tells whether the next token completes a loop
    tips = np.setdiff1d(np.flatnonzero(accepted), tree.parents[np.flatnonzero(accepted)])
    for tip in tips.tolist():
        watch = SequenceEnd(replace(stop, max_new_tokens=len(recent) + room))
        for token in recent:
            watch.push(token)
        for node in np.flatnonzero(tree.mask[tip])[1:].tolist():
            if watch.push(tokens[node]) is not None:
                found[node] = True
                break
    return found


def measure_quality(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    *,
    conversations: Sequence[int] | None = None,
    batch_size: int = 16,
) -> dict[str, float]:
    """What the target itself thinks of texts, and how far they are from the ``reference``: its own greedy ones.

    Log-likelihoods are those of the target at temperature 1, per token, in nats; standard errors over conversations
    (by default every answer is one). The tokens changed are those outside the matching blocks that
    `difflib.SequenceMatcher` finds, as a share of the tokens of both texts; answers changed are those that differ at all.
    """
    cluster = np.unique(range(len(prompts)) if conversations is None else conversations, return_inverse=True)[1]
    found: dict[str, float] = {"answers": len(prompts)}
    draws = conversation_draws(int(cluster.max()) + 1)
    rates, samples = [], []
    for name, answers in (("", texts), ("reference_", reference)):
        sums = np.bincount(cluster, log_likelihoods(target, prompts, answers, batch_size=batch_size))
        lengths = np.bincount(cluster, [len(answer) for answer in answers])
        rates.append(float(sums.sum() / lengths.sum()))
        samples.append(drawn_rates(sums, lengths, draws))
        found[f"{name}tokens"] = int(lengths.sum())
        found[f"{name}log_likelihood_nats_per_token"] = rates[-1]
        found[f"{name}log_likelihood_nats_per_token_stderr"] = stderr(samples[-1], draws.shape[1])
    found["difference_nats_per_token"] = rates[0] - rates[1]
    found["difference_nats_per_token_stderr"] = stderr(samples[0] - samples[1], draws.shape[1])
    pairs = [(list(text), list(other)) for text, other in zip(texts, reference, strict=True)]
    same = sum(2 * _matching(text, other) for text, other in pairs)
    found["changed_tokens_share"] = 1 - same / sum(len(text) + len(other) for text, other in pairs)
    found["changed_answers_share"] = float(np.mean([text != other for text, other in pairs]))
    return found


def _matching(text: list[int], other: list[int]) -> int:
    blocks = difflib.SequenceMatcher(None, text, other, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks)


@torch.inference_mode()
def log_likelihoods(
    target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, batch_size: int
) -> NDArray[np.float64]:
    """(A,) log-likelihood of every answer after its prompt, in nats: one pass of the target over each."""
    found = np.zeros(len(prompts))

    def add(row: Row) -> None:
        hidden, at_once = (torch.stack([hidden[i] for hidden, i in row.states]), states_at_once(target.vocab_size))
        row.states = []
        said = torch.tensor(row.tokens, device=hidden.device)
        for states, tokens in zip(hidden.split(at_once), said.split(at_once), strict=True):
            log_p = target.scores(target.logits(states)).float().log_softmax(-1)
            found[row.id] += float(log_p.gather(1, tokens[:, None]).double().sum())

    # The answers ended where they end: nothing is cut here.
    whole = StopRule(frozenset(), 1 + max(map(len, answers)), at_loops=False)
    read_answers(target, prompts, answers, batch_size=batch_size, stop=whole, done=add)
    return found
