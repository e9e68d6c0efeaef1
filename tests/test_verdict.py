"""Losing is as loud as winning: in a benchmark, a search, an export and the report what speaks against a tree comes first."""

from dataclasses import replace

import pytest

from tests.helpers.runs import at_speed, long_trace, make_run, shown, some_bench, some_plan, some_profile
from treeopt.errors import InvalidInput
from treeopt.pipeline.export import export, export_all
from treeopt.pipeline.search import search
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.estimate import Estimate
from treeopt.records.exchange import ExportOptions
from treeopt.records.figure import Figure
from treeopt.records.inputs import inputs_of
from treeopt.records.options import SearchOptions
from treeopt.records.plan import PlannedEngine
from treeopt.records.profile import LatencyProfile
from treeopt.report.bench_table import bench_table
from treeopt.report.figures.registry import Inputs
from treeopt.report.page import write_report
from treeopt.report.plan_table import certainty, plan_table, trees_table
from treeopt.report.plan_verdict import described, doubts, next_commands, predicted_doubts, recommendations
from treeopt.report.verdict import measured, weighed
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree


def entry_of(*, speedup=1.2, ends=None, **changes):
    """What a search chose, with another predicted speedup, with or without an interval, and no other kinds."""
    found = some_plan((1,)).entries[0]
    assert found.speculates
    plain_ms = None if speedup is None else speedup * found.chosen.step_ms / found.chosen.tokens_per_step
    estimate = Estimate(speedup or 1.0, 0.04, *ends) if ends else None
    figures = {"plain_ms": plain_ms, "speedup": estimate, "tokens_per_s": None}
    return replace(found, **{**figures, "others": {}, "tied_sizes": [], **changes})


def rival(bench, name, *, over_chosen):
    """A benchmark with one more contender, so many times as fast as the chosen tree."""
    chosen = bench.contender("chosen")
    blocks = [replace(block, decode_s=block.decode_s / over_chosen) for block in chosen.blocks]
    other = replace(chosen, name=name, draft=Tree.chain(4), blocks=blocks)
    kept = tuple(c for c in bench.contenders if c.name != name)
    return replace(bench, contenders=(*kept, other))


@pytest.mark.parametrize(
    ("low", "high", "begins"),
    [
        (1.01, 1.21, "The chosen tree (3 rows a step) decodes 1.11 (1.01 to 1.21) times"),
        (0.85, 1.05, "Speculation is not shown to pay here: the 95 % interval"),
        (0.7, 0.99, "Speculation is slower than plain decoding here: serve the model without speculation"),
        (1.0, 1.2, "Speculation is not shown to pay here"),
        (None, None, "Speculation is not shown to pay here: too little was timed for an interval"),
    ],
)
def test_a_benchmark_begins_with_what_it_comes_to_a_gain_only_above_1(monkeypatch, low, high, begins):
    middle = 1.05 if low is None else (low + high) / 2
    monkeypatch.setattr(Benchmark, "speedup", lambda *names, **options: Estimate(middle, None, low, high))
    bench = some_bench()
    said = shown(bench_table(replace(bench, contenders=bench.contenders[:2])))
    assert said.startswith(begins)
    assert ("slower than plain decoding: " in said) == (middle < 1)


@pytest.mark.parametrize(
    ("name", "called"), [("chain", "the best chain"), ("mc_sim_7b_63", "the published tree"), ("mine", "mine")]
)
def test_losing_against_a_rival_comes_before_winning_over_plain(name, called):
    bench = rival(at_speed(some_bench(), 1.5), name, over_chosen=1.25)
    said = measured(bench)
    assert said.startswith(f"The chosen tree loses against {called}: it decodes 0.80 (0.80 to 0.80) times as fast.")
    assert "1.50" in said
    assert weighed(bench)[0] == [said[: said.index(" The chosen tree (")]]


def test_the_fastest_is_named_where_it_is_another():
    bench = rival(at_speed(some_bench(), 1.5), "mine", over_chosen=1.02)
    mine = bench.contender("mine")
    blocks = [replace(block, decode_s=block.decode_s * (1 + 0.1 * (-1) ** block.prompts[0])) for block in mine.blocks]
    bench = replace(bench, contenders=tuple(replace(c, blocks=blocks) if c is mine else c for c in bench.contenders))
    against, standing = weighed(bench)
    assert not against
    assert "The fastest is mine, not beyond noise: the chosen tree decodes 0.98 (" in " ".join(standing)


