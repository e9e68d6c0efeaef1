"""The check of engines is itself checked, on releases that are made here: what is taken away must be named."""

import pytest

from tests.engines_live import fake
from tests.engines_live.archives import Release
from tests.engines_live.check import facts_of, place_of, report_of
from tests.engines_live.finders import cpp_format, cpp_logged, cpp_sum, filled, llama_flags, python_format
from tests.engines_live.places import NOT_THERE
from tests.engines_live.readings import words_read
from tests.engines_live.written import words_of, words_of_engine
from treeopt.engines.base import Written
from treeopt.engines.registry import ENGINES

PACKAGED = [name for name, engine in ENGINES.items() if engine.package and name not in NOT_THERE]
VLLM = Release("9.9", fake.vllm())


def test_a_release_that_has_everything_lacks_nothing():
    report = report_of("vllm", VLLM)
    assert report.lines() == []
    assert report.facts > 20


RENAMED = {
    "--speculative-config": "flag --speculative-config of vllm serve is gone (written by vllm batch-size",
    "num_speculative_tokens_per_batch_size": "key num_speculative_tokens_per_batch_size of --speculative-config is gone "
    "(written by vllm batch-size; looked for in vllm/config/speculative.py)",
    "eagle3": "value eagle3 of method is gone",
    "serve": "program serve is gone",
    "acceptance_histogram": "read key acceptance_histogram is gone (read by vllm-requests",
    "detailed": "value detailed of --per-request-spec-decode-metrics is gone (read by vllm-metrics, vllm-requests",
    "choices": "read key choices of a response is gone",
    "Mean acceptance length": "log line 'SpecDecoding metrics' is not read any more",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "scrape of /metrics is not read any more",
}


@pytest.mark.parametrize(("word", "named"), RENAMED.items())
def test_what_is_renamed_is_named(word, named):
    lines = report_of("vllm", fake.renamed(VLLM, "*", word)).lines()
    assert any(line.startswith(f"vllm 9.9: {named}") for line in lines), lines


def test_every_fact_is_missed_where_its_word_is_renamed():
    for fact in facts_of("vllm"):
        for word in fact.words:
            assert fact.gone(fake.renamed(VLLM, fact.where, word)), (fact.what, word)


def test_a_file_that_is_gone_is_said():
    texts = {path: text for path, text in VLLM.texts.items() if "config/speculative" not in path}
    lines = report_of("vllm", Release("9.9", texts)).gone
    assert any(one.startswith("value eagle3 of method cannot be looked up, since its file is gone") for one in lines)
    texts["vllm/config/speculative.py"] = "class Other: ...\n"
    assert not [line for line in report_of("vllm", Release("9.9", texts)).gone if "file is gone" in line]


@pytest.mark.parametrize("engine", PACKAGED)
def test_every_word_has_a_place_to_be_looked_up_in(engine):
    lacking = [str(word) for word in {**words_of_engine(engine), **words_read(engine)} if not place_of(engine, word)]
    assert not lacking, f"say in tests/engines_live/places.py where {engine} defines: {', '.join(lacking)}"


def test_words_of_files():
    files = {
        "commands.sh": '# serve --no\nA_B=1 engine run MODEL --kind one \\\n  --n 3 --config x.yml --json \'{"k": {"l": "v"}}\' -f\n',
        "x.yml": "a: [b, {c: 1}]\n4: DRAFTER\n",
        "run.py": "import json\nfrom lib import Config\nc = Config(mode='fast')\nc.size = Size()\nc.go()\njson.dumps(c)\n",
    }
    assert set(map(str, words_of(Written(files=files, command="")))) == {
        "variable A_B", "program engine", "program run", "flag --kind of engine run", "value one of --kind",
        "flag --n of engine run", "flag --config of engine run", "flag --json of engine run", "key k of --json",
        "key l of --json", "value v of l", "flag -f of engine run", "key a of x.yml", "value b of a", "key c of x.yml",
        "name Config of lib", "parameter mode of Config", "value fast of mode", "attribute size of Config", "method go",
    }  # fmt: skip


CPP = """
add_opt(common_arg({"-a", "--all"}, "N", "x", f));
add_opt(common_arg({"--server"}, {"--no-server"}, g).set_examples({LLAMA_EXAMPLE_SERVER}));
add_opt(common_arg({"--cli"}, g).set_examples({LLAMA_EXAMPLE_CLI}));
add_opt(common_arg({"--not"}, g).set_excludes({LLAMA_EXAMPLE_SERVER}));
add_opt(common_arg({"--old"}, [](p &) { arg_removed("use --all"); }));
#define INF(slot, fmt, ...) LOG("slot %12.*s: id %2d | " fmt, 12, name, id, __VA_ARGS__)
INF(*this,
    "rate = %0.5f (%5zu of %d)\\n", a, b, c);
tail = ", mean = " + oss.str() + ", rates = (" + tmp.str() + ")";
"""


def test_options_of_llama_cpp_without_those_removed_or_of_other_programs():
    assert llama_flags(CPP) == {"-a", "--all", "--server", "--no-server"}


def test_formats_are_taken_out_of_sources():
    assert cpp_format(CPP, "rate = ") == "rate = %0.5f (%5zu of %d)\n"
    assert cpp_logged(CPP, "rate = ") == "slot %12.*s: id %2d | rate = %0.5f (%5zu of %d)\n"
    assert (
        filled(cpp_logged(CPP, "rate = "), {"slot ": "f", "rate = ": 0.5})
        == "slot            f: id  0 | rate = 0.50000 (    0 of 0)\n"
    )
    assert cpp_sum(CPP, "tail") == ", mean = %s, rates = (%s)"
    assert python_format('log("a" "b: %d", n)', "b: ") == "ab: %d"
