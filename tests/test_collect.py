"""Calibration: conversations turn by turn, given answers, groups; whole conversations stay together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.growth.heldout import folds
from treeopt.growth.rates import rates_by_group
from treeopt.growth.source import source_of
from treeopt.pipeline.contest import blocks_of
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.contender import Prompt
from treeopt.records.trace import End, RankTrace
from treeopt.runtime.decode import decode
from treeopt.runtime.measure.ranks import collect_trace, turn_prompts
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.trees.shapes import Limits

from .conftest import asked, random_trace

TURNS = [["abc", "de"], ["x"], ["pq", "r", "stu"], ["longer", "k"]]


def conversations(turns=TURNS, answers=(), groups="aabb"):
    """Conversations of several turns in the alphabet of the tiny tokenizer."""
    plain = asked([])
    firsts = [plain.encoder.first_prompt([("user", turn) for turn in t]) for t in turns]
    made = [
        Conversation(first, tuple(("user", turn) for turn in t), tuple(a), g, row)
        for row, (first, t, a, g) in enumerate(
            zip(firsts, turns, answers or [()] * len(turns), groups, strict=False), 1
        )
    ]
    return PromptSet(tuple(made), plain.name, plain.fingerprint, plain.encoder)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_turns_are_answered_after_the_answers_before_them(target, heads, batch_size):
    prompts, stop = conversations(), StopRule(target.eos_ids, 7)
    trace = collect_trace(Setup(target, heads, stop), prompts, batch_size=batch_size)
    assert trace.clusters.tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert [trace.group_names[g] for g in trace.group] == list("aaabbbbb")
    answers = [a.tolist() for a in np.split(trace.tokens, trace.starts[1:-1])]
    s = 0
    for conversation in prompts.conversations:  # by hand, one at a time
        tokens = list(conversation.first)
        for turn in range(conversation.num_turns):
            if turn:
                said = answers[s - 1][:-1] if answers[s - 1][-1] in target.eos_ids else answers[s - 1]
                text = "\n\n" + conversation.turns[turn]
                tokens += said + list(prompts.encoder.encode(text))
            (row,) = decode(target, None, [tokens], batch_size=1, stop=stop)
            assert row.tokens == answers[s]
            assert turn_prompts(prompts, trace)[s].text == tuple(tokens)
            s += 1


def test_a_turn_without_room_ends_its_conversation_and_is_listed(target, heads):
    prompts = conversations([["a" * 60, "b" * 40, "c"], ["x", "y"]])
    trace = collect_trace(Setup(target, heads, StopRule(frozenset(), 9)), prompts, batch_size=2)
    assert trace.clusters.tolist() == [0, 1, 1]
    assert trace.meta["skipped"] == [{"row": 1, "reason": "the context has no room for turn 2"}]


@given(limit=st.sampled_from([1, 2, 9]), batch_size=st.integers(1, 4))
def test_reading_the_targets_own_answers_gives_the_trace_of_writing_them(target, heads, limit, batch_size):
    """Teacher forcing is exact for answers that the target itself wrote; it is the first choice everywhere."""
    stop = StopRule(target.eos_ids, limit)
    prompts = conversations()
    written = collect_trace(Setup(target, heads, stop), prompts, batch_size=2)
    answers = iter([a.tolist() for a in np.split(written.tokens, written.starts[1:-1])])

    class Given(PromptSet):
        def given_answer(self, conversation, turn):
            return said[conversation.row][turn]

    said = {c.row: [tuple(next(answers)) for _ in range(c.num_turns)] for c in prompts.conversations}
    again = Given(prompts.conversations, "", "", prompts.encoder)
    read = collect_trace(Setup(target, heads, stop), again, batch_size=batch_size, given=True)
    for name in ("ranks", "starts", "tokens", "end", "cluster", "group", "prompt_tokens"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
    assert (read.target_rank == 0).all()


def test_given_answers_end_by_eos_and_keep_the_targets_rank(target, heads):
    prompts = conversations([["abc"], ["d"]], [("hello",), ("z" * 40,)])
    stop = StopRule(target.eos_ids, 20, at_loops=False)
    trace = collect_trace(Setup(target, heads, stop), prompts, batch_size=2, given=True)
    assert trace.lengths.tolist() == [6, 20]
    assert trace.end.tolist() == [End.EOS, End.LIMIT]
    # By hand: the rank of every token among the model's own logits.
    text = [*prompts.conversations[0].first, *trace.tokens[:6].tolist()]
    logits = target.model(torch.tensor([text])).logits[0]
    start = len(prompts.conversations[0].first)
    for t in range(6):
        order = sorted(range(logits.shape[1]), key=lambda i: (-logits[start - 1 + t, i].item(), i))
        rank = order.index(text[start + t])
        assert trace.target_rank[t] == (rank if rank < trace.top_k else -1)


def clustered(rng, sizes):
    trace = random_trace(rng, [6] * sum(sizes), 3, 4)
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    names = {"group_names": ["even", "odd"]}
    return RankTrace(
        trace.ranks, trace.starts, end=trace.end, cluster=cluster, group=cluster % 2, meta={**trace.meta, **names}
    )


def test_folds_never_part_a_conversation():
    trace = clustered(np.random.default_rng(0), [1, 3, 2, 4, 1, 2, 2])
    seen = []
    for train, test in folds(trace):
        assert not set(trace.clusters[train]) & set(trace.clusters[test])
        seen += test.tolist()
    assert sorted(seen) == list(range(trace.num_sequences))


def test_groups_add_up_to_the_whole():
    trace = clustered(np.random.default_rng(1), [2, 1, 3, 1, 2, 2])
    calibration = Calibration.from_trace(trace)
    groups = calibration.meta["groups"]
    assert (sum(g["hits"] for g in groups.values()) == calibration.hits).all()
    assert (sum(g["trials"] for g in groups.values()) == calibration.trials).all()
    held_out = source_of(trace).crossfit(Limits(6))
    rates = rates_by_group(held_out.every[5], trace)
    even = trace.clusters % 2 == 0
    tokens, steps = (trace.lengths - 1)[even].sum(), held_out.every[5].steps[::2].sum()
    assert rates["even"] == pytest.approx(tokens / steps)


@given(st.integers(1, 4), st.integers(0, 2**32))
def test_blocks_hold_whole_conversations_of_one_group(batch_size, seed):
    rng = np.random.default_rng(seed)
    prompts = [Prompt((1,), "", "ab"[c % 2], c) for c in range(9) for _ in range(rng.integers(1, 4))]
    blocks = blocks_of(prompts, batch_size)
    assert sorted(i for block in blocks for i in block) == list(range(len(prompts)))
    where = [{prompts[i].cluster for i in block} for block in blocks]
    assert sum(map(len, where)) == 9
    assert all(len({prompts[i].group for i in block}) == 1 for block in blocks)


def test_speedups_of_groups_are_of_their_own_blocks(tmp_path):
    from .test_damage import save_bench

    save_bench(tmp_path / "b.json")
    bench = Benchmark.load(tmp_path / "b.json")
    assert bench.groups == ["a"]
    assert bench.contender("chosen").rate_of("a") == 1.0
    assert bench.speedup("chosen", group="b") is None
    assert bench.speedup("chosen", group="a").value == pytest.approx(1.0)
