"""No file is taken whose numbers contradict one another: every single number of a run's files, damaged in several ways.

A damaged number is refused by the name of the file, or it is free: nothing else in the file says what it must be. The
free ones are listed with the reason. A part in the suite, all of them on demand (``pytest -m slow tests/test_agreement.py``).
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treeopt.errors import InvalidInput
from treeopt.files.shipped import shipped
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.agreement import agree, within
from treeopt.records.load import load_result
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import treeopt
from .test_coverage import random_probe
from .test_figures import long_trace, some_bench, some_plan, some_profile, with_answers

SAMPLE = 60  # damages of a file in the suite
# Place in a file (without the numbers of list items) -> why nothing in the file contradicts another number there.
FREE = {
    "plan.json": {
        "entries.context_tokens": "a label of the profile's",
        "entries.tokens_per_step_stderr": "a bootstrap; checked against predicted.replayed_stderr, both may be rounded",
        "entries.(step_ms|tokens_per_s|speedup)_stderr": "a bootstrap",
        "entries.interval95.*": "a bootstrap; must be ordered and above 0",
        "entries.predicted.(product|joint|replayed_stderr)": "another estimate; at least 1 and at most the rows",
        "entries.predicted.(sequences|conversations|steps)": "counts of the trace, only ordered",
        "entries.growth_order.*": "gains in-sample, while figures are held out; sums must be possible",
        "entries.tied_sizes": "sizes by the bootstrap; must rise",
        "entries.runner_up.(size|behind_stderr|prompts_to_separate)": "a bootstrap, and a label",
        "entries.runner_up.depth": "of a tree that is not in the file",
        "entries.accepted": "shares must sum to 1, and to the tokens per step but for last steps",
        "entries.best_chain.depth": "with its size",
        "entries.unconstrained.*": "of a tree that is not in the file",
        "entries.curve.(size|depth|tokens_per_s_stderr)": "of a tree that is not in the file; a bootstrap",
        "constraint.*": "what was asked; the trees must keep to it",
        "entries.elsewhere.*": "checked where the other batch size's curve has the tree",
        "schedule.(loss|to|from|entry)": "what ties cost by the bootstrap; ranges must follow one another",
        "(schedule.between|error_between|tests_between)": "of latencies that are not in the file",
        "drafter.num_(heads|layers)": "a label; trees are at most as deep",
        "acceptance.*": "a label",
    },
    "profile.json": {
        "(points|autoregressive).(batch_size|context_tokens|size|depth|step_ms|round|accepted_mean)": "a measurement",
        "(points|autoregressive).parts_ms.*": "timed in steps of their own",
        "(points|autoregressive).expanding": "of a tree that is not in the file",
        "precision.*": "must fit one another",
        "drift.(drift|context_tokens|batch_size)": "of a setting that there is",
        "weight_bytes.*": "a measurement",
        "processor_share": "a measurement; a share",
        "provenance.*": "a label",
    },
    "calibration.json": {
        "hits": "a measurement; that of head 1 and of the groups must sum up",
        "trials": "a measurement; at least the hits",
        "(positions|sequences)": "a measurement",
        "loop_share": "a measurement",
        "survival_stderr": "a bootstrap",
        "prefix_counts.(counts|visited)": "a measurement; no more than the hits and the parent's",
        "prefix_counts.paths": "paths of ranks",
        "examples.*": "texts of paths",
        "groups.*.(tokens_per_step|tokens_per_step_stderr)": "of a tree that is not in the file",
        "(drafter|acceptance|answers|provenance).*": "a label",
    },
    "bench.json": {
        "contenders.medusa_choices": "the tree that was decoded; must have the size",
        "contenders.passes": "at least a pass for every full batch of steps",
        "contenders.prefill_s": "a measurement",
        "contenders.predicted.*": "another file's; replayed is there twice",
        "contenders.predicted_accepted": "shares must sum to 1",
        "contenders.replayed_.*": "of the plain answers, whose lengths are not in the file; sums must be possible",
        "contenders.sequences.(first_difference|logit_gap|replayed_steps)": "a measurement",
        "contenders.blocks.(round|steps|tokens|decode_s|prompts)": "a measurement; sums of the first round and of seconds",
        "max_new_tokens": "at least the longest answer",
        "loop_share": "a measurement",
        "(provenance|skipped).*": "a label",
    },
}


def numbers(value, place=()) -> Iterator[tuple]:
    """The places of all numbers of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        if isinstance(child, int | float) and not isinstance(child, bool):
            yield (*place, key)
        else:
            yield from numbers(child, (*place, key))


