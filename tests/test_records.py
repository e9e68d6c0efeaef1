"""What was measured of one drafter, rule or seed does not pass for another; records alone, no model."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.steps import import_file
from treeopt.errors import InvalidInput
from treeopt.files.storage import document, schema, to_json, typed
from treeopt.pipeline.profile.outcome import with_earlier
from treeopt.pipeline.search import checked_latencies
from treeopt.pipeline.session import resolve
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure, FigureOfFile
from treeopt.records.options import Source
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import Tree

from .test_damage import FILES

MEDUSA = {"kind": "medusa", "id": "heads", "sha256": "a" * 64, "num_heads": 4, "num_layers": 1}
OWN = {"kind": "mtp", "id": "mtp", "sha256": None, "num_heads": 5}
GREEDY = {"rule": "greedy", "temperature": 0.0}


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path)


def profile_of(drafter, acceptance=GREEDY, batch_size=1) -> LatencyProfile:
    timings = [StepTiming(batch_size, 100, size, depth, (ms,)) for size, depth, ms in ((2, 1, 3.0), (1, 0, 2.0))]
    provenance = {"model": "m", "drafter": drafter, "acceptance": acceptance}
    return LatencyProfile((timings[0],), (timings[1],), {}, {"provenance": provenance, "precision": 0.02})


def trace_of(drafter, acceptance=GREEDY) -> RankTrace:
    meta = {"drafter": drafter, "acceptance": acceptance, "provenance": {"model": "m"}, "top_k": 4}
    return RankTrace(np.array([[0], [1], [-2]]), np.array([0, 3]), meta=meta)


def test_a_plan_takes_no_latencies_of_another_drafter_or_rule(run):
    trained_again = {**MEDUSA, "sha256": "b" * 64}  # costs alike
    checked_latencies(trace_of(MEDUSA), profile_of(trained_again), run, run.profile, (1,))
    sampled = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}
    for other in (profile_of({**MEDUSA, "kind": "hydra"}), profile_of(OWN), profile_of(MEDUSA, sampled)):
        with pytest.raises(
            InvalidInput, match=r"do not belong together.* Time steps again: treeopt profile --overwrite"
        ):
            checked_latencies(trace_of(MEDUSA), other, run, run.profile, (1,))


def test_profiles_of_two_rules_are_not_joined(run):
    profile_of(MEDUSA).save(run.profile)
    assert with_earlier(run, profile_of(MEDUSA, batch_size=2)).batch_sizes == [1, 2]
    sampled = {"rule": "sample-then-match", "temperature": 0.7}
    assert with_earlier(run, profile_of(MEDUSA, sampled, batch_size=2)).batch_sizes == [2]


def test_a_joined_profile_was_as_busy_as_what_it_keeps(run):
    before, now = profile_of(MEDUSA), profile_of(MEDUSA, batch_size=2)
    before.info["processor_share"], now.info["processor_share"] = 0.4, 0.9
    before.save(run.profile)
    assert with_earlier(run, now).info["processor_share"] == 0.4
    now.save(run.profile)
    assert with_earlier(run, replace(now, info={**now.info, "processor_share": 1.0})).info["processor_share"] == 1.0


def test_an_import_replaces_the_probe_too(run, tmp_path):
    run.path.mkdir(exist_ok=True)
    run.probe.write_bytes(b"of earlier answers")
    (tmp_path / "rates.csv").write_text("head,rank,accuracy\n1,0,0.6\n1,1,0.1\n")
    with pytest.raises(InvalidInput, match=r"probe\.npz exists"):
        import_file(run, tmp_path / "rates.csv", trials=1000)
    import_file(run, tmp_path / "rates.csv", trials=1000, overwrite=True)
    assert not run.probe.exists()


def save_source(run, **source):
    trace = trace_of(OWN)
    trace.meta["source"] = source
    trace.save(run.trace)


def test_options_of_what_is_given_anew_are_not_taken_over(run):
    earlier = {
        "model": "m",
        "drafter": "ngram",
        "prompts": "p",
        "responses": "answer",
        "rule": "sample:temperature=0.7",
    }
    save_source(run, **earlier, draft_depth=3)
    assert resolve(run, Source()).given == {**earlier, "draft_depth": 3}
    assert resolve(run, Source(drafter="x")).given == {**earlier, "drafter": "x"}
    others = resolve(run, Source(prompts="q"))  # whose answers are sampled as the given ones were
    assert (others.rule, others.responses) == ("sample:temperature=0.7", None)
    assert resolve(run, Source(responses="r")).rule is None
    assert resolve(run, Source(rule="greedy")).rule == "greedy"


def test_options_of_a_trace_that_kept_its_model_as_it_was_given_are_taken(run, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    (run.path.parent / "m").mkdir()
    save_source(run, model="m", drafter="ngram")
    assert resolve(run, Source(model="m")).given == {"model": str(run.path.parent / "m"), "drafter": "ngram"}


def test_a_trace_that_cannot_be_read_stands_in_the_way_of_nothing_that_replaces_it(run, capsys):
    run.path.mkdir(exist_ok=True)
    run.trace.write_bytes(b"damaged")
    with pytest.raises(InvalidInput, match="not a readable"):
        resolve(run, Source())
    assert resolve(run, Source(), overwrite=True) == Source()
    assert "It is replaced, and nothing is taken from it." in capsys.readouterr().err


# What stands in files: measured or chosen, typed to the leaf, nothing that follows

KINDS = {"calibration.json": Calibration, "profile.json": LatencyProfile, "plan.json": Plan, "bench.json": Benchmark}


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    file = tmp_path / request.param
    FILES[request.param][0](file)
    return KINDS[request.param], file


def leaves(value, path=()):
    """Places of the numbers in a document, but for what is not ours."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        if key not in ("provenance", "group_names"):
            yield from leaves(child, (*path, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def put(whole, path, value):
    owner = whole
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value


def test_a_saved_file_says_just_what_was_loaded(saved):
    kind, file = saved
    first = file.read_bytes()
    kind.load(file).save(file)
    assert file.read_bytes() == first


FOLLOWS = {
    "calibration.json": (("num_heads",), ("top_k",)),
    "profile.json": (),
    "plan.json": [("entries", 0, key) for key in ("rows", "depth")] + [("entries", 0, key, "value") for key in ("speedup", "tokens_per_s")],
    "bench.json": [("rounds",), *(("contenders", 0, key) for key in ("rows", "depth", "steps", "tokens", "speedup", "tokens_per_s"))],
}  # fmt: skip


def test_a_number_that_follows_from_others_is_never_read_back(saved):
    kind, file = saved
    before = kind.load(file).document()
    whole = json.loads(file.read_text())
    for place in FOLLOWS[file.name]:
        put(whole, place, 99)
    file.write_text(json.dumps({**whole, "a key of tomorrow": 1}))
    after = kind.load(file).document()
    assert to_json({key: after[key] for key in before}) == to_json(before)


@pytest.mark.parametrize("name", ["plan.json", "bench.json"])
def test_every_number_has_its_type_and_a_damaged_one_is_refused_by_its_place(name, tmp_path):
    """Or it follows from others, and nothing is read of it."""
    FILES[name][0](tmp_path / name)
    whole, refused = json.loads((tmp_path / name).read_text()), {}
    before = KINDS[name].load(tmp_path / name).document()
    places = {tuple("0" if isinstance(key, int) else key for key in path): path for path in leaves(whole)}
    for path in places.values():
        damaged = copy.deepcopy(whole)
        put(damaged, path, {"no": "number"})
        (tmp_path / name).write_text(json.dumps(damaged))
        try:
            assert to_json(KINDS[name].load(tmp_path / name).document()) == to_json(before)
        except InvalidInput as error:
            refused[path] = str(error)
    assert len(refused) > 10
    assert all(f"{name} is not as it should be at {path[0]}" in reason for path, reason in refused.items())


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("plan.json", ("entries", 0, "batch_size"), 0, "a whole number of at least 1"),
        ("plan.json", ("entries", 0, "tokens_per_step"), 0.5, "a number of at least 1"),
        ("plan.json", ("schedule", 0, "first"), 2, "ranges from 1 on that follow"),
        ("plan.json", ("entries", 0, "step_ms"), 0.0, "entries.0.step_ms"),
        ("plan.json", ("entries", 0, "medusa_choices"), None, "entries.0: medusa_choices"),
        (
            "plan.json",
            ("entries", 0),
            {"batch_size": 1, "levels": 9, "topk": 1, "rows": 3, "tokens_per_step": 2},
            "levels",
        ),
        ("plan.json", ("entries", 0), {"batch_size": 1, "tokens_per_step": 2}, "must have medusa_choices"),
        ("plan.json", ("entries", 0, "speedup"), {"value": 2.0, "low": 0}, "speedup.low"),
        ("bench.json", ("contenders", 0, "blocks", 0, "decode_s"), -1.0, "a number of at least 0"),
        ("profile.json", ("points", 0, "step_ms", 0), 0.0, "points.0.step_ms.0"),
        ("profile.json", ("points", 0, "step_ms"), [], "at least 1 item"),
        ("profile.json", ("points", 0, "depth"), 4, "depth < size"),
        ("profile.json", ("points", 0, "depth"), 0, "depth < size"),
        ("profile.json", ("points", 0, "size"), "x", "points.0.size"),
        ("bench.json", ("inputs",), {"plan.json": 1}, r"bench.json .* at inputs\.plan"),
        ("profile.json", ("provenance",), ["x"], r"profile.json .* at provenance"),
    ],
)
def test_what_cannot_be_is_refused_by_rule(tmp_path, name, place, value, said):
    FILES[name][0](tmp_path / name)
    whole = json.loads((tmp_path / name).read_text())
    put(whole, place, value)
    (tmp_path / name).write_text(json.dumps(whole))
    with pytest.raises(InvalidInput, match=said):
        KINDS[name].load(tmp_path / name)


