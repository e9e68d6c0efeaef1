"""Settings of drafters that copy text: what is chosen, against every setting replayed by a reference, and what steps cost."""

import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeopt
from tests.helpers.steps import search
from treeopt.engines.copied import KIND
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.rates import Rates
from treeopt.latency.costs import StepCosts
from treeopt.pipeline import copied
from treeopt.pipeline.logged import some_requests
from treeopt.pipeline.profile.untimed import profile_from_file
from treeopt.planning.planner import costs_of
from treeopt.planning.request import PlanRequest
from treeopt.planning.table import Candidate, mean_ms
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.report.plan_verdict import best_speculation
from treeopt.text.engines import KINDS, text_drafter
from treeopt.text.settings import fits, sought, usual
from treeopt.trees.draft import COPIED, CopiedText
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Cost

from .helpers import slow_text
from .helpers.engine_rows import export

METHOD = {"engine": "transformers", "method": "prompt-lookup"}


def log_of(conversations: int = 24, groups: tuple[str, ...] = ()) -> RequestLog:
    """Two requests for each conversation, whose answers copy parts of their prompts, with tokens of their own between."""
    rng = random.Random(0)
    tokens, starts, prompts, cluster = [], [0], [], []
    for number in range(2 * conversations):
        prompt = [rng.randrange(200) for _ in range(rng.randrange(20, 60))]
        answer = []
        while len(answer) < 40:
            at = rng.randrange(len(prompt))
            answer += [*prompt[at : at + rng.randrange(1, 12)], 200 + rng.randrange(50)]
        tokens += prompt + answer
        starts.append(len(tokens))
        prompts.append(len(prompt))
        cluster.append(number // 2)
    meta = {"group_names": list(groups)} if groups else {}
    group = np.arange(2 * conversations) // 2 % len(groups) if groups else None
    return RequestLog(np.array(tokens), np.array(starts), np.array(prompts), group, np.array(cluster), meta=meta)


def profile_of(row_ms: float, batch_sizes=(1, 4), rows: int = 24) -> LatencyProfile:
    """Steps of 10 ms, and so much more for each row more."""
    points = [
        StepTiming(b, 64, n, 1 if n > 1 else 0, (10 + row_ms * (n - 1),) * 4)
        for b in batch_sizes
        for n in range(2, rows)
    ]
    return LatencyProfile(tuple(points), tuple(StepTiming(b, 64, 1, 0, (10.0,) * 4) for b in batch_sizes))


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    log_of().save(tmp_path / "requests.npz")
    return RunDirectory(tmp_path)


def by_reference(log: RequestLog, half: int, length: int, longest: int) -> float:
    """Tokens per step of transformers' rule on one half of the conversations, step by step and by the slow rule."""
    steps = tokens = 0
    of = copied.halves(log)
    for request, conversation in zip(log.requests(), log.clusters.tolist(), strict=True):
        at = 1
        while of[conversation] == half and at < len(request.answer):
            draft = slow_text.transformers([*request.prompt, *request.answer[:at]], length, longest, 1, 10**6, -1)
            accepted = 0
            while (
                accepted < min(len(draft), len(request.answer) - at)
                and draft[accepted] == request.answer[at + accepted]
            ):
                accepted += 1
            emitted = min(accepted + 1, len(request.answer) - at)
            steps, tokens, at = steps + 1, tokens + emitted, at + emitted
    return tokens / steps


def chosen_of(entry) -> tuple[int, int]:
    """Length and longest match of a setting of transformers."""
    options = entry.draft.options
    return options["prompt_lookup_num_tokens"], options["max_matching_ngram_size"]


def test_what_is_chosen_emits_what_the_reference_does_on_conversations_that_it_was_not_sought_on(run):
    plan = search(run, **METHOD)
    entry, log = plan.entries[0], RequestLog.load(run.requests)
    chosen = chosen_of(entry)
    assert entry.chosen.tokens_per_step == pytest.approx(by_reference(log, 1, *chosen))
    every = product(*KINDS["transformers:prompt-lookup"].grid.values())
    rates = {setting: by_reference(log, 0, *setting) for setting in every}
    assert rates[chosen] >= 0.99 * max(rates.values())
    assert Plan.load(run.plan) == plan


@pytest.mark.parametrize("row_ms", [0.0, 0.3, 30.0])
def test_dear_rows_are_verified_less_and_at_last_not_at_all(run, row_ms):
    profile_of(row_ms).save(run.profile)
    plan = search(run, **METHOD)
    for entry in plan.entries:
        figure = entry.chosen
        assert not any("No profile" in said for said in entry.warnings)
        if row_ms == 30.0:
            assert not entry.speculates
            best = best_speculation(entry)
            assert best.speedup < 1
            assert best in entry.others.values()
            continue
        expected = figure.tokens_per_step / (1 + row_ms / 10 * (figure.rows_per_step - 1))
        assert figure.speedup == pytest.approx(expected, rel=0.02)
        assert figure.speedup >= 0.995 * entry.others["usual"].speedup
        assert figure.speedup.low <= figure.speedup <= figure.speedup.high


README_STEPS = "batch_size,size,step_ms\n1,1,8.9\n1,4,11.1\n32,1,15.3\n32,4,30.9\n"
DEEP_STEPS = "batch_size,size,depth,step_ms\n1,1,,9\n1,2,1,9.5\n1,18,1,12\n1,64,4,20\n"


@pytest.mark.parametrize(("steps", "most_rows"), [(README_STEPS, 4), (DEEP_STEPS, 64)], ids=["readme", "deep"])
def test_steps_of_any_depth_price_copied_text(run, monkeypatch, steps, most_rows):
    """Copied text has no depth: what lies between two timed sizes is known, whatever depths these have."""
    (table := run.path / "steps.csv").write_text(steps, encoding="utf-8")
    profile_from_file(run, table)
    latencies = run.read_profile()
    for batch_size, costs in costs_of(latencies, PlanRequest(Limits(), latencies.batch_sizes), None).items():
        timed = sorted(
            (p.size, p.step_ms[0]) for p in (*latencies.points, *latencies.autoregressive) if p.batch_size == batch_size
        )
        ms = costs.ms([Cost(COPIED, rows, 0) for rows in range(1, most_rows + 2)])
        assert ms[:-1] == pytest.approx(np.interp(np.arange(1, most_rows + 1), *zip(*timed, strict=True)), rel=0.05)
        assert np.isnan(ms[-1])
    monkeypatch.setattr(copied, "MOST_TRIED", 12)
    plan = search(run, engine="vllm", method="ngram-v1")
    assert plan.entries[0].speculates
    assert all(entry.chosen.draft.rows <= most_rows for entry in plan.entries)


def test_a_profile_of_plain_steps_is_refused_before_the_replay(run, monkeypatch):
    """Without rows to price, nothing is replayed."""
    monkeypatch.setattr(copied, "replay", None)
    profile_of(0.1, rows=2).save(run.profile)
    with pytest.raises(OutOfRange, match="at batch size 1 the profile has plain steps alone: time larger sizes"):
        search(run, **METHOD)
    with pytest.raises(OutOfRange, match="covers batch sizes 1, 4, but 2 was asked"):
        search(run, batch_sizes=[2], **METHOD)


@pytest.mark.parametrize("engine", ["openvino", "vllm"])
def test_settings_beyond_what_was_timed_are_left_out_with_what_was_timed(run, engine):
    """Steps of 3 rows: a usual setting that verifies more is said, and a drafter of which all do is left out."""
    profile_of(0.1, batch_sizes=(1,), rows=4).save(run.profile)
    (entry,) = search(run, engine=engine).entries
    said = " ".join(entry.warnings)
    assert entry.chosen.draft.rows <= 3
    assert "is not compared: it verifies up to 6 rows, more than were timed" in said
    unpriced = (
        "At batch size 1 every setting of vllm:suffix verifies more than the 3 rows that were timed. It is left out."
    )
    assert (unpriced in said) == (engine == "vllm")


def test_where_every_setting_verifies_more_than_was_timed_the_largest_is_said(run, monkeypatch):
    """An engine that pads verifies all of its rows at every step."""
    kind = KINDS["openvino:prompt-lookup"]
    length = kind.options["num_assistant_tokens"]._replace(tried=(5, 8))
    options = {**kind.options, "num_assistant_tokens": length}
    monkeypatch.setitem(KINDS, "openvino:prompt-lookup", kind._replace(options=options))
    profile_of(0.1, batch_sizes=(1,), rows=4).save(run.profile)
    with pytest.raises(OutOfRange, match=r"verifies more than the 3 rows that were timed\. Time larger sizes\."):
        search(run, engine="openvino")


def test_steps_cost_what_their_rows_do_on_average():
    rng = np.random.default_rng(0)
    rows = np.array([0, 5, 0, 3, 2])
    profile = profile_of(0.0)
    ms = np.sort(rng.uniform(10, 20, 25))
    points = tuple(replace(p, step_ms=(ms[p.size],)) for p in profile.points)
    profile = LatencyProfile(points, tuple(replace(p, step_ms=(ms[1],)) for p in profile.autoregressive))

    def mean(batch_size, counts):
        draft = CopiedText.of("vllm:ngram", {}, len(counts) - 1, 1)
        candidate = Candidate("", draft, Rates.expected(), row_counts=np.array(counts))
        return mean_ms([candidate], StepCosts(profile, batch_size))[0]

    assert mean(1, rows) == pytest.approx(float(rows @ ms[:5] / 10))
    total, each = {0: 1.0}, {n: k / 10 for n, k in enumerate(rows.tolist()) if k}
    for _ in range(4):
        total = {
            s: sum(p * each.get(s - t, 0.0) for t, p in total.items()) for s in {t + n for t in total for n in each}
        }
    wanted = sum(p * np.interp(s / 4, np.arange(25), ms) for s, p in total.items())
    assert mean(4, rows) == pytest.approx(wanted, rel=0.01)
    assert np.isnan(mean(4, np.bincount([60])))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_the_halves_share_every_group_and_are_those_of_a_log_that_ends_earlier(of):
    def halves(groups):
        n = len(groups)
        log = RequestLog(np.zeros(3 * n, int), np.arange(0, 3 * n + 1, 3), np.ones(n, int), group=np.array(groups))
        return copied.halves(replace(log, meta={"group_names": list("abcd")}))

    found = halves(of)
    assert set(found) == {0, 1}
    for group in set(of):
        own = found[np.array(of) == group]
        assert abs((own == 0).sum() - (own == 1).sum()) <= 1
    assert found[: len(of) // 2 + 1].tolist() == halves(of[: len(of) // 2 + 1]).tolist()


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=4, max_size=40),
    st.integers(1, 50),
    st.integers(1, 6),
)
def test_the_requests_of_a_bench_are_held_out_and_in_order(told, wanted, in_a_row):
    cluster, group = (np.array(some) for some in zip(*told, strict=True))
    n, group = len(told), group[np.unique(cluster, return_index=True)[1]][np.unique(cluster, return_inverse=True)[1]]
    cluster = np.unique(cluster, return_inverse=True)[1]
    tokens = np.repeat(np.arange(n), 3)  # every request has tokens of its own
    names = {"group_names": list("abc")}
    log = RequestLog(tokens, np.arange(0, 3 * n + 1, 3), np.ones(n, int), group=group, cluster=cluster, meta=names)
    held_out = np.flatnonzero(copied.halves(log)[cluster] > 0)
    found = [one.prompt[0] for one in some_requests(log, wanted, None, 9, in_a_row=in_a_row).requests()]
    assert found == sorted(set(found) & set(held_out.tolist()))
    assert len(found) == min(wanted, len(held_out))


