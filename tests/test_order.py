"""The order in which prompts are asked: by a seed, every group spread evenly, whatever the order in the file."""

import json
import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.pipeline.bench import held_out
from treeopt.pipeline.calibrate import first_conversations
from treeopt.pipeline.session import resolve
from treeopt.records.options import Source
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.runtime.prompts.order import Draw, Order, order_of, spread
from treeopt.runtime.prompts.sets import Conversation, PromptSet, load_prompts
from treeopt.runtime.session import open_rule

from .conftest import in_new_python
from .helpers.prompt_files import PLAIN, load

CATEGORIES = [f"category {i}" for i in range(13)]
SORTED = [{"prompt": f"{name}, question {i}", "kind": name} for name in CATEGORIES for i in range(20)]


@dataclass
class FakeSession:
    """As much of a session as choosing prompts needs."""

    prompts: PromptSet


def trace_of(conversations):
    """A trace of one guess a conversation."""
    names = sorted({c.group for c in conversations})
    meta = {"prompt_sha256": [c.sha256 for c in conversations], "group_names": names}
    group = np.array([names.index(c.group) for c in conversations])
    return RankTrace(np.tile([[0], [-2]], (len(group), 1)), np.arange(0, 2 * len(group) + 1, 2), group=group, meta=meta)


@pytest.mark.parametrize("grouped", [True, False])
def test_calibration_and_bench_take_of_every_category_its_share(tmp_path, grouped):
    """In file order 96 of 260 prompts are of 5 categories, and the 24 for bench of two others."""
    prompts = load(tmp_path, SORTED, group_by="kind" if grouped else None, order=Order(0))
    session, run = FakeSession(prompts), RunDirectory(tmp_path / "run")
    calibrated = first_conversations(session, 96)
    rest = held_out(run, session, trace_of(calibrated), 24)
    for found in (calibrated, rest):
        share = len(found) / 13
        counts = Counter(SORTED[c.row - 1]["kind"] for c in found)
        if grouped:
            assert set(counts) == set(CATEGORIES)
            assert all(abs(n - share) <= 2 for n in counts.values())
        else:  # a random 24 of 13 categories are of fewer than 8 about once in 10,000 times
            assert len(counts) >= 8
    assert not {c.sha256 for c in calibrated} & {c.sha256 for c in rest}


@given(
    groups=st.lists(st.integers(0, 5), min_size=1, max_size=80), seed=st.integers(0, 99), cut=st.floats(0, 1), end=st.floats(0, 1)
)  # fmt: skip
def test_any_stretch_of_the_order_has_of_every_group_its_share(groups, seed, cut, end):
    order = spread([str(group) for group in groups], seed)
    assert sorted(order) == list(range(len(groups)))
    found = [groups[i] for i in order]
    begin, stop = sorted((int(cut * len(found)), int(end * len(found))))
    part, whole = Counter(found[begin:stop]), Counter(found)
    for group, n in whole.items():
        others = len(whole) - 1  # each may be a conversation ahead at either end
        assert abs(part[group] - n * (stop - begin) / len(found)) <= 2 + 2 * others * n / len(found)


@given(order=st.permutations(range(12)), most=st.integers(1, 14), seed=st.integers(-3, 3))
def test_a_draw_is_a_beginning_of_one_order_however_rows_come(order, most, seed):
    whole, drawn = Draw(Order(seed, 100)), Draw(Order(seed, most))
    for i in range(12):
        whole.add(str(i), i)
    for i in (*order, *order[::-1]):
        drawn.add(str(i), i)
    assert drawn.things() == whole.things()[:most]


def test_the_order_follows_from_texts_and_seed_alone(tmp_path):
    shuffled = random.Random(5).sample(SORTED, len(SORTED))
    orders = [
        [c.turns for c in load(tmp_path, rows, group_by="kind", order=Order(seed)).conversations]
        for rows, seed in ((SORTED, 0), (shuffled, 0), (SORTED, 1))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert [c.row for c in load(tmp_path, SORTED, group_by="kind").conversations] == [*range(1, 261)]  # as they stand


def test_one_seed_is_for_the_order_and_for_the_rule_where_that_draws():
    assert order_of(Source()).seed == 0
    assert order_of(Source(seed=4)).seed == 4
    assert order_of(Source(seed=4, in_order=True)).seed is None
    assert open_rule(Source(rule="greedy", seed=4)).record == open_rule(Source()).record
    assert open_rule(Source(rule="sample", seed=4)).record["seed"] == 4
    assert "seed" not in open_rule(Source(rule="typical", seed=4)).record


def test_later_commands_go_on_in_the_order_of_the_run(tmp_path):
    """Nobody's code is trusted because a file says so, and what is no option is none."""
    run = RunDirectory(tmp_path)
    source = {"model": "m", "seed": 7, "in_order": True, "rule": "sample:top_k=3"}
    strange = {"trust_remote_code": True, "engine_python": "/x", "bogus": "1", "dtype": 3}
    trace = trace_of([Conversation((1,), (("user", "a"),))])
    replace(trace, meta={**trace.meta, "source": {**source, **strange}}).save(run.trace)
    assert resolve(run, Source()).given == source
    assert resolve(run, Source(rule="typical")).given == {**source, "rule": "typical"}


@pytest.mark.parametrize("grouped", [True, False])
def test_prompts_of_bench_stand_for_all_that_are_left_of_a_file_in_order(tmp_path, grouped):
    """Of 13 categories, one behind the other in the file; the first 26 of those left would be of two of them."""
    prompts = load(tmp_path, SORTED, group_by="kind" if grouped else None)
    trace = trace_of(prompts.conversations[::20])
    found = held_out(RunDirectory(tmp_path), FakeSession(prompts), trace, 26)
    assert set(Counter(SORTED[c.row - 1]["kind"] for c in found).values()) == {2}


def rows_of(path, n):
    with path.open("w") as stream:
        for i in range(n):
            print(json.dumps({"prompt": f"{i} " + "x" * 200, "kind": i % 3}), file=stream)
    return path


def test_no_more_conversations_are_held_than_are_drawn(tmp_path):
    """Half of the rows are broken, and only some of them are listed."""
    path = rows_of(tmp_path / "many.jsonl", 1100)
    with path.open("a") as stream:
        stream.write("{\n" * 1100)
    few = load_prompts(PLAIN, str(path), group_by="kind", order=Order(0, 50))
    whole = load_prompts(PLAIN, str(path), order=Order(0))
    assert len(few.conversations) == 50
    assert {c.row for c in few.conversations} == {c.row for c in whole.conversations[:50]}
    assert (few.n_skipped, len(few.skipped), few.skipped[0].row) == (1100, 1000, 1101)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_a_million_rows_are_not_held(tmp_path, kind):
    """A file of 220 MB is read in less than a quarter of that."""
    path = rows_of(tmp_path / "many.jsonl", 10**6)
    if kind == "csv":
        path.write_text("prompt\n" + "".join(f"{i} {'x' * 200}\n" for i in range(10**6)))
    path = path.rename(tmp_path / f"many.{kind}")
    code = (
        "import resource, sys; from tests.helpers.prompt_files import PLAIN, load_prompts; "
        "from treeopt.runtime.prompts.order import Order\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); prompts = load_prompts(PLAIN, sys.argv[1], order=Order(0, 1000))\n"
        "print(len(prompts.conversations), peak() - before)"
    )
    said = in_new_python(code, path)
    n, kilobytes = map(int, said.split())
    assert n == 1000
    assert kilobytes < 50_000