def damaged(value) -> list:
    """Other numbers in a number's place."""
    if isinstance(value, int):
        return [value + 1, value - 1, 3 * value + 7, -value - 1]
    return [1.3 * value, 0.6 * value, 10 * value + 1, -value - 0.1] if value else [0.3, 0.7, 11.0, -0.1]


def put(document, place, value):
    *path, last = place
    for key in path:
        document = document[key]
    before = document.get(last) if isinstance(document, dict) else document[last]
    document[last] = value
    return before


def accepted_damages(file: Path, count: int | None) -> dict[str, list]:
    """Place without list items -> the damages there that were taken; ``count`` of all possible ones are tried."""
    document = json.loads(file.read_text())
    tried = [(place, n) for place in numbers(document) for n in range(4)]
    if count is not None:
        tried = random.Random(0).sample(tried, min(count, len(tried)))
    target, found = file.with_name(f"damaged-{file.name}"), {}
    for place, n in tried:
        before = put(document, place, None)
        put(document, place, damaged(before)[n])
        target.write_text(json.dumps(document))
        try:
            load_result(target)
        except InvalidInput:
            pass
        else:
            name = ".".join(str(key) for key in place if isinstance(key, str))
            found.setdefault(name, []).append((place, before, damaged(before)[n]))
        put(document, place, before)
    return found


def check(file: Path, count: int | None = None) -> None:
    free = [re.compile(name) for name in FREE[file.name]]
    for name, cases in accepted_damages(file, count).items():
        assert any(pattern.fullmatch(name) for pattern in free), (name, cases[:3])


@pytest.fixture
def files(demo_run, tmp_path) -> dict[str, Path]:
    """A file of each type, to be damaged beside it."""
    found = {name: tmp_path / name for name in FREE}
    for name, file in found.items():
        if name not in ("bench.json", "plan.json"):
            shutil.copy(demo_run / name, file)
    some_plan((1, 4)).save(found["plan.json"])
    bench = some_bench(("code", "chat"), blocks=2)
    replace(bench, contenders=tuple(map(with_answers, bench.contenders))).save(found["bench.json"])
    return found


@pytest.mark.parametrize("name", FREE)
def test_a_damaged_number_is_refused_or_nothing_contradicts_it(files, name):
    load_result(files[name])
    check(files[name], SAMPLE)


def test_the_totals_of_a_mix_and_the_losses_elsewhere_must_agree_with_the_entries(tmp_path):
    several = PlanRequest(Limits(16), batch_sizes=(1, 4, 16))
    mix = replace(several, batch_sizes={1: 2.0, 16: 1.0})
    for request, keys in ((mix, ("tokens_per_s", "own_tokens_per_s", "speedup")), (several, ("elsewhere",))):
        plan_trees(long_trace(3), some_profile((1, 4, 16)), request).save(tmp_path / "plan.json")
        load_result(tmp_path / "plan.json")
        whole = json.loads((tmp_path / "plan.json").read_text())
        for key in keys:
            document = json.loads(json.dumps(whole))
            if key == "elsewhere":
                document["entries"][0][key]["1"] += 0.01
            else:
                document["total"][key] *= 1.01
            (tmp_path / "plan.json").write_text(json.dumps(document))
            with pytest.raises(InvalidInput, match=r"(total\.\w+|\b1) must be"):
                load_result(tmp_path / "plan.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", FREE)