def test_requests_in_a_row_are_of_one_conversation():
    cluster = np.repeat(np.arange(12), 10)
    log = RequestLog(np.arange(360), np.arange(0, 361, 3), np.ones(120, int), cluster=cluster)
    spread, together = (
        np.array([one.prompt[0] // 3 for one in some_requests(log, 12, None, 9, in_a_row=n).requests()]) for n in (1, 4)
    )
    pairs = [int(((np.diff(some) == 1) & (np.diff(cluster[some]) == 0)).sum()) for some in (spread, together)]
    assert pairs[0] <= 2
    assert pairs[1] >= 8


def test_halves_know_nothing_of_each_other():
    log = log_of()
    half = copied.halves(log)[log.clusters]
    tokens = log.tokens.copy()
    for r, (begin, end) in enumerate(pairwise(log.starts.tolist())):
        if half[r] == 0:
            tokens[begin:end] = 7
    other = replace(log, tokens=tokens)
    job = "vllm:ngram-v1", usual("vllm:ngram-v1"), "cold", None
    (own, held), (changed, same) = (copied.tried_on(one, job, copied._parts(one)) for one in (log, other))
    assert held.rates.steps.tolist() == same.rates.steps.tolist()
    assert held.row_counts[: len(same.row_counts)].tolist() == same.row_counts.tolist()
    assert own.rates.steps.tolist() != changed.rates.steps.tolist()
    assert len(own.rates.steps) + len(held.rates.steps) == log.num_conversations


def test_processes_find_what_one_does(run, monkeypatch):
    log = RequestLog.load(run.requests)
    jobs = [(name, usual(name), "serial", None) for name in ("vllm:suffix", "openvino:prompt-lookup")]
    with copied._replays(log) as many:
        alone = many(jobs)
    monkeypatch.setattr(copied, "IN_PROCESS", 0)
    with copied._replays(log) as many:
        together = many(jobs)
    for one, two in zip(alone, together, strict=True):
        for mine, theirs in zip(one, two, strict=True):
            assert mine.draft == theirs.draft
            assert mine.rates.steps.tolist() == theirs.rates.steps.tolist()
            assert mine.row_counts.tolist() == theirs.row_counts.tolist()


def test_every_drafter_has_a_grid_of_settings_that_its_engine_takes():
    for name in KINDS:
        tried, engine = [], name.partition(":")[0]

        def value(settings, tried=tried):
            tried.extend(settings)
            return np.array([[hash(one) % 97, -(hash(one) % 89)] for one in settings], float)

        found = sought(name, value)
        assert len(tried) == len(set(tried)) == len(found) <= 60
        assert usual(name) in found
        for one in found:
            assert fits(dict(one))
            text_drafter(name, dict(one))
            assert export(engine, CopiedText.of(name, dict(one), 9, 8), drafter=KIND).files


def test_the_best_of_separate_options_is_found():
    rng = np.random.default_rng(0)
    for name in ("vllm:suffix", "llama.cpp:ngram-mod", "vllm:ngram-v1"):
        peaks = {option: rng.integers(len(of)) for option, of in KINDS[name].grid.items()}

        def value(settings, name=name, peaks=peaks):
            rank = {option: list(of).index for option, of in KINDS[name].grid.items()}
            return np.array(
                [
                    [
                        -sum(abs(rank[o](dict(one)[o]) - peak) for o, peak in peaks.items() if o in dict(one))
                        - 9 * (len(one) < len(peaks))
                    ]
                    for one in settings
                ],
                float,
            )

        found = sought(name, value, most=200)
        best = max(found, key=lambda one: found[one][0])
        if fits({o: KINDS[name].grid[o][i] for o, i in peaks.items()}):
            assert found[best][0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "sglang"}, "No drafter of sglang that copies text is replayed: search for one of arctic, .*vllm"),
        ({"engine": "tgi"}, "No drafter of tgi that copies text is replayed"),
        ({"engine": "vllm", "method": "eagle3"}, "must be ngram-v1, ngram-v2, suffix"),
        ({**METHOD, "shape": "chain"}, "shape is for trees"),
        ({**METHOD, "batch_sizes": {1: 0.5, 2: 0.5}}, "leave the shares out"),
    ],
)
def test_what_is_not_for_copied_text_is_refused(run, options, said):
    with pytest.raises(InvalidInput, match=said):
        search(run, **options)