def test_a_choice_not_to_speculate_loses_against_a_chain_that_pays():
    bench = at_speed(some_bench(), 1.0)
    chosen = replace(bench.contender("chosen"), draft=Tree.chain(0))
    bench = rival(replace(bench, contenders=(bench.contenders[0], chosen)), "chain", over_chosen=1.3)
    assert measured(bench).startswith("Plain decoding, which the plan chose, loses against the best chain")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ends": (1.1, 1.3), "tied_sizes": [8, 9]}, ""),
        ({"ends": (0.7, 0.9)}, "predicted to be slower than plain decoding here"),
        ({"speedup": 0.9}, "not shown to pay here: the error"),
        ({"ends": (0.97, 1.1)}, "not shown to pay here: the 95 % interval"),
        ({"ends": (1.01, 1.1), "tied_sizes": [1, 2, 8]}, "plain decoding is tied"),
        (vars(some_plan((1,)).entries[0].plain), "No tree is shown to pay here"),
        ({"speedup": None}, ""),
    ],
)
def test_a_plan_says_first_where_its_error_band_spans_not_to_speculate(changes, says):
    said = " ".join(predicted_doubts(some_plan((1,)), entry_of(**changes)))
    assert says in said
    assert bool(said) == bool(says)


@pytest.mark.parametrize(
    ("ends", "doubt"),
    [
        ((1.2, 1.3), ""),
        (
            (0.9, 1.1),
            " Speculation is not shown to pay here: the 95 % interval of its predicted speedup is 0.90 to 1.10.",
        ),
    ],
)
def test_a_search_begins_with_what_to_use_at_each_batch_size(ends, doubt):
    plan, entries = some_plan((1, 4)), []
    for entry, interval in zip(plan.entries, ((1.2, 1.3), ends), strict=True):
        chosen = replace(entry.chosen, speedup=Estimate(sum(interval) / 2, None, *interval))
        entries.append(replace(entry.served(chosen), tied_sizes=[], others={}))
    plan = replace(plan, entries=tuple(entries))
    first, second = recommendations(plan)
    assert first.startswith(f"Batch size 1: use {described(plan[1].draft)}: ")
    assert first.endswith("times plain (1.20 to 1.30), predicted.")
    assert second.endswith(f"times plain ({ends[0]:.2f} to {ends[1]:.2f}), predicted.{doubt}")
    assert shown(plan_table(plan, "Next: it.")).startswith(
        f"{first} {second} Next: it. The best tree for each batch size"
    )


@pytest.mark.parametrize(
    ("speedup", "part", "pays"),
    [
        (Estimate(0.9, 0.02, 0.86, 0.95), None, "No tree pays here."),
        (Estimate(0.9, 0.1, 0.7, 1.1), None, "No tree is shown to pay here."),
        (Estimate(0.9), None, "No tree is shown to pay here."),
        (Estimate(0.9), "linear layers", "No tree pays here."),
    ],
)
def test_that_no_tree_pays_is_said_where_the_best_one_is_shown_to_lose(speedup, part, pays):
    """The best one is named, and a row of the table."""
    plan, entry = replace(some_plan((1,)), part=part), entry_of(speedup=0.9)
    best = replace(entry.chosen, speedup=speedup)
    plan = replace(plan, entries=(replace(entry.served(entry.plain), others={"tree": best}),))
    (sentence,) = recommendations(plan)
    assert sentence.startswith(f"Batch size 1: do not speculate. {pays} The best, {described(best.draft)}: ")
    assert "0.90 times plain" in sentence
    assert [row[:2] for row in trees_table(plan).rows] == [("1", "1"), ("1, best tree", str(best.size))]
    assert doubts(plan) == [f"{pays[:-1]}: serve the model without speculation."]


