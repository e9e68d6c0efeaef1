"""Chain lengths: every engine's own look-up gives back what was asked, and what it would misread is refused.

The look-up rules are ports of the engines' own; what they are to give is computed from the ranges alone.
"""

import json
import shlex

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput, Unsupported
from treeopt.export import draft_len, numbers, sglang, tgi, vllm
from treeopt.export.chains import NO_SPECULATION, length_at, merged, ranges_of
from treeopt.export.engine import Request
from treeopt.export.table import ENGINES
from treeopt.export.write import export_request

BATCH_SIZES = range(1, 257)


def intended(lengths, batch_size):
    """The length that the ranges say."""
    return next(k for begin, end, k in lengths if begin <= batch_size and (end is None or batch_size <= end))


def request(*lengths, drafter="eagle3", heads=8, **options) -> Request:
    """For lengths (to, K), the last to being None."""
    begins = [1, *(end + 1 for end, _ in lengths[:-1])]
    ranges = tuple((begin, end, k) for begin, (end, k) in zip(begins, lengths, strict=True))
    return Request(lengths=ranges, num_heads=heads, drafter=drafter, **options)


@st.composite
def schedules(draw, most=8):
    """One to six ranges within batch sizes 1 to 256, each of 0 to 8 guesses."""
    ends = sorted(draw(st.sets(st.integers(1, 255), max_size=5)))
    return request(*((end, draw(st.integers(0, most))) for end in [*ends, None])).lengths


@st.composite
def falling(draw):
    """The same, none longer than the first."""
    lengths = draw(schedules())
    most = max(k for _, _, k in lengths)
    return ((*lengths[0][:2], most), *lengths[1:])


def served(parsed):
    return [intended(parsed, batch_size) for batch_size in BATCH_SIZES]


@given(schedules())
def test_vllm_looks_up_what_was_asked(lengths):
    written = vllm.write_chain(Request(lengths=lengths, num_heads=8, drafter="eagle3"))
    assert vllm.parse(written.files) == merged(lengths)
    assert served(vllm.parse(written.files)) == served(lengths)


@given(schedules())
def test_sglang_looks_up_what_was_asked(lengths):
    written = sglang.write_adaptive(Request(lengths=lengths, num_heads=8, drafter="mtp"))
    assert sglang.parse(written.files) == merged(lengths)
    assert served(sglang.parse(written.files)) == served(lengths)


@given(falling(), st.sampled_from(["upper-bound", "lower-bound"]))
def test_tensorrt_llm_looks_up_what_was_asked_under_both_meanings(lengths, version):
    written = draft_len.write(Request(lengths=lengths, num_heads=8, drafter="eagle3", version=version))
    assert draft_len.parse(written.files) == merged(lengths)
    assert served(draft_len.parse(written.files)) == served(lengths)
    if "llm_api_options.yml" in written.files:
        yaml.safe_load(written.files["llm_api_options.yml"])


@given(schedules())
def test_merging_keeps_every_length(lengths):
    assert served(merged(lengths)) == served(lengths)
    assert ranges_of(lambda batch_size: intended(lengths, batch_size)) == merged(lengths)


ONE_LENGTH = [
    (vllm.write_medusa, vllm.parse, "medusa"),
    (vllm.write_chain, vllm.parse, "ngram"),
    *((sglang.write, sglang.parse, drafter) for drafter in sglang.ALGORITHMS),
    *((draft_len.write, draft_len.parse, drafter) for drafter in draft_len.TYPES),
    (tgi.write_chain, tgi.parse, "medusa"),
    (tgi.write_chain, tgi.parse, "ngram"),
]


@pytest.mark.parametrize(("write", "parse", "drafter"), ONE_LENGTH)
@pytest.mark.parametrize("length", [0, 1, 4])
def test_one_length_is_read_back(write, parse, drafter, length):
    written = write(request((None, length), drafter=drafter))
    assert parse(written.files) == ((1, None, length),)
    assert written.command in written.files["commands.sh"]


