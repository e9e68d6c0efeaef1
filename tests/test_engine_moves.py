"""What engines changed, line by line: what is written for their newest releases, and what older forms are read as."""

import json
from dataclasses import replace

import pytest
import yaml

from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.export import numbers, tensorrt_llm, vllm
from treeopt.export.chains import flags
from treeopt.export.engine import COMMANDS, Request
from treeopt.export.reading import read_choices
from treeopt.export.table import ENGINES
from treeopt.export.write import check_rule_of, export_request, method_of
from treeopt.growth.objectives import OBJECTIVES
from treeopt.pipeline import convert
from treeopt.pipeline.search import SearchOptions, request_of
from treeopt.records.calibration import Calibration
from treeopt.trees.tree import Tree

SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}
REJECTED = {**SAMPLED, "rule": "rejection"}
METHODS = [(engine.name, method) for engine in ENGINES.values() for method in engine.methods]
IDS = [f"{engine}-{method.name}" for engine, method in METHODS]


def chain(engine, drafter, length=3, **options):
    lengths = options.pop("lengths", ((1, None, length),))
    return export_request(Request(lengths=lengths, num_heads=8, drafter=drafter, **options), engine)


def command(text):
    return {COMMANDS: text}


@pytest.mark.parametrize(("engine", "method"), METHODS, ids=IDS)
def test_every_export_has_its_launch_command_as_a_file(engine, method):
    what = {"lengths": ((1, None, 2),)} if method.shape == "chain" else {"tree": Tree.dense([2, 1])}
    written = export_request(Request(num_heads=4, drafter=method.drafters[0], **what), engine, method=method.name)
    head, *rest = written.files[COMMANDS].splitlines()
    assert head.startswith(f"# For {ENGINES[engine].title}, checked against {method.checked}.")
    assert written.command in "\n".join(rest)
    assert {word.partition("=")[0] for word in written.command.split() if word[:2] == "--"} <= flags(
        written.files
    ).keys()


@pytest.mark.parametrize("engine", ["lmdeploy", "llama-cpp", "redrafter", "rtp-llm", "sglang", "vllm", "tgi"])
@pytest.mark.parametrize("length", [1, 5])
def test_lengths_of_exported_commands_are_read_by_the_other_commands(engine, length):
    for drafter in (kind for one in ENGINES[engine].methods for kind in one.drafters):
        text = chain(engine, drafter, length).files[COMMANDS]
        assert read_choices(text) == Tree.chain(length).choices, text


# llama.cpp


@pytest.mark.parametrize(
    ("drafter", "asked"),
    [
        ("draft-model", {"--spec-type": "draft-simple", "--spec-draft-model": "DRAFTER.gguf"}),
        ("eagle3", {"--spec-type": "draft-eagle3", "--spec-draft-model": "DRAFTER.gguf"}),
        ("mtp", {"--spec-type": "draft-mtp"}),  # its own layers
    ],
)
def test_llama_cpp_is_told_the_type_of_its_drafter_and_how_far_it_drafts(drafter, asked):
    limits = {"--spec-draft-n-max": "3", "--spec-draft-n-min": "0", "--spec-draft-p-min": "0"}
    assert flags(chain("llama-cpp", drafter).files) == {"--model": "MODEL.gguf", **asked, **limits}


@pytest.mark.parametrize(("length", "looked_up"), [(1, 1), (3, 3), (8, 3)])
def test_llama_cpp_looks_up_no_more_than_it_drafts_else_it_drafts_nothing(length, looked_up):
    given = flags(chain("llama-cpp", "ngram", length).files)
    assert given["--spec-ngram-simple-size-n"] == str(looked_up)
    longer = command(f"llama-server --spec-type ngram-simple --spec-ngram-simple-size-m {length}")  # it looks 12 up
    assert numbers.parse_llama_cpp(longer) == ((1, None, 0),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("llama-server --model-draft D --draft-max 3", "no --draft-max any more"),
        ("llama-server --draft-min 0 --spec-type draft-mtp", "no --draft-min any more"),
        ("llama-server --spec-type eagle3", "must be one of"),
        ("llama-server --spec-type draft-mtp --spec-draft-n-max some", "whole number"),
    ],
)
def test_llama_cpp_ends_with_an_error(text, why):
    with pytest.raises(InvalidInput, match=why):
        numbers.parse_llama_cpp(command(text))