def test_what_is_kept_between_requests_is_bracketed(tmp_path):
    log = log_of(conversations=6)
    twice = RequestLog(
        np.concatenate([log.tokens, log.tokens]),
        np.concatenate([log.starts, log.starts[1:] + log.starts[-1]]),
        np.concatenate([log.prompt_tokens] * 2),
        cluster=np.arange(24),
    )
    twice.save(tmp_path / "requests.npz")
    plan = search(tmp_path, engine="vllm", method="suffix")
    (said,) = [w for w in plan.entries[0].warnings if "keeps text" in w]
    cold, serial = (
        float(part.split()[-1].rstrip(".")) for part in said.split(": ", 1)[1].split(". The plan")[0].split(";")
    )
    assert cold < serial
    assert plan.entries[0].chosen.tokens_per_step == pytest.approx(serial, abs=0.006)


def test_nothing_beyond_the_budget_is_planned_and_the_usual_setting_is_said(run):
    (entry,) = search(run, budget=4, **METHOD).entries
    assert all(figure.size <= 4 for figure in (entry.chosen, *entry.others.values(), *entry.curve))
    (said,) = [one for one in entry.warnings if "usual setting" in one]
    log = RequestLog.load(run.requests)
    assert f"up to 11 rows, beyond the budget of 4: it emits {by_reference(log, 1, 10, 2):.2f} tokens per step" in said
    with pytest.raises(InvalidInput, match="must be larger than 1"):
        search(run, budget=1, **METHOD)