HAND_WRITTEN = {
    "plan.json": {"entries": [{"batch_size": 4, "medusa_choices": [[0]], "tokens_per_step": 1.5}]},
    "bench.json": {"contenders": [{"name": "plain", "batch_size": 1, "medusa_choices": [], "sequences": [], "blocks": []}]},
    "profile.json": {"points": [], "autoregressive": [{"batch_size": 1, "context_tokens": 0, "step_ms": [2.0]}]},
    "calibration.json": {"hits": [[5, 2]], "trials": [10]},
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_hand_written_file_needs_only_the_keys_that_must_be(tmp_path, name):
    """Also after it was saved: an empty list that must be there is written, such as the blocks of what was not timed."""
    file, kind = tmp_path / name, name.removesuffix(".json")
    file.write_text(json.dumps({"schema": schema(kind), **HAND_WRITTEN[name]}))
    first = KINDS[name].load(file)
    first.save(file)
    assert to_json(KINDS[name].load(file).document()) == to_json(first.document())


def test_the_errors_of_a_figure_survive_a_file():
    """The value of one that follows is never read."""
    speedup, over = Estimate(2.0, 0.1, 1.8, 2.2), Estimate(0.9, low=0.8, high=1.1)
    figure = Figure(draft=Tree.chain(2), batch_size=1, tokens_per_step=Estimate(1.5, 0.2), step_ms=Estimate(3.0), plain_ms=4.0,
                    speedup=speedup, over_chosen=over)  # fmt: skip
    record = document(figure)
    assert record["tokens_per_step"] == {"value": 1.5, "stderr": 0.2}
    assert record["speedup"] == {"value": 2.0, "stderr": 0.1, "low": 1.8, "high": 2.2}
    found = typed(FigureOfFile, {**record, "speedup": {**record["speedup"], "value": 7.0}}, "x.json")
    assert document(found) == record
    assert str(found.speedup) == "2.00 [1.80, 2.20]"
    assert str(found.over(replace(figure, step_ms=2.7))) == "0.90 [0.80, 1.10]"
    assert replace(found, plain_ms=8.0).speedup == 4.0


@given(st.integers(1, 6), st.integers(1, 64), st.floats(0, 1), st.floats(0.1, 1e3), st.floats(0.1, 1e3))
def test_what_a_figure_shows_follows_from_its_fields_and_survives_a_file(depth, batch_size, share, step_ms, plain_ms):
    costs = {"batch_size": batch_size, "step_ms": step_ms, "plain_ms": plain_ms}
    figure = Figure(draft=Tree.chain(depth), tokens_per_step=1 + share * depth, **costs)
    assert figure.tokens_per_s == pytest.approx(batch_size * figure.tokens_per_step / (step_ms / 1e3))
    assert figure.speedup == pytest.approx(figure.tokens_per_s / (batch_size / (plain_ms / 1e3)))
    assert figure.over(figure) == 1
    record = document(figure)
    assert record["speedup"] == {"value": figure.speedup}
    assert typed(FigureOfFile, {**record, "speedup": 99}, "x.json") == figure
    assert replace(figure, plain_ms=None).speedup is None
    assert replace(figure, step_ms=None).rate == figure.tokens_per_step
