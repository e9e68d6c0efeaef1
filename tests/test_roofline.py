"""Computed latencies: the Medusa paper's operators and its Tables 6 to 8, shapes of models, and what is refused."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from treeopt.cli import cli
from treeopt.errors import InvalidInput, Unsupported
from treeopt.latency.costs import StepCosts
from treeopt.latency.hardware import (
    DEVICES,
    ITEMSIZE,
    KNOWN,
    SHAPES,
    Device,
    ModelShape,
    device_of,
    drafting_of,
    shape_of,
)
from treeopt.latency.roofline import (
    EFFICIENCY,
    Operator,
    Step,
    analytical_profile,
    compute_us,
    draft_operators,
    linear,
    peak_us,
    step_ms,
    step_operators,
)
from treeopt.pipeline.export import export
from treeopt.pipeline.profile.untimed import profile_analytical
from treeopt.records.options import ProfileOptions, Source
from treeopt.records.rundir import RunDirectory
from treeopt.trees.tree import FIXED, Cost

from .conftest import published_data

A100, LLAMA = DEVICES["A100-80GB-PCIe"], SHAPES["llama-33b"]
# The relative errors of the model's TFLOP/s that the documents state: median and worst, upper bounds.
STATED = {6: (0.019, 0.067), 7: (0.024, 0.119), 8: (0.021, 0.231)}


def config(tmp_path, **changed):
    """The config.json of a small model with grouped heads."""
    known = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    known |= {"intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100, **changed}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in known.items() if value is not None}))
    return str(path)


def layer_weights(shape):
    """Numbers of all layers of a dense model, norms left out."""
    attention = shape.width * shape.head_width * (2 * shape.heads + 2 * shape.kv_heads)
    return shape.layers * (attention + 3 * shape.width * shape.inner)


START_US = 32.5  # that an attention kernel of the paper takes to begin, fitted
# Whole steps at batch size 1: plain ones in tokens per second (Table 4, AlpacaEval), the overhead of 64 rows and Medusa-2's
# heads (Table 1, MT-Bench), and steps of 64 rows and Medusa-1's heads in ms (medians of three runs in the code's repository).
STEPS = {"llama-7b": (37.07, 1.22, 25.3), "llama-13b": (29.01, 1.23, 35.5), "llama-33b": (17.87, 1.27, 68.6)}


def operator_of(table: int, key: int, candidates: int) -> Operator:
    """An attention product (Tables 6 and 7) or a linear layer (8); ``key`` is the number of keys (6) or the batch size."""
    if table == 8:
        return linear("up", key * candidates, LLAMA.width, LLAMA.inner)
    batch_size, keys, width = *((16, key) if table == 6 else (key, 1024)), LLAMA.head_width
    moved = candidates * width + keys * width + candidates * keys  # Table 5: every number that goes in or out once
    products = batch_size * LLAMA.heads
    return Operator("QK^T", "attention", 2 * products * candidates * keys * width, ITEMSIZE * products * moved)


def published(table: int) -> list[tuple[Operator, float, float]]:
    """The operator of each of the 56 points, its TFLOP/s as measured, and its operations per byte."""
    block = published_data("figures")[f"medusa_table{table}"]
    return [
        (operator_of(table, int(row), candidates), *point)
        for row, points in block["rows"].items()
        for candidates, point in zip(block["candidates"], points, strict=True)
    ]


def predicted(operator: Operator, share: float | None = None, start_us: float = START_US) -> float:
    """TFLOP/s by the roofline; ``share`` of the roofs, by default as fitted."""
    begin = start_us if operator.kind == "attention" else 0.0
    return operator.flops / (begin + peak_us(operator, A100) / (share or EFFICIENCY[operator.kind])) / 1e6


@pytest.mark.parametrize("table", STATED)
def test_intensities_are_the_published_ones_and_speeds_as_near_as_stated(table):
    points = published(table)
    assert len(points) == 56
    assert [operator.intensity for operator, *_ in points] == pytest.approx([point[2] for point in points], abs=0.005)
    errors = [abs(predicted(operator) / measured - 1) for operator, measured, _ in points]
    assert (np.median(errors) <= STATED[table][0], max(errors) <= STATED[table][1]) == (True, True)


def test_the_efficiencies_are_those_that_fit_the_tables_best():
    """The linear one is a median of ratios; the attention pair is the least sum of relative errors nearby."""
    attention = [*published(6), *published(7)]

    def total(share, start_us):
        return sum(
            abs(math.log(predicted(operator, share, start_us) / measured)) for operator, measured, _ in attention
        )

    ratios = [measured / predicted(operator, share=1.0) for operator, measured, _ in published(8)]
    assert EFFICIENCY["linear"] == pytest.approx(float(np.median(ratios)), abs=5e-4)
    best = total(EFFICIENCY["attention"], START_US)
    for share, start_us in ((0.72, 32.5), (0.81, 32.5), (0.764, 26.0), (0.764, 39.0), (0.8, 36.0), (0.73, 29.0)):
        assert total(share, start_us) > best


def test_the_errors_that_the_documents_state_are_the_tested_ones(request):
    text = (request.config.rootpath / "docs" / "your-own-model.md").read_text(encoding="utf-8")
    for table, (median, worst) in STATED.items():
        assert f"| {table} |" in text
        assert f"| {median:.1%} | {worst:.1%} |".replace("%", " %") in text


def test_operators_of_a_step_by_hand(tmp_path):
    """8 heads of 8 on 2 key heads: qkv is 64 x 96, three layers; two sequences, trees of 5, 11 tokens before."""
    shape, *_ = shape_of(config(tmp_path))
    found = {op.name: op for op in step_operators(shape, Step(2, 11, 5, 4))}
    assert found["qkv"].flops == 2 * 10 * 64 * 96
    assert found["qkv"].moved_bytes == 2 * (10 * 64 + 64 * 96 + 10 * 96)
    assert found["attention"].flops == 2 * (2 * 2 * 8 * 5 * 16 * 8)
    assert found["attention"].moved_bytes == 2 * 2 * (2 * 5 * 64 + 2 * 16 * 16)  # 4 heads share a key head; no scores
    assert found["down"].product == (10, 96, 64)
    assert found["lm_head"].product == (10, 64, 100)
    assert found["head lm_head"].product == (2, 64, 100)
    assert (found["head block"].times, found["up"].times, found["lm_head"].times) == (4, 3, 1)
    plain = step_operators(shape, Step(2, 11))
    assert not [op for op in plain if op.name.startswith("head")]


def test_a_step_is_the_sum_of_its_operators_at_the_roofs():
    """One row of 7B on a device whose computing is free: weights and cache over the bandwidth."""
    device = Device("memory", tflops=1e9, tb_per_s=2.0)
    shape = SHAPES["llama-7b"]
    weights = layer_weights(shape) + shape.width * shape.vocab_size
    assert step_ms(shape, device, Step(1, 0)) == pytest.approx(
        2 * weights / 2e12 * 1e3 / EFFICIENCY["linear"], rel=2e-3
    )


@given(rows=st.integers(1, 4000), inner=st.integers(1, 64), columns=st.integers(1, 4000))
def test_tiles_never_compute_less_than_the_product(rows, inner, columns):
    op = linear("", rows, inner, columns)
    for device in (A100, Device("no units", 312, 1.935)):
        assert compute_us(op, device) >= op.flops / device.tflops / 1e6 * (1 - 1e-9)
        assert compute_us(linear("", rows + 1, inner, columns), Device("", 312, 1.9)) >= compute_us(
            op, Device("", 312, 1.9)
        )


def test_the_staircase_of_table_8_has_its_stairs():
    """6656 x 17920 on 108 units: 128 rows are one wave, 256 and 384 two, 512 three (Table 8: 209, 363, 387, 552 us)."""
    wave = compute_us(linear("", 1, 6656, 17920), A100)
    waves = [round(compute_us(linear("", rows, 6656, 17920), A100) / wave) for rows in (128, 129, 384, 385, 512)]
    assert waves == [1, 2, 2, 3, 3]


def test_a_computed_profile_covers_every_size_and_depth():
    found = analytical_profile(LLAMA, A100, batch_sizes=(1, 4), contexts=(512, 1024), sizes=range(2, 17), num_heads=3)
    assert found.settings == [(1, 512), (1, 1024), (4, 512), (4, 1024)]
    assert StepCosts(found, 4, 512).reach == (16, 3)
    assert {(p.size, p.depth) for p in found.points} == {(n, d) for n in range(2, 17) for d in range(1, min(4, n))}
    step = StepCosts(found, 4, 512).ms([Cost(FIXED, 9, 2)])[0]
    wanted = step_ms(LLAMA, A100, Step(4, 512, 9, 2))
    assert step == pytest.approx(wanted, rel=1e-4)
    assert StepCosts(found, 1, 1024).plain.ms > StepCosts(found, 1, 512).plain.ms
    assert found.info["measures"] == "step (analytical)"


def test_search_and_export_say_that_nothing_was_measured(tmp_path):
    run = str(tmp_path / "run")
    runner = CliRunner()

    def said(*arguments):
        result = runner.invoke(cli, [*arguments, "--run", run])
        assert result.exit_code == 0, result.output
        return result.stderr

    told = said("profile", "--analytical", "L4", "--model", "llama-13b", "--budget", "16")
    assert "Nothing was timed" in told
    assert "no L4 was measured" in told
    assert "Nothing was measured: the step latencies are computed" in said(
        "search", "--calibration", "vicuna-13b-medusa1", "--profile", f"{run}/profile.json", "--budget", "16"
    )
    _, written = export(RunDirectory(run), "medusa")
    assert any("roofline of L4, nothing measured" in note for note in written.notes)


def test_configs_say_their_shape(tmp_path):
    shape, file, dtype = shape_of(config(tmp_path, torch_dtype="float16"))
    assert (shape.head_width, shape.kv_heads, dtype) == (8, 2, "float16")
    assert file.name == "config.json"
    assert shape_of(str(tmp_path))[0] == shape
    assert shape_of(config(tmp_path, num_key_value_heads=None))[0].kv_heads == 8
    assert shape_of(config(tmp_path, model_type="qwen3"))[0].head_width == 128
    assert shape_of(config(tmp_path, head_dim=16))[0].head_width == 16
    assert shape_of("llama-33b")[0] == LLAMA


LLAMA3 = ModelShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256)


def test_no_stair_is_made_up_where_none_is_known():
    """From 256 to 264 rows a step became 43 % longer below the ridge."""
    ms = [step_ms(LLAMA3, DEVICES["H100-SXM"], Step(8, 512, n)) for n in (32, 33)]
    assert ms[0] < ms[1] < 1.03 * ms[0]


def moved(shape, kind, depth, size):
    """Bytes that drafting moves, on a device whose computing is free, and one sequence."""
    step = Step(1, 64, size, depth)
    return sum(op.times * op.moved_bytes for op in draft_operators(shape, drafting_of(kind, shape), step))


def test_each_drafter_costs_what_its_weights_say(tmp_path):
    """A chain of three guesses: three passes of one row each, by hand from the shapes; activations are a few per cent."""
    width, vocabulary = LLAMA3.width, LLAMA3.vocab_size
    layer = 2 * layer_weights(LLAMA3) // 32
    wanted = {
        "medusa": 2 * (width**2 + width * vocabulary),
        "hydra": 2 * (3 * width**2 + width * vocabulary),
        "eagle": layer + 2 * (2 * width**2 + width * vocabulary),
        "eagle3": layer + 2 * (2 * width**2 + width * 32000),
        "mtp": layer + 2 * (2 * width**2 + width * vocabulary),
    }
    for kind, of_a_pass in wanted.items():
        assert moved(LLAMA3, kind, 3, 4) == pytest.approx(3 * of_a_pass, rel=0.02), kind
    assert moved(LLAMA3, "ngram", 3, 4) == 0
    small = config(tmp_path, hidden_size=512, intermediate_size=1024, vocab_size=vocabulary, num_hidden_layers=2)
    draft = shape_of(small)[0]
    assert drafting_of(small, LLAMA3).kind == "draft-model"
    assert moved(LLAMA3, small, 3, 4) == pytest.approx(
        6 * (layer_weights(draft) + draft.width * draft.vocab_size), rel=0.02
    )
    layer = config(tmp_path, num_hidden_layers=1, draft_vocab_size=50)
    assert (drafting_of(layer, LLAMA3).kind, drafting_of(layer, LLAMA3).shape.vocab_size) == ("eagle3", 50)
    with pytest.raises(Unsupported, match="knows what drafting costs with medusa"):
        drafting_of("redrafter", LLAMA3)


def test_published_steps_stand_beside_the_computed_ones_in_the_documents(request):
    text = (request.config.rootpath / "docs" / "your-own-model.md").read_text(encoding="utf-8")
    for name, (tokens_per_s, overhead, tree_ms) in STEPS.items():
        plain, tree = (step_ms(SHAPES[name], A100, step) for step in (Step(1, 512), Step(1, 512, 64, 4)))
        pairs = [(1e3 / tokens_per_s, plain, ".1f"), (tree_ms, tree, ".1f"), (overhead, tree / plain, ".2f")]
        cells = [f"{a:{form}} | {b:{form}} | {100 * (b / a - 1):+.0f} %" for a, b, form in pairs]
        assert f"| `{name}` | {' | '.join(cells)} |".replace("-", "−") in text.replace("`llama-", "`llama−"), cells


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model_type": "qwen3_moe"}, Unsupported, r"knows the operators of llama, .* is a qwen3_moe"),
        ({"quantization_config": {"bits": 4}}, Unsupported, "in 16 bits, but .* is quantised"),
        ({"model_type": None}, InvalidInput, "model_type, but .* has none"),
        ({"hidden_size": 0}, InvalidInput, "must have hidden_size, .* but it has 0"),
        ({"vocab_size": "many"}, InvalidInput, "must have vocab_size"),
        ({"intermediate_size": None}, InvalidInput, "must have intermediate_size"),
        ({"num_key_value_heads": 3}, InvalidInput, "multiple of num_key_value_heads"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path, changed, error, message):
    with pytest.raises(error, match=message):
        shape_of(config(tmp_path, **changed))


def test_missing_configs_unknown_devices_and_other_dtypes_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="does not exist"):
        shape_of(str(tmp_path / "none.json"))
    for text in ("V100", "4xL4", "312", "312:x", "0:1", "nan:1", "1:2:3"):
        with pytest.raises(InvalidInput, match=r"one of A100-80GB-PCIe, .*, or TFLOPS:TB_PER_S"):
            device_of(text)
    assert device_of("h200-sxm") == DEVICES["H200-SXM"]
    with pytest.raises(Unsupported, match="bfloat16 and float16, not in float32"):
        profile_analytical(RunDirectory(tmp_path / "run"), "L4", Source("llama-7b", dtype="float32"), ProfileOptions())


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--analytical", "L4"), "--analytical needs the model's shape", 1),
        (
            ("--analytical", "L4", "--model", "llama-7b", "--calibration", "x"),
            "--calibration does not go with --analytical",
            2,
        ),
        (("--analytical", "L4", "--from-csv", "x"), "--analytical does not go with --from-csv", 2),
        (("--runtime", "vllm"), "--runtime is for --from-csv", 2),
    ],
)
def test_options_that_would_not_be_heeded_are_refused(arguments, message, code, tmp_path):
    result = CliRunner().invoke(cli, ["profile", "--run", str(tmp_path / "run"), *arguments])
    assert result.exit_code == code
    assert message in result.stderr.replace("\n", " ")


def test_every_known_device_and_architecture_is_in_the_documents(request):
    text = (request.config.rootpath / "docs" / "your-own-model.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in DEVICES)
    assert all(f"`{name}`" in text for name in (*KNOWN, *SHAPES))