def test_llama_cpp_without_a_type_or_a_drafter_drafts_nothing_and_with_a_limit_of_0_one_token():
    for text in ("llama-server --spec-draft-model D", "llama-server --spec-type draft-simple", "llama-server"):
        assert numbers.parse_llama_cpp(command(text)) == ((1, None, 0),)
    assert numbers.parse_llama_cpp(command("llama-server --spec-type draft-mtp --spec-draft-n-max 0")) == (
        (1, None, 1),
    )


# vLLM


def test_vllm_has_medusa_until_0_32(tmp_path):
    method = method_of("vllm", "medusa")
    said = "removed upstream in 0.33.0; it is for releases up to 0.32.0"
    assert (method.checked, method.versions) == (vllm.MEDUSA_UNTIL, f"releases up to {vllm.MEDUSA_UNTIL}")
    assert any(said in note for note in chain("vllm", "medusa").notes)
    calibration = Calibration([[60, 20], [50, 20]], [100, 100], meta={"drafter": {"kind": "medusa"}})
    _, warnings = request_of(SearchOptions(engine="vllm", objective=next(iter(OBJECTIVES))), calibration, None)
    assert any(said in warning for warning in warnings)
    _, notes = convert(str(demo.DRAFTERS[demo.NAME]["medusa"]), tmp_path / "heads", layout="vllm")
    assert any("up to 0.32.0" in note for note in notes)
    _, notes = convert(str(demo.DRAFTERS[demo.NAME]["medusa"]), tmp_path / "others", layout="medusa")
    assert not any("0.32.0" in note for note in notes)


def test_vllm_takes_multiples_of_the_mtp_layers_and_that_is_said():
    assert any("does not divide" in note for note in chain("vllm", "mtp").notes)
    for other in (chain("vllm", "mtp", 1), chain("vllm", "eagle3")):
        assert not any("does not divide" in note for note in other.notes)
    assert any("MTP" in field for field in method_of("vllm", "mtp").derived)


def test_vllm_drops_a_schedule_with_data_parallelism_and_that_is_said():
    written = chain("vllm", "eagle3", lengths=((1, 4, 5), (5, None, 1)))
    assert any("--data-parallel-size above 1 vLLM drops the schedule and keeps 5" in note for note in written.notes)
    assert not any("data-parallel" in note for note in chain("vllm", "eagle3").notes)


# LMDeploy, RTP-LLM, EAGLE-1, Triton, ReDrafter


def test_lmdeploy_speculates_with_its_pytorch_backend_alone():
    written = chain("lmdeploy", "eagle3")
    assert flags(written.files)["--backend"] == "pytorch"
    without = written.command.replace(" --backend pytorch", "")
    for text in (without, written.command.replace("pytorch", "turbomind")):
        assert numbers.parse_lmdeploy(command(text)) == ((1, None, 0),)
    assert "--speculative-draft-model" not in chain("lmdeploy", "mtp").command  # the layer of MODEL
    with pytest.raises(InvalidInput, match="must be one of eagle, eagle3"):
        numbers.parse_lmdeploy(command(written.command.replace("eagle3", "medusa")))


@pytest.mark.parametrize(
    ("drafter", "kind"), [("mtp", "mtp"), ("eagle", "eagle"), ("eagle3", "eagle"), ("dspark", "dspark")]
)
def test_rtp_llm_is_told_the_type_of_its_drafter(drafter, kind):
    written = chain("rtp-llm", drafter)
    given = flags(written.files)
    assert (given["--sp_type"], given["--sp_model_type"]) == (kind, "DRAFTER_TYPE")
    for name in ("--sp_model_type DRAFTER_TYPE", "--sp_checkpoint_path DRAFTER"):
        with pytest.raises(InvalidInput, match=f"needs {name.split()[0]}"):
            numbers.parse_rtp_llm(command(written.command.replace(name, "")))