def test_vllm_gets_the_documented_form():
    written = vllm.write_chain(request((16, 3), (128, 2), (None, 0), drafter="mtp"))
    config = json.loads(written.files["speculative_config.json"])
    assert config == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 16, 3], [17, 128, 2], [129, 4096, 0]],
    }
    words = shlex.split(written.command)
    assert words[:4] == ["vllm", "serve", "MODEL", "--speculative-config"]
    assert json.loads(words[4]) == config


def test_sglang_gets_the_documented_form():
    written = sglang.write_adaptive(request((7, 5), (63, 3), (None, 0), drafter="eagle"))
    assert json.loads(written.files["adaptive.json"]) == {
        "1": {"candidate_steps": [5]},
        "8": {"candidate_steps": [3]},
        "64": {"candidate_steps": [0]},
    }
    for flag in ("num-steps 5", "eagle-topk 1", "num-draft-tokens 6", "adaptive-config adaptive.json"):
        assert f"--speculative-{flag}" in written.command


@pytest.mark.parametrize(
    ("version", "schedule"),
    [(None, {4: 4, 8: 2, 32: 1}), ("1.3", {4: 4, 8: 2, 32: 1}), ("1.1", {1: 4, 5: 2, 9: 1, 33: 0})],
)
def test_tensorrt_llm_gets_the_keys_that_its_release_means(version, schedule):
    written = draft_len.write(request((4, 4), (8, 2), (32, 1), (None, 0), version=version))
    options = yaml.safe_load(written.files["llm_api_options.yml"])["speculative_config"]
    assert options == {
        "decoding_type": "Eagle3",
        "max_draft_len": 4,
        "speculative_model": "DRAFTER",
        "draft_len_schedule": schedule,
    }
    assert any("PR #10860" in note for note in written.notes)


# What engines do silently, in the ports, and what is refused instead


def test_the_other_release_of_tensorrt_llm_would_read_another_schedule():
    schedule = {4: 4, 8: 2, 32: 1}
    assert [draft_len.up_to(schedule, n) for n in (4, 8, 32, 33)] == [4, 2, 1, 0]
    assert [length_at(schedule, n) for n in (4, 8, 32, 33)] == [4, 2, 1, 1]
    assert length_at(schedule, 7) == 4 != draft_len.up_to(schedule, 7)
    with pytest.raises(InvalidInput, match="upper-bound, lower-bound"):
        draft_len.write(request((4, 4), (None, 2), version="newest"))


def test_a_first_range_that_is_not_the_longest_is_refused_for_tensorrt_llm():
    with pytest.raises(InvalidInput, match="smallest key"):
        draft_len.check({8: 2, 32: 4}, 4, "upper-bound")
    with pytest.raises(InvalidInput, match="smallest key of its draft_len_schedule"):
        draft_len.write(request((8, 2), (32, 4), (None, 0)))


@pytest.mark.parametrize(
    ("schedule", "most", "meaning", "message"),
    [
        ({4: 4, 8: 2}, 4, "lower-bound", "must have batch size 1"),
        ({4: 4, 8: 6}, 4, "upper-bound", "smallest key|exceed"),
        ({0: 4}, 4, "upper-bound", "keys from 1"),
        ({1: -1}, 4, "upper-bound", "lengths from 0"),
        ({}, 4, "upper-bound", "keys from 1"),
    ],
)
def test_what_tensorrt_llm_refuses_is_refused(schedule, most, meaning, message):
    with pytest.raises(InvalidInput, match=message):
        draft_len.check(schedule, most, meaning)


def test_tensorrt_llm_stops_above_the_last_key():
    written = draft_len.write(request((8, 4), (None, 2)))
    options = yaml.safe_load(written.files["llm_api_options.yml"])["speculative_config"]
    assert draft_len.up_to(options["draft_len_schedule"], 4097) == 0
    assert draft_len.parse(written.files) == ((1, 8, 4), (9, None, 2))
    assert any("4096" in note for note in written.notes)