def test_of_a_long_log_the_first_answers_are_replayed(run, tmp_path, monkeypatch):
    log = RequestLog.load(run.requests)
    part = copied.first_answers(log, 800)
    assert part.answer_tokens[:-1].sum() < 800 <= part.answer_tokens.sum()
    half = copied.halves(part)
    assert half.tolist() == copied.halves(log)[: len(half)].tolist()
    monkeypatch.setattr(copied, "JUDGED_TOKENS", 800)
    entry = search(run, **METHOD).entries[0]
    assert any(f"the first {part.num_sequences} of 48 requests" in said for said in entry.warnings)
    alone = RunDirectory(tmp_path / "alone")
    with alone.writing():
        alone.replace_requests(part)
    assert search(alone, **METHOD).entries[0].chosen == entry.chosen


def test_a_plan_that_is_made_again_is_the_same_file(run):
    search(run, **METHOD)
    before = run.plan.read_bytes()
    search(run, **METHOD)
    assert run.plan.read_bytes() == before


def log_of_answers(answers: list[list[int]]) -> RequestLog:
    lengths = [3 + len(answer) for answer in answers]
    tokens = np.concatenate([[1, 2, 3, *answer] for answer in answers])
    return RequestLog(tokens, np.cumsum([0, *lengths]), np.full(len(answers), 3))


