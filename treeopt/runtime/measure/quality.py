"""What a rule that changes the text costs: how likely the target finds the text, and how much of it changed. And near ties.

A answers
"""

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.contender import Quality
from treeopt.records.estimate import Estimate
from treeopt.runtime.drafters.states import states_at_once
from treeopt.runtime.measure.ranks import read_answers
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target


@torch.inference_mode()
def logit_gap(
    target: Target, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], at: int
) -> float | None:
    """How far apart the target's logits of the two answers' tokens are at their first difference.

    A tiny gap is a tie broken otherwise by rounding; None where one answer merely ended.
    """
    if at >= min(len(ours), len(theirs)):
        return None
    hidden = target.read([[*prompt, *theirs[:at]]])
    logits = target.scored(hidden[0, -1]).float()
    return float((logits[theirs[at]] - logits[ours[at]]).abs())


def measure_quality(
    target: Target,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    *,
    conversations: Sequence[int] | None = None,
    batch_size: int = 16,
) -> Quality:
    """How likely texts are to the target itself, and how far they are from the ``reference``: its own greedy ones.

    Log-likelihoods are those of the target at temperature 1, per token, in nats; standard errors over conversations
    (by default every answer is one). The tokens changed are those outside the matching blocks that
    `difflib.SequenceMatcher` finds, as a share of the tokens of both texts; answers changed are those that differ at all.
    """
    cluster = np.unique(range(len(prompts)) if conversations is None else conversations, return_inverse=True)[1]
    found: dict[str, Any] = {}
    draws = conversation_draws(int(cluster.max()) + 1)
    samples = []
    for name, answers in (("", texts), ("reference_", reference)):
        sums = np.bincount(cluster, log_likelihoods(target, prompts, answers, batch_size=batch_size))
        lengths = np.bincount(cluster, [len(answer) for answer in answers])
        samples.append(drawn_rates(sums, lengths, draws))
        found[f"{name}tokens"] = int(lengths.sum())
        error = stderr(samples[-1], draws.shape[1])
        found[f"{name}log_likelihood_nats_per_token"] = Estimate(float(sums.sum() / lengths.sum()), error)
    pairs = [(list(text), list(other)) for text, other in zip(texts, reference, strict=True)]
    matchers = [difflib.SequenceMatcher(None, text, other, autojunk=False) for text, other in pairs]
    same = sum(block.size for matcher in matchers for block in matcher.get_matching_blocks())
    return Quality(
        answers=len(prompts),
        difference_nats_per_token=Estimate(0.0, stderr(samples[0] - samples[1], draws.shape[1])),
        changed_tokens_share=1 - 2 * same / sum(len(text) + len(other) for text, other in pairs),
        changed_answers_share=float(np.mean([text != other for text, other in pairs])),
        **found,
    )


@torch.inference_mode()
def log_likelihoods(
    target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, batch_size: int
) -> NDArray[np.float64]:
    """(A,) log-likelihood of every answer after its prompt, in nats: one pass of the target over each."""
    found, at_once = np.zeros(len(prompts)), states_at_once(target.vocab_size)
    # The answers ended where they end: nothing is cut here.
    whole = Setup(target, None, StopRule(frozenset(), 1 + max(map(len, answers)), at_loops=False))
    for row in read_answers(whole, prompts, answers, batch_size=batch_size):
        hidden = row.text().hidden
        said = torch.tensor(row.tokens, device=hidden.device)
        for states, tokens in zip(hidden.split(at_once), said.split(at_once), strict=True):
            log_p = target.scored(states).float().log_softmax(-1)
            found[row.id] += float(log_p.gather(1, tokens[:, None]).double().sum())
    return found