def test_tensorrt_llm_may_draft_where_the_schedule_says_not_to():
    def drafts(drafter):
        return any("one token" in note for note in draft_len.write(request((8, 4), (None, 0), drafter=drafter)).notes)

    assert drafts("draft-model")
    assert not drafts("ngram")


def test_vllm_carries_lengths_over_gaps_and_clamps_them():
    config = {"num_speculative_tokens": 3, vllm.SCHEDULE: [[32, 64, 1], [1, 8, 5]]}
    assert vllm.parse({vllm.FILE: json.dumps(config)}) == ((1, 31, 3), (32, None, 1))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[2, 8, 3]], "begin at batch size 1"),
        ([[1, 8, 3], [8, 16, 2]], "overlap"),
        ([[1, 8, -1]], "at least 0"),
        ([[8, 1, 2]], "from <= to"),
        ([[1, 8, 1, 4096, 3]], "items"),
        ([], "list"),
        ({"1-16": 3}, "list"),
    ],
)
def test_what_vllm_refuses_is_refused(schedule, message):
    with pytest.raises(InvalidInput, match=message):
        vllm.checked(schedule)


def test_schedules_that_begin_later_overlap_or_end_are_refused_everywhere():
    for lengths in (((2, None, 3),), ((1, 8, 3), (8, None, 2)), ((1, 8, 3), (10, None, 2)), ((1, 8, 3),), ()):
        for write in (vllm.write_chain, sglang.write_adaptive, draft_len.write, tgi.write_chain):
            drafter = "medusa" if write is tgi.write_chain else "eagle3"
            with pytest.raises(InvalidInput, match=r"from 1 on|open"):
                write(Request(lengths=lengths, num_heads=8, drafter=drafter))


def test_sglang_serves_batches_below_its_smallest_key_with_it():
    files = dict(sglang.write_adaptive(request((8, 5), (None, 2))).files)
    files[sglang.FILE] = '{"8": {"candidate_steps": [5]}}'
    assert sglang.parse(files) == ((1, None, 5),)


def test_sglang_pads_to_a_cuda_graph_before_it_looks():
    assert any("batch sizes 5." in n for n in sglang.write_adaptive(request((5, 5), (None, 2))).notes)


@pytest.mark.parametrize(("algorithm", "topk"), [("EAGLE3", 4), ("STANDALONE", 1)])
def test_sglang_silently_stays_static_without_topk_1_and_eagle(algorithm, topk):
    files = dict(sglang.write_adaptive(request((8, 5), (None, 0))).files)
    files["commands.sh"] = files["commands.sh"].replace("EAGLE3", algorithm)
    files["commands.sh"] = files["commands.sh"].replace("eagle-topk 1", f"eagle-topk {topk}")
    if topk == 1:
        assert sglang.parse(files) == ((1, None, 5),)
    else:
        with pytest.raises(InvalidInput, match="eagle-topk 1"):
            sglang.parse(files)


def test_sglang_admits_48_sequences_unless_told():
    def told(end):
        written = sglang.write_adaptive(request((end, 5), (None, 2), drafter="mtp"))
        return any("--max-running-requests" in note for note in written.notes)

    assert (told(47), told(48)) == (False, True)


@pytest.mark.parametrize("drafter", ["draft-model", "ngram"])
def test_schedules_for_what_sglang_keeps_static_are_refused(drafter):
    schedule = request((8, 5), (None, 0), drafter=drafter)
    with pytest.raises(Unsupported, match="eagle3, eagle, mtp this way"):
        sglang.write_adaptive(schedule)
    with pytest.raises(InvalidInput, match="one chain length"):
        sglang.write(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"strategy": "ema"}', "needs a batch size"),
        ('{"1": {"candidate_steps": []}}', "candidate_steps"),
        ('{"1": {"candidate_steps": [-1]}}', "candidate_steps"),
        ('{"1": {"candidate_steps": [1, 3]}}', "at run time"),
    ],
)
def test_what_sglang_refuses_or_chooses_itself_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        sglang.slots_of(text)


