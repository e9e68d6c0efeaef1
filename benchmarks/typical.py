"""What typical acceptance gains and costs, for several epsilon: `python benchmarks/typical.py [--prompts N ...]`.

On the demo model, with trees of one size. The trees are chosen on some prompts: by greedy acceptance (from ranks alone),
and by probing in two rounds, the first under the greedy tree, the second under the tree that the first chose. Others
are decoded with both under the rule: tokens per step, and how likely the target itself finds the text beside its own
greedy text. delta is the square root of epsilon, as in Medusa. Errors are standard errors over conversations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treeopt.files.provenance import machine
from treeopt.growth.grow import grow
from treeopt.growth.probed import grow_coverage, probe_tree
from treeopt.growth.source import source_of
from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.calibration import Calibration
from treeopt.records.options import Source
from treeopt.runtime.acceptance.rules import Typical
from treeopt.runtime.decode import decode
from treeopt.runtime.measure.probe import collect_probe
from treeopt.runtime.measure.quality import measure_quality
from treeopt.runtime.measure.ranks import collect_trace, turn_prompts
from treeopt.runtime.session import Session, open_session
from treeopt.runtime.setup import AnswerRow
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

EPSILONS = (0.01, 0.02, 0.05, 0.09, 0.15, 0.25)
SHAPE = "sibling-closed"
COLUMNS = (
    "epsilon",
    "greedy tree",
    "predicted, round 1",
    "predicted, round 2",
    "measured",
    "nats per token",
    "against greedy text",
    "tokens changed %",
    "answers changed %",
)


def tokens_per_step(rows: Sequence[AnswerRow], conversations: Sequence[int]) -> tuple[float, float]:
    """Measured, and its standard error."""
    which = np.unique(conversations, return_inverse=True)[1]
    tokens = np.bincount(which, [len(row.tokens) - 1 for row in rows])
    steps = np.bincount(which, [row.steps for row in rows])
    samples = drawn_rates(tokens, steps, conversation_draws(len(steps)))
    return float(tokens.sum() / steps.sum()), stderr(samples, len(steps))


def sweep(
    session: Session,
    epsilons: Sequence[float] = EPSILONS,
    *,
    num_prompts: int = 60,
    size: int = 32,
    probe_size: int = 128,
    max_new_tokens: int = 64,
    batch_size: int = 4,
) -> Iterator[dict[str, Any]]:
    """A row of figures for every epsilon; half of the prompts choose the trees, the others are decoded with them."""
    setup = session.setup(max_new_tokens)
    target, drafter, stop = setup.target, setup.drafter, setup.stop
    conversations = session.prompts.conversations[: 2 * num_prompts]
    halves = [replace(session.prompts, conversations=conversations[i::2]) for i in (0, 1)]
    traces = [collect_trace(setup, half) for half in halves]
    asked, others = (turn_prompts(half, trace) for half, trace in zip(halves, traces, strict=True))
    greedy_tree = grow(traces[0], Limits(size, shape=SHAPE)).tree(size)
    prompts, of = [prompt.tokens for prompt in others], [prompt.cluster for prompt in others]

    def measured(tree: Tree, rule: Typical) -> list[AnswerRow]:
        return decode(target, drafter, prompts, tree, batch_size=batch_size, stop=stop, acceptance=rule)

    for epsilon in epsilons:
        rule, policy, predicted = Typical(epsilon=epsilon), greedy_tree, []
        for _ in range(2):
            probe = collect_probe(
                replace(setup, acceptance=rule),
                asked,
                policy=policy,
                batch_size=batch_size,
                tree=probe_tree(Calibration.from_trace(traces[0]), size=probe_size, policy=policy),
            )
            rates = source_of(probe).crossfit(Limits(size, shape=SHAPE)).rates(size)
            predicted.append((rates.tokens_per_step, rates.estimate.stderr))
            policy = grow_coverage(probe, Limits(size, shape=SHAPE)).tree(size)
        rows = measured(policy, rule)
        quality = measure_quality(target, prompts, [row.tokens for row in rows], traces[1].texts, conversations=of)
        yield {
            "epsilon": epsilon,
            "predicted": predicted,
            "greedy_tree": tokens_per_step(measured(greedy_tree, rule), of),
            "probed_tree": tokens_per_step(rows, of),
            **vars(quality),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=60, help="To choose the trees on; as many others are decoded.")
    parser.add_argument("--size", type=int, default=32, help="Rows of the trees, root included.")
    parser.add_argument("--probe-size", type=int, default=128, help="Rows of the probe tree.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    print(
        f"Demo model, {options.dtype}, trees of {options.size} rows, {options.prompts} prompts to choose them on and "
        f"as many others decoded, {options.max_new_tokens} tokens each, {machine()}.\n"
    )
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for row in sweep(
        open_session(Source(dtype=options.dtype)),
        num_prompts=options.prompts,
        size=options.size,
        probe_size=options.probe_size,
        max_new_tokens=options.max_new_tokens,
    ):
        rates = [row["greedy_tree"], *row["predicted"], row["probed_tree"]]
        keys = ("log_likelihood_nats_per_token", "difference_nats_per_token")
        nats = [(row[key].value, row[key].stderr) for key in keys]
        cells = [f"{value:.3f} ± {error:.3f}" for value, error in (*rates, *nats)]
        shares = [f"{100 * row[key]:.0f}" for key in ("changed_tokens_share", "changed_answers_share")]
        print("| " + " | ".join([f"{row['epsilon']}", *cells, *shares]) + " |", flush=True)


if __name__ == "__main__":
    main()
