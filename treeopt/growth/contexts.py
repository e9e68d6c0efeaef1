"""Context as a group: the answers of a trace, cut wherever the context doubles.

The context of a step is the prompt and what was emitted before. Acceptance changes with it, and so does the latency of a step.
"""

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.records.trace import NO_TRIAL, RankTrace


def context_name(tokens: int) -> str:
    """The bucket of a context, by powers of two.

    >>> context_name(1), context_name(700)
    ('1 token', '512 to 1,023 tokens')
    """
    low = 1 << max(tokens.bit_length() - 1, 0)
    return f"{low:,} to {2 * low - 1:,} tokens" if low > 1 else "1 token"


def by_context(trace: RankTrace) -> RankTrace:
    """The parts of each sequence that lie in one bucket of context, as sequences whose groups are the buckets.

    What one conversation has in one bucket is a conversation there. Guesses beyond the end of a part are no trials, and
    dynamic trees are not told. Raises OutOfRange where the lengths of prompts are not known.

    >>> trace = RankTrace(np.zeros((4, 1), np.int16), np.array([0, 4]), prompt_tokens=np.array([6]))
    >>> parts = by_context(trace)
    >>> parts.group_names, parts.starts.tolist(), parts.ranks.ravel().tolist()
    (['4 to 7 tokens', '8 to 15 tokens'], [0, 3, 5], [0, 0, -2, 0, -2])
    """
    if trace.prompt_tokens is None:
        raise OutOfRange(
            "Context is known where the trace has the lengths of prompts, but it has none: calibrate anew."
        )
    rows, parts = [], []  # states; sequence, bucket and context at the first state
    for s, (start, stop) in enumerate(zip(trace.starts, trace.starts[1:], strict=False)):
        contexts = int(trace.prompt_tokens[s]) + np.arange(stop - start)
        buckets = np.log2(np.maximum(contexts, 1)).astype(int)
        for bucket in np.unique(buckets[: max(1, len(buckets) - 1)]).tolist():
            first = int(np.searchsorted(buckets, bucket))
            after = min(int(np.searchsorted(buckets, bucket, side="right")) + 1, len(buckets))
            rows.append(
                start + np.arange(first, after)
            )  # its last state is the first of the next part: each token is decoded once
            parts.append((s, bucket, contexts[first]))
    sequence, bucket, context = np.array(parts).T
    lengths = np.array([len(part) for part in rows])
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())
    ended = np.arange(1, trace.num_heads + 1) >= left[:, None]  # (P, K) the guess lies beyond the part
    known, group = np.unique(bucket, return_inverse=True)
    meta = {name: value for name, value in trace.meta.items() if name not in ("prompt_sha256", "pools", "marginals")}
    meta |= {"group_names": [context_name(1 << int(exponent)) for exponent in known], "top_k": trace.top_k}
    return RankTrace(
        ranks=np.where(ended, NO_TRIAL, trace.ranks[np.concatenate(rows)]).astype(np.int16),
        starts=np.append(0, np.cumsum(lengths)),
        prompt_tokens=context,
        group=group.astype(np.int16),
        cluster=trace.clusters[sequence] * len(known) + group,
        meta=meta,
    )