def test_sglang_needs_its_steps_among_the_candidates():
    files = dict(sglang.write_adaptive(request((8, 5), (None, 2))).files)
    files["commands.sh"] = files["commands.sh"].replace("num-steps 5", "num-steps 4")
    with pytest.raises(InvalidInput, match="one of the candidate_steps"):
        sglang.parse(files)


def test_tgi_silently_stops_above_128_rows_and_the_user_is_told():
    def warned(batch_size):
        written = tgi.write_chain(request((None, 3), drafter="medusa", batch_size=batch_size))
        return any("above 128 rows" in note for note in written.notes)

    assert (warned(32), warned(33)) == (False, True)


def test_tgi_with_heads_and_no_length_would_use_all_of_them():
    with pytest.raises(InvalidInput, match="name the length"):
        tgi.parse({"commands.sh": "text-generation-launcher --model-id HEADS"})


def test_chains_longer_than_the_heads_are_refused():
    for write in (vllm.write_medusa, tgi.write_chain):
        with pytest.raises(InvalidInput, match="--max-depth 4"):
            write(request((None, 5), drafter="medusa", heads=4))


def test_engines_of_one_length_take_no_schedule():
    for write in (vllm.write_medusa, tgi.write_chain, numbers.lmdeploy, numbers.rtp_llm):
        drafter = "medusa" if write in (vllm.write_medusa, tgi.write_chain) else "eagle3"
        with pytest.raises(InvalidInput, match="--batch-size"):
            write(request((8, 3), (None, 0), drafter=drafter))


def test_file_and_command_must_agree():
    files = dict(vllm.write_chain(request((None, 3))).files)
    files["speculative_config.json"] = files["speculative_config.json"].replace("3", "2")
    with pytest.raises(InvalidInput, match="differ"):
        vllm.parse(files)


def test_without_a_chain_that_pays_the_base_model_is_served():
    for write, parse, drafter in ONE_LENGTH:
        written = write(request((None, 0), drafter=drafter))
        assert list(written.files) == ["commands.sh"]
        assert "speculat" not in written.command
        assert parse(written.files) == NO_SPECULATION


@pytest.mark.parametrize(
    ("write", "drafter", "options"),
    [
        (numbers.lmdeploy, "mtp", "--speculative-algorithm deepseek_mtp --speculative-num-draft-tokens 3"),
        (numbers.llama_cpp, "draft-model", "--spec-draft-n-max 3"),
        (numbers.redrafter, "redrafter", "--beam_width=1 --beam_length=4"),
        (numbers.rtp_llm, "mtp", "--sp_checkpoint_path DRAFTER --gen_num_per_cycle 3"),
    ],
)
def test_engines_of_a_number_get_it_and_no_file_but_the_command(write, drafter, options):
    written = write(request((None, 3), drafter=drafter))
    assert options in written.command
    assert list(written.files) == ["commands.sh"]
    assert "tree_decode_config" not in written.command
    assert options.split()[0] not in write(request((None, 0), drafter=drafter)).command
    with pytest.raises(Unsupported, match="the drafter is medusa"):
        write(request((None, 3), drafter="medusa"))


def test_a_plan_without_a_drafter_is_written_for_the_usual_one_and_says_so():
    written = export_request(request((None, 3), drafter=None), "vllm")
    assert json.loads(written.files["speculative_config.json"])["method"] == "eagle3"
    for engine, row in ENGINES.items():
        for method in row.methods:
            if method.shape == "chain":
                notes = export_request(request((None, 3), drafter=None), engine, method=method.name).notes
                assert f"The plan does not name its drafter; this is written for {method.drafters[0]}." in notes
