"""Probing: what every step under typical acceptance would have accepted of a tree larger than the one decoded with.

Which guesses typical acceptance takes depends on the text that it emitted before, so what a tree reaches cannot be
told from a given text. Instead a large probe tree is verified in every step, of which the policy, a smaller part of
it, decides what is emitted.

T nodes of the probe tree
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.contender import Prompt
from treeopt.records.origins import RuleRecord
from treeopt.records.probe import Probe
from treeopt.runtime.acceptance.rules import Floats, Greedy, Nodes, Typical, longest
from treeopt.runtime.decode import Decoder
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import LOOP_PERIOD, LOOP_REPEATS, SequenceEnd, StopRule
from treeopt.trees.tree import BoolArray, Tree

# Of a step: (T,) nodes accepted with all their ancestors; (T,) of these, at which the answer would end; and the
# log-likelihood of the path to every accepted node but the root.
Step = tuple[BoolArray, BoolArray, Floats]


class Probing(Greedy):
    """Judges every node of the probe tree, but emits only what the policy, a part of it, has accepted."""

    def __init__(self, rule: Typical, tree: Tree, policy: Tree) -> None:
        self.rule, self.tree = rule, tree
        self._followed = np.array([path in set(policy.paths) for path in tree.paths])
        self.verdict: tuple[Nodes, BoolArray, Floats]  # of the last step: tokens, accepted, likelihood

    @property
    def record(self) -> RuleRecord:
        return self.rule.record

    def accept(self, tree: Tree, tokens: Nodes, choices: Nodes, logits: Tensor) -> list[int]:
        accepted, likelihood = self.rule.judge(tree, np.array(tokens), logits)
        self.verdict = tokens, accepted, likelihood
        return longest(tree, accepted & self._followed, likelihood)


def collect_probe(
    setup: Setup,
    prompts: Sequence[Prompt],
    *,
    tree: Tree,
    policy: Tree,
    batch_size: int = 16,
    meta: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda answers: None,
) -> Probe:
    """Answer every prompt with the ``policy`` tree while the larger probe ``tree`` is verified in the same passes.

    The setup's rule must be `Typical`. ``progress`` is called with the number of answers that ended.
    """
    if len(tree) < 2 or not set(policy.paths) <= set(tree.paths):
        raise InvalidInput(
            "A probe tree must have guesses, and all nodes of the policy among them: add the policy's nodes to it."
        )
    assert isinstance(setup.acceptance, Typical), "only typical acceptance is probed"
    rule, stop = setup.acceptance, setup.stop
    probing, asked = Probing(rule, tree, policy), [prompt.text for prompt in prompts]
    decoder = Decoder(replace(setup, acceptance=probing))
    decoder.prepare(asked, [tree], batch_size)
    texts: list[list[int]] = [[] for _ in prompts]
    steps: list[list[Step]] = [[] for _ in prompts]
    ended = 0
    for one in decoder.answer(asked, tree, batch_size):
        verdicts = () if one.reads_prompt else zip(*probing.verdict, strict=True)
        for i, (tokens, accepted, likelihood) in zip(one.emitted, verdicts, strict=False):
            room = min(stop.max_new_tokens, setup.target.context - len(asked[i])) - len(texts[i])
            ends = ends_of(tree, accepted, tokens, texts[i], stop, room)
            steps[i].append((accepted, ends, likelihood[1:][accepted[1:]]))
        for i, emitted in one.emitted.items():
            texts[i] += emitted
        progress(len(decoder.finished) - ended)
        ended = len(decoder.finished)
    rows = sorted(decoder.finished, key=lambda row: row.id)
    flat = [step for answer in steps for step in answer]
    groups = list(dict.fromkeys(prompt.group for prompt in prompts))
    return Probe(
        tree=tree,
        policy=policy,
        accepted=np.array([accepted for accepted, _, _ in flat], dtype=bool).reshape(-1, len(tree)),
        ends=np.array([ends for _, ends, _ in flat], dtype=bool).reshape(-1, len(tree)),
        log_likelihood=np.concatenate([np.zeros(0, np.float32), *(likelihood for _, _, likelihood in flat)]),
        starts=np.cumsum([0, *map(len, steps)]),
        lengths=np.array(list(map(len, texts))),
        prompt_tokens=np.array(list(map(len, asked))),
        end=np.array([row.end for row in rows]),
        group=np.array([groups.index(prompt.group) for prompt in prompts]),
        cluster=np.array([prompt.cluster for prompt in prompts]),
        meta={
            "acceptance": rule.record,
            "eos_ids": sorted(stop.eos_ids),
            "max_new_tokens": stop.max_new_tokens,
            "prompt_sha256": [prompt.id for prompt in prompts],
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
        watch.take(recent)
        path = np.flatnonzero(tree.mask[tip])[1:]
        taken = watch.take(tokens[node] for node in path.tolist())
        if watch.reason is not None:
            found[path[len(taken) - 1]] = True
    return found