def test_a_chain_that_is_predicted_to_be_faster_is_named():
    entry = entry_of(ends=(1.1, 1.3))
    ours = entry.chosen.tokens_per_s

    def with_chain(ahead, rate=None):
        chain = Figure(draft=Tree.chain(2), batch_size=1, tokens_per_step=1.5, step_ms=1.5e3 / (ahead * ours))
        chosen = replace(entry.chosen, tokens_per_s=rate)
        return predicted_doubts(some_plan((1,)), replace(entry.served(chosen), others={"chain": chain}))

    (said,) = with_chain(1.04)
    assert said == "The chosen tree loses against a chain of 2, which is predicted to be 4 % faster."
    assert with_chain(1.002) == []
    assert with_chain(1.04, Estimate(ours, None, 0.9 * ours, 1.1 * ours)) == []


@pytest.mark.parametrize(
    ("ratio", "ends", "says"),
    [
        (0.48, None, "52.0 ±? % behind"),
        (0.48, (0.44, 0.52), "52.0 ±2.0 % behind"),
        (0.2, None, "80.0 ±? % behind"),
        (1.5, None, "50.0 ±? % ahead"),
    ],
)
def test_percent_behind_is_of_the_ratio(ratio, ends, says):
    """It was the logarithm of the ratio: 73.0 % for 0.48 times as fast, 160.9 % for 0.2 times."""
    entry = entry_of()
    chosen = replace(entry.chosen, tokens_per_step=Estimate(entry.chosen.tokens_per_step, None, 1.1, 1.3))
    over = Estimate(ratio, None, *ends) if ends else None
    next_best = replace(chosen, draft=Tree.chain(4), step_ms=chosen.step_ms / ratio, over_chosen=over)
    said = certainty(replace(entry.served(chosen), runner_up=next_best, tied_sizes=[chosen.size]))
    assert said.endswith(f"no other size is tied; the next best, 5 rows, is {says}.")


@pytest.mark.parametrize(
    ("speed", "runtime"), [(0.97, "treeopt"), pytest.param(0.5, "openvino", marks=pytest.mark.long)]
)
def test_what_was_measured_slower_is_not_exported_unless_anyway(tmp_path, speed, runtime):
    """One batch size of two, by treeopt itself and by an engine that was planned for."""
    run = make_run(tmp_path, batch_sizes=(1, 4))
    plan = replace(run.read_plan(), runtime={"name": runtime})
    plan.save(run.plan)
    engine = None if runtime == "treeopt" else runtime
    for size, faster in ((1, 1.5), (4, speed)):
        bench = at_speed(Benchmark.load(run.bench_of(size)), faster)
        run.bench_of(size).unlink()
        about = replace(bench.provenance, engine={"name": engine} if engine else None)
        inputs = inputs_of(run.plan, run.trace)
        replace(bench, inputs=inputs, provenance=about).save(run.bench_of(size, engine))
    paths, written = export(run, "tensorrt-llm")
    assert {path.parent.name for path in paths} == {"batch-size-1"}
    (said,) = [note for note in written.notes if note.startswith("Nothing was written")]
    assert "measured slower than plain decoding" in said
    assert f"batch size 4 ({speed:.2f}" in said
    with pytest.raises(InvalidInput, match="measured slower than plain decoding is not exported"):
        export(run, "tensorrt-llm", ExportOptions(batch_size=4))
    assert "tensorrt-llm" in export_all(run, plan)
    paths, written = export(run, "tensorrt-llm", anyway=True)
    assert {path.parent.name for path in paths} == {"batch-size-1", "batch-size-4"}
    assert any("slower than plain decoding here" in note for note in written.notes)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("treeopt.report.page.pictures", lambda *rest, **options: [])
    return make_run(tmp_path, batch_sizes=(1,))


def decoded(run, speed, **changes):
    """Keep a benchmark whose chosen tree is so many times as fast as plain decoding."""
    bench = at_speed(Benchmark.load(run.bench_of(1)), speed)
    replace(bench, **{"inputs": inputs_of(run.plan, run.trace), **changes}).save(run.bench_of(1))