def test_rtp_llm_takes_no_draft_model_any_more():
    with pytest.raises(InvalidInput, match="kinds mtp, eagle, eagle3, dspark, but this drafter is draft-model"):
        chain("rtp-llm", "draft-model")
    for kind in ("vanilla", "eagle3", "deterministic"):
        with pytest.raises(InvalidInput, match="mtp, eagle or dspark"):
            numbers.parse_rtp_llm(command(f"serve --sp_type {kind} --sp_model_type m --sp_checkpoint_path p"))


def test_eagle_1_heeds_the_tree_on_its_branch_v1_and_decodes_greedily_if_told():
    written = export_request(Request(tree=Tree.dense([2, 1]), num_heads=4, drafter="eagle"), "eagle1")
    assert any("git checkout v1" in note and "ignored" in note for note in written.notes)
    assert flags(written.files)["--temperature"] == "0"
    assert "v1" in method_of("eagle1").versions


@pytest.mark.parametrize("choices", [[[0], [2], [0, 0], [2, 0]], [[1]], [[3], [3, 1]]])
def test_triton_reads_a_gap_at_depth_1_that_tensorrt_llms_python_runtime_does_not(choices):
    request = Request(tree=Tree.from_choices(choices), num_heads=4, drafter="medusa")
    written = export_request(request, "triton")
    assert method_of("triton").parse(written.files) == request.tree
    assert tensorrt_llm.in_cpp(choices, len(choices), 4) == request.tree
    with pytest.raises(InvalidInput, match="without gaps at depth 1"):
        export_request(request, "tensorrt-llm")


def test_redrafter_is_told_to_decode_greedily_with_one_beam():
    written = chain("redrafter", "redrafter")
    assert flags(written.files) == {
        **dict.fromkeys(("--hf_tokenizer", "--hf_llm"), "MODEL"),
        "--hf_drafter": "DRAFTER",
        "--greedy_search": "True",
        "--beam_width": "1",
        "--beam_length": "4",
    }
    for wrong in (written.command.replace("width=1", "width=4"), written.command.replace(" --beam_width=1", "")):
        with pytest.raises(InvalidInput, match="needs --beam_width 1"):
            numbers.parse_redrafter(command(wrong))


def test_tensorrt_llms_pytorch_backend_runs_no_eagle_1():
    """It takes decoding_type Eagle for Eagle3."""
    assert method_of("tensorrt-llm", "eagle").name == "eagle"
    assert "eagle" not in next(m for m in ENGINES["tensorrt-llm"].methods if m.name == "draft-len").drafters


# Acceptance rules


def test_p_q_rejection_is_asked_for_where_an_engine_has_it():
    config = json.loads(chain("vllm", "draft-model", acceptance=REJECTED).files[vllm.FILE])
    assert config["draft_sample_method"] == "probabilistic"
    for lengths in (((1, None, 3),), ((1, 4, 3), (5, None, 1))):
        written = chain("sglang", "eagle3", lengths=lengths, acceptance=REJECTED)
        assert "--speculative-use-rejection-sampling" in flags(written.files)
        assert any("whole vocabulary" in note for note in written.notes)
    options = yaml.safe_load(chain("tensorrt-llm", "draft-model", acceptance=REJECTED).files["llm_api_options.yml"])
    assert options["speculative_config"]["use_rejection_sampling"] is True


@pytest.mark.parametrize("rule", [None, SAMPLED])
def test_sampling_and_comparing_is_what_engines_do_unless_told(rule):
    assert "draft_sample_method" not in chain("vllm", "draft-model", acceptance=rule).files[vllm.FILE]
    assert "rejection" not in chain("sglang", "eagle3", acceptance=rule).command
    options = yaml.safe_load(chain("tensorrt-llm", "draft-model", acceptance=rule).files["llm_api_options.yml"])
    assert options["speculative_config"].get("use_rejection_sampling") is (None if rule is None else False)
    for engine, drafter in (("lmdeploy", "eagle3"), ("rtp-llm", "mtp"), ("llama-cpp", "mtp"), ("sglang", "ngram")):
        assert chain(engine, drafter, acceptance=rule).command == chain(engine, drafter).command


def test_older_tensorrt_llm_has_no_setting_for_the_rule():
    with pytest.raises(InvalidInput, match="no use_rejection_sampling"):
        chain("tensorrt-llm", "draft-model", acceptance=REJECTED, version="lower-bound")


