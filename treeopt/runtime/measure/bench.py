"""Benchmark: whole answers decoded with every contender, interleaved, whatever decodes.

A block of prompts is decoded by all contenders one after the other, in random order; a block in one
round is a block of the benchmark's journal. Of a rule that changes the text its price is measured too: how likely the target
itself finds the text, and how much of it changed.

A answers
"""

import difflib
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treeopt.files.journal import Journal
from treeopt.files.storage import typed
from treeopt.records.benchmark import AS_IT_COMES, LOOKS, loses_by_far
from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.contender import Quality
from treeopt.runtime.decode import Setup
from treeopt.runtime.drafters.states import states_at_once
from treeopt.runtime.measure.ranks import Prompt, read_answers
from treeopt.runtime.stepper import BlockRun, Prompts
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft


@dataclass(frozen=True, kw_only=True)
class BlockVisit:
    """A block of prompts in one round, by their places, and what every contender that was not stopped decoded of it."""

    round: int
    prompts: list[int]
    runs: dict[str, BlockRun]


def blocks_of(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Places of the prompts that are decoded together: of one group, whole conversations.

    Only steps with all rows live are timed, so a block is long enough to refill them.
    """
    wanted = 1 if batch_size == 1 else 2 * batch_size
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].group)
    blocks: list[list[int]] = []
    for (group, _), turns in itertools.groupby(order, key=lambda i: (prompts[i].group, prompts[i].cluster)):
        if blocks and len(blocks[-1]) < wanted and prompts[blocks[-1][0]].group == group:
            blocks[-1].extend(turns)
        else:
            blocks.append(list(turns))
    return blocks


def decode_contenders(
    decode: Callable[[str, Prompts], BlockRun],
    prompts: Sequence[Prompt],
    contenders: Mapping[str, Draft],
    *,
    batch_size: int,
    rounds: int,
    journal: Journal | None = None,
    progress: Callable[[int], None] = lambda answers: None,
    renew: Callable[[], None] = lambda: None,
) -> list[BlockVisit]:
    """Decode all prompts with every contender in every round, but for those that stop since they lose by far (`slower`).

    decode     : decodes some prompts with a contender, by its name
    contenders : the draft of each; one with the chosen draft is no slower, whatever the clock says
    journal    : visits of an earlier run of the same benchmark, and where every new one goes
    renew      : launches what decodes anew, before every round

    ``progress`` is called with the number of answers of every visit.
    """
    visits = [typed(BlockVisit, block, journal.folder) for block in journal.documents()] if journal else []
    began = len(visits)
    blocks = [[(i, prompts[i].tokens) for i in block] for block in blocks_of(prompts, batch_size)]
    mixed = np.random.default_rng(0).permutation(len(blocks)).tolist()  # the first of them are of all groups
    order = list(itertools.product(range(rounds), mixed))
    looks = {len(order) // part for part in LOOKS}
    for visit in visits:
        progress(len(visit.prompts) * len(contenders))
    going = list(contenders)
    for n, (round_, b) in enumerate(order):
        if n in looks:
            lost = slower(visits[:n])
            going = [name for name in going if name not in lost or contenders[name] == contenders["chosen"]]
        if n < len(visits):
            continue
        if n == began or n % len(blocks) == 0:
            renew()
            for name in going:  # warm up
                decode(name, blocks[b])
        turns = np.random.default_rng([0, round_, b]).permutation(going).tolist()
        runs = {name: decode(name, blocks[b]) for name in turns}
        progress(len(blocks[b]) * len(contenders))
        visits.append(BlockVisit(round=round_, prompts=[i for i, _ in blocks[b]], runs=runs))
        if journal:
            journal.append(asdict(visits[-1]))
    return visits


def slower(visits: Sequence[BlockVisit]) -> set[str]:
    """Contenders that are shown to be slower than the chosen tree by what was decoded; never plain decoding."""
    totals: dict[str, dict[tuple[int, ...], NDArray[np.float64]]] = defaultdict(dict)
    for visit in visits:
        block = tuple(visit.prompts)
        for name, run in visit.runs.items():
            totals[name][block] = totals[name].get(block, 0.0) + np.array([run.tokens, run.decode_s])
    ours = totals.pop("chosen", {})
    rivals = {
        name: rows for name, rows in totals.items() if name not in ("plain", AS_IT_COMES) and rows.keys() == ours.keys()
    }
    return {name for name, rows in rivals.items() if loses_by_far([[*rows[block], *ours[block]] for block in ours])}


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
        found[f"{name}log_likelihood_nats_per_token"] = float(sums.sum() / lengths.sum())
        found[f"{name}log_likelihood_nats_per_token_stderr"] = stderr(samples[-1], draws.shape[1])
    pairs = [(list(text), list(other)) for text, other in zip(texts, reference, strict=True)]
    matchers = [difflib.SequenceMatcher(None, text, other, autojunk=False) for text, other in pairs]
    same = sum(block.size for matcher in matchers for block in matcher.get_matching_blocks())
    return Quality(
        answers=len(prompts),
        difference_nats_per_token_stderr=stderr(samples[0] - samples[1], draws.shape[1]),
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