def test_every_damaged_number_is_refused_or_nothing_contradicts_it(files, own_demo_run, name):
    check(files[name])
    if name == "bench.json":
        treeopt("bench", "--run", own_demo_run, "--num-prompts", 3)
    check(own_demo_run / name)


CONTRADICTIONS = (  # file, place, what stands there then, what is said
    ("bench.json", ("contenders", 1, "identical"), 99, "identical must be from 0 to 4, but is 99"),
    ("bench.json", ("contenders", 1, "tokens_per_step"), 2.5, r"must be 1\.72\d+ \(tokens / steps\), but is 2\.5"),
    (
        "bench.json",
        ("contenders", 1, "tokens_per_s"),
        999.0,
        r"must be \S+ \(tokens / decode_s of the blocks\), but is 999",
    ),
    (
        "bench.json",
        ("contenders", 0, "blocks", 0, "decode_s"),
        -1.0,
        "blocks.0: decode_s must be at least 0, but is -1",
    ),
    ("profile.json", ("points", 0, "round"), [0], "the rounds must be .* but is 1"),
    ("profile.json", ("points", 0, "accepted_mean"), 40.0, "accepted_mean must be from 0 to .* but is 40"),
    ("calibration.json", ("survival", 0), 0.99, "survival at depth 1 must be .* but is 0.99"),
    ("calibration.json", ("survival", 1), 1.5, "survival at depth 2 must be .* but is 1.5"),
    ("calibration.json", ("prefix_counts", "visited", 0), 3, r"the count of \[0\] must be from 1 to 3, but is \d+"),
    ("plan.json", ("entries", 0, "speedup"), 9.5, "entries.0: speedup must be .* but is 9.5"),
    ("plan.json", ("entries", 0, "tokens_per_s_stderr"), -2.0, "tokens_per_s_stderr must be at least 0, but is -2"),
    ("plan.json", ("entries", 0, "predicted", "replayed"), 1.01, "predicted.replayed must be .* but is 1.01"),
    ("plan.json", ("entries", 0, "curve", 1, "tokens_per_s"), 3.0, "curve.1: tokens_per_s must be .* but is 3"),
    ("plan.json", ("entries", 0, "accepted"), [0.505, 0.404], "the sum of accepted must be from .* but is 0.909"),
    ("plan.json", ("constraint", "budget"), 2, "size must be from 0 to 2"),
    ("plan.json", ("entries", 0, "elsewhere"), {"7": 0.1}, "entries.0.elsewhere: its batch sizes .* but one is 7"),
    ("plan.json", ("entries", 0, "interval95", "speedup"), [1.2, 1.1], "the lower one first"),
    ("profile.json", ("processor_share",), 1.5, "processor_share must be from 0 to 1, but is 1.5"),
    ("calibration.json", ("groups",), {"x": {"hits": [[]], "trials": [1]}}, "every group must have"),
)


@pytest.mark.parametrize(("name", "place", "value", "says"), CONTRADICTIONS)
def test_a_contradiction_is_named_with_its_place_and_both_numbers(files, name, place, value, says):
    document = json.loads(files[name].read_text())
    put(document, place, value)
    files[name].write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=f"{name} is not as it should be.*{says}"):
        load_result(files[name])


TRACES = {
    "end": (lambda a: {"end": np.full_like(a["end"], 9)}, "end must be from 0 to 3, but is 9"),
    "group": (lambda a: {"group": a["group"] + 40}, "group must be "),
    "a hit past the end": (lambda a: {"ranks": np.zeros_like(a["ranks"])}, "no token to guess"),
    "columns": (lambda a: {"ranks": a["ranks"][:, :-1]}, "num_heads must be"),
    "prompts": (lambda a: {"meta": meta_of(a, prompt_sha256=["x"])}, r"prompt_sha256 must be \d+ .* but is 1"),
    "top_k": (lambda a: {"meta": meta_of(a, top_k=1)}, "below top_k"),
    "limit": (lambda a: {"meta": meta_of(a, max_new_tokens=3)}, "tokens of a sequence must be from 0 to 3"),
    "lengths": (lambda a: {"prompt_tokens": -a["prompt_tokens"]}, "prompt_tokens must be at least 0"),
}