def test_a_benchmark_says_nothing_against_a_plan_for_another_runtime(run):
    replace(run.read_plan(), runtime={"name": "vllm"}).save(run.plan)
    decoded(run, 0.9)
    against = doubts(run.read_plan())
    _, written = export(run, "medusa")
    assert list(written.notes[: len(against)]) == against
    assert "Speculation is slower" not in " ".join(written.notes)
    assert Inputs(run).benches() == {}
    page = write_report(run)[0].read_text()
    assert "Speculation is slower" not in page
    assert (
        "for steps timed elsewhere, with another runtime (&#39;vllm&#39; there, &#39;treeopt&#39; here). Decoded here it is 0.90 times as fast"
        in page
    )


def test_an_export_begins_with_what_speaks_against_its_tree(run):
    def notes() -> list[str]:
        return list(export(run, "medusa", anyway=True)[1].notes)

    decoded(run, 0.9)
    assert notes()[0].startswith("Speculation is slower")
    decoded(run, 1.5)
    assert "Speculation" not in " ".join(notes())
    decoded(run, 0.9, inputs={"plan.json": "0"})  # of another plan: the prediction
    against = doubts(run.read_plan())
    assert notes()[: len(against)] == against
    run.bench_of(1).write_text("{")
    assert notes()


def test_the_report_shows_a_loss_in_the_colour_and_place_of_a_gain(run):
    decoded(run, 0.9)
    page = write_report(run)[0].read_text()
    card = page.partition('class="card"')[2].partition("</a>")[0]
    assert 'class="lost">0.90×' in card
    assert card.index("Speculation is slower") < card.index("is slower than plain decoding: 0.90")
    decoded(run, 1.5)
    page = write_report(run)[0].read_text()
    assert 'class="lost"' not in page
    assert "Speculation" not in page


def test_who_uses_a_noisy_profile_repeats_its_warning(run):
    profile = run.read_profile()
    replace(profile, info={**profile.info, "precision": 1e-6, "processor_share": 0.21}).save(run.profile)
    notes = [search(run, SearchOptions(budget=8)).notes, export(run, "medusa")[1].notes]
    page = write_report(run)[0].read_text()
    for said in ("are not known to 0.0% yet", "other programs had the processor for 79% of"):
        assert [sum(said in sentence for sentence in each) for each in notes] == [1, 1]
        assert page.count(said) == 1


def quick(profile: LatencyProfile, share: float) -> LatencyProfile:
    """As a profile whose trees of 2 and 4 rows were timed at that share of the plain step."""
    plain = {p.setting: tuple(share * ms for ms in p.step_ms) for p in profile.autoregressive}
    points = [replace(p, step_ms=plain[p.setting]) if p.size in (2, 4) else p for p in profile.points]
    return LatencyProfile(tuple(points), profile.autoregressive, profile.runtime)


def test_a_tree_that_was_timed_faster_than_a_plain_step_is_planned_as_one():
    trace, request = long_trace(3), PlanRequest(Limits(16), (1, 4))
    plan = plan_trees(trace, quick(some_profile((1, 4)), 0.8), request)
    assert "Steps of 2, 4 rows were timed below a plain step, which is noise" in " ".join(plan.notes)
    for entry in plan.entries:
        small = [point for point in entry.curve if point.size in (2, 3, 4)]
        plain = entry.curve[0]
        assert [point.step_ms for point in small] == pytest.approx([plain.step_ms] * 3)
        assert all(p.tokens_per_s / plain.tokens_per_s <= p.tokens_per_step * (1 + 1e-9) for p in entry.curve)
        if entry.chosen.speedup.high and entry.chosen.size in (2, 3, 4):
            assert entry.chosen.speedup.high <= entry.chosen.tokens_per_step.high + 1e-9


def test_a_search_says_what_to_run_next_where_it_speculates(run):
    plan = run.read_plan()
    assert next_commands(run, plan) == f"Next: {run.command('bench')}, or {run.command('export', '--to', 'ENGINE')}."
    planned = replace(plan.constraint, engine=PlannedEngine(name="sglang", method="dynamic-tree"))
    assert "--to sglang" in next_commands(run, replace(plan, constraint=planned))
    plain = replace(plan, entries=tuple(entry.served(entry.plain) for entry in plan.entries))
    assert next_commands(run, plain) == ""