@pytest.mark.parametrize(("engine", "drafter"), [("sglang", "draft-model"), ("llama-cpp", "draft-model")])
def test_a_rule_that_an_engine_of_chains_lacks_is_refused_with_those_that_have_it(engine, drafter):
    with pytest.raises(InvalidInput, match="accepts by the rule greedy or sample, but the plan holds") as refused:
        chain(engine, drafter, acceptance=REJECTED)
    assert "export --to tensorrt-llm or vllm" in str(refused.value)


@pytest.mark.parametrize(("engine", "method"), METHODS, ids=IDS)
def test_rules_are_known_for_every_way_into_an_engine(engine, method):
    assert method.rules[0] == "greedy"
    for record, rule in ((SAMPLED, "sample"), (REJECTED, "reject")):
        if rule in method.rules:
            assert "requests must ask for the same" in check_rule_of(record, method, engine)[0]
        else:
            with pytest.raises(InvalidInput, match="accepts by the rule"):
                check_rule_of(record, method, engine)


@pytest.mark.parametrize("engine", ["lmdeploy", "llama-cpp", "redrafter", "rtp-llm"])
def test_a_command_that_its_engine_would_read_otherwise_is_not_written(engine, monkeypatch):
    method = ENGINES[engine].methods[0]
    broken = replace(method, write=lambda asked: method.write(replace(asked, lengths=((1, None, 7),))))
    monkeypatch.setitem(ENGINES, engine, replace(ENGINES[engine], methods=(broken,)))
    with pytest.raises(InvalidInput, match="Nothing was written"):
        chain(engine, None)


PARSERS = (numbers.parse_lmdeploy, numbers.parse_llama_cpp, numbers.parse_redrafter, numbers.parse_rtp_llm)
HUGE = "9" * 5000


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("value", ["$(x)", "-1", "", "1.5", HUGE, "3; touch x"])
def test_a_length_that_is_no_number_is_refused_in_a_short_sentence(parse, value):
    text = (
        "serve --backend pytorch --speculative-algorithm eagle3 --spec-type draft-mtp --sp_type mtp --sp_model_type m "
        "--sp_checkpoint_path p --beam_width 1 "
    )
    names = ("speculative-num-draft-tokens", "spec-draft-n-max", "gen_num_per_cycle", "beam_length")
    with pytest.raises(InvalidInput) as refused:
        parse(command(text + " ".join(f"--{name}='{value}'" for name in names)))
    assert len(str(refused.value)) < 200


# Drafters of blocks, and suffix decoding


@pytest.mark.parametrize(
    ("engine", "drafter", "asked"),
    [
        (
            "sglang",
            "dflash",
            {"--speculative-algorithm": "DFLASH", "--speculative-num-draft-tokens": "6"},
        ),  # the root too
        ("sglang", "dspark", {"--speculative-algorithm": "DSPARK", "--speculative-dspark-block-size": "5"}),
        ("lmdeploy", "dflash", {"--speculative-algorithm": "dflash", "--speculative-num-draft-tokens": "5"}),
        ("llama-cpp", "dflash", {"--spec-type": "draft-dflash", "--spec-draft-n-max": "5"}),
        ("llama-cpp", "dspark", {"--spec-type": "draft-dspark", "--spec-draft-n-max": "5"}),
    ],
)
def test_drafters_of_blocks_get_the_length_as_the_engine_counts_it(engine, drafter, asked):
    given = flags(chain(engine, drafter, 5).files)
    assert asked.items() <= given.items()
    assert any("DRAFTER" in value for value in given.values())


def test_vllm_names_drafters_of_blocks():
    for drafter in ("dflash", "dspark"):
        written = chain("vllm", drafter, 7)
        config = json.loads(written.files[vllm.FILE])
        assert config == {"method": drafter, "model": "DRAFTER", "num_speculative_tokens": 7}


def test_vllm_drops_a_schedule_of_suffix_decoding_so_it_gets_none():
    assert json.loads(chain("vllm", "suffix").files[vllm.FILE]) == {"method": "suffix", "num_speculative_tokens": 3}
    with pytest.raises(InvalidInput, match=r"suffix decoding takes one chain length.*--batch-size"):
        chain("vllm", "suffix", lengths=((1, 4, 5), (5, None, 1)))