def meta_of(arrays, **changes):
    return np.array(json.dumps({**json.loads(str(arrays["meta"])), **changes}))


@pytest.mark.parametrize("name", TRACES)
def test_a_traces_arrays_must_fit_together(demo_run, tmp_path, name):
    change, says = TRACES[name]
    with np.load(demo_run / "trace.npz") as archive:
        arrays = dict(archive)
    np.savez_compressed(tmp_path / "trace.npz", **{**arrays, **change(arrays)})
    with pytest.raises(InvalidInput, match=f"trace.npz is not a rank trace: .*{says}"):
        load_result(tmp_path / "trace.npz")


@pytest.mark.parametrize(
    ("key", "value"),
    [("group_names", 3), ("batch_sizes", ["x"]), ("num_heads", "x"), ("eos_ids", [[1]]), ("prompt_sha256", [[]])],
)
def test_values_of_other_types_are_refused_in_a_trace(demo_run, tmp_path, key, value):
    with np.load(demo_run / "trace.npz") as archive:
        arrays = dict(archive)
    np.savez_compressed(tmp_path / "trace.npz", **{**arrays, "meta": meta_of(arrays, **{key: value})})
    with pytest.raises(InvalidInput, match=f"trace.npz must have a .* under meta '{key}'"):
        load_result(tmp_path / "trace.npz")


def test_a_profile_without_bandwidth_or_with_a_level_too_many_is_no_traceback(tmp_path):
    plain, file = {"batch_size": 1, "context_tokens": 1, "step_ms": [1.0]}, tmp_path / "profile.json"
    floor = {**plain, "gb_per_s": 0, "weight_bytes": 1, "cache_bytes": 0, "floor_ms": 1.0, "plain_over_floor": 1.0}
    deep = {**plain, "size": 2, "depth": 1, "expanding": [1], "parts_ms": {"draft 7": [0.1]}}
    document = {"schema": "treeopt.profile/1", "points": [deep], "autoregressive": [plain]}
    file.write_text(json.dumps(document))
    load_result(file)
    file.write_text(json.dumps({**document, "bandwidth_floor": [floor]}))
    with pytest.raises(
        InvalidInput, match=r"bandwidth_floor\.0: gb_per_s and floor_ms must be above 0, but are 0 and 1"
    ):
        load_result(file)


def test_a_probes_answers_are_as_long_as_its_steps_make_them(tmp_path):
    probe = random_probe(np.random.default_rng(0), Tree.from_choices([[0], [1], [0, 0]]), 40, ends=0.0)
    probe.save(tmp_path / "probe.npz")
    load_result(tmp_path / "probe.npz")
    replace(probe, lengths=probe.lengths + 1).save(tmp_path / "probe.npz")
    with pytest.raises(InvalidInput, match=r"probe\.npz is not a probe: the length of sequence 0.* but is"):
        load_result(tmp_path / "probe.npz")


@pytest.mark.parametrize("file", [f for kind in ("calibration", "profiles") for f in shipped(kind).values()], ids=str)
def test_shipped_files_agree_with_themselves(file):
    load_result(file)


def test_numbers_agree_at_the_precision_that_they_are_written_with():
    agree("tokens_per_s", 151.0, 1e3 * 1.8 / 12.0, "batch_size x tokens_per_step / step_ms", 1.8, 12.0)
    agree("tokens", 9, 9, "the answers'")
    for said, follows in ((1.81, 1.8), (10, 9)):
        with pytest.raises(InvalidInput, match="must be"):
            agree("x", said, follows, "y")
    with pytest.raises(InvalidInput, match=r"^x must be 1, but is 0\.9\.$"):
        within(1, 1, x=0.9)