@pytest.mark.parametrize("row_ms", [None, 0.3])
def test_logs_with_little_in_them(tmp_path, row_ms):
    if row_ms is not None:
        profile_of(row_ms).save(tmp_path / "profile.json")
    few = {"steps": [[5, 1, 2, 3, 1, 2, 3], [9]], "copies": [[11, 12, 13, 14]] * 3, "alone": [[5, 1, 2, 3, 1, 2, 3]]}
    for name, answers in few.items():
        log_of_answers(answers).save(tmp_path / "requests.npz")
        for engine in ("transformers", "vllm"):
            entry = search(tmp_path, engine=engine).entries[0]
            assert entry.chosen.tokens_per_step >= 1
            assert any("single conversation" in said for said in entry.warnings) is (name in ("alone", "steps"))
    log_of_answers([[5]] * 4).save(tmp_path / "requests.npz")
    with pytest.raises(InvalidInput, match="two tokens or more"):
        search(tmp_path, **METHOD)


@pytest.mark.parametrize("others", [0, 1])
def test_a_plan_of_copied_text_is_not_compared(run, others):
    """Neither its groups nor another log: the sentence says what to do."""
    search(run, **METHOD)
    with pytest.raises(InvalidInput, match=r"has a plan of copied text, .*: search for the other log anew"):
        treeopt.compare(*[run] * (1 + others))
