"""The contract of engines: an export is read back as it was asked, or refused.

Ports of the engines' own rules read it back (`tests.helpers.engine_rows`).
"""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.helpers.engine_rows import COPIED, READERS, chains, check_read_back, export, flags
from treeopt import __version__
from treeopt.cli import cli
from treeopt.engines.base import COMMANDS
from treeopt.engines.plans import check_rule_of
from treeopt.engines.reading import tree_in
from treeopt.engines.registry import ENGINES, method_of
from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.records.drafters import BLOCKS
from treeopt.report import engine_table
from treeopt.report.engine_table import FACTS
from treeopt.trees.draft import DynamicTree
from treeopt.trees.tree import Tree

PAGE = Path(__file__).resolve().parents[1] / "docs" / "engines.md"
BEGIN, END = "<!-- table of engines: begin -->", "<!-- table of engines: end -->"
REFRESH = 'python -c "from tests.test_engines import *; PAGE.write_text(refreshed(PAGE.read_text()))"'
METHODS = [(engine.name, method) for engine in ENGINES.values() for method in engine.methods]
CHAINS = [(name, method) for name, method in METHODS if method.limits.only_chains]
SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}
REJECTED = {**SAMPLED, "rule": "rejection", "top_p": 0.9, "top_k": 5}
TYPICAL = {"rule": "typical", "temperature": 0.7, "epsilon": 0.09, "delta": 0.3}
RULES = {"greedy": None, "sample": SAMPLED, "reject": REJECTED, "typical": TYPICAL}


def named(pairs):
    return pytest.mark.parametrize(("engine", "method"), pairs, ids=[f"{e}-{m.name}" for e, m in pairs])


def chain(engine, drafter, length=3, **options):
    """The export of a chain, or of ``lengths`` by batch size."""
    return export(engine, options.pop("lengths", Tree.chain(length)), drafter=drafter, **options)


def draft_for(method):
    """A draft that a method takes."""
    if method.limits.copies:
        return COPIED[method.engine][0]
    if method.limits.dynamic:
        return DynamicTree(3, 2, 6)
    return Tree.chain(3) if method.limits.only_chains else Tree.dense([2, 1])


# How each engine is told its drafter; the readers check lengths.
WORDS = {
    "exllamav3": {"draft-model": "--draft_model_dir DRAFTER", "mtp": "--mtp", "ngram": "--ngram_match_min 1"},
    "llama-cpp": {
        "draft-model": "draft-simple --spec-draft-model DRAFTER.gguf", "eagle3": "draft-eagle3 --spec-draft-model DRAFTER.gguf",
        "dflash": "draft-dflash --spec-draft-model DRAFTER.gguf", "dflash2": "draft-dflash --spec-draft-model DRAFTER.gguf",
        "dspark": "draft-dspark --spec-draft-model DRAFTER.gguf", "mtp": "draft-mtp --spec-draft-n-max",
        "ngram": "ngram-simple --spec-ngram-simple-size-n 3",
    },
    "edge-llm": {
        "eagle3": "--specDraftTopK 1 --specDraftStep 3", "mtp": "--specDraftTopK 1 --specDraftStep 3",
        "dflash": "--specDraftTopK 1 --specDraftStep 1", "dspark": "--specDraftTopK 1 --specDraftStep 1",
    },
    "lmdeploy": {
        "eagle3": "--speculative-algorithm eagle3 --speculative-draft-model DRAFTER", "mtp": "--backend pytorch --speculative-algorithm deepseek_mtp",
        "dflash": "--speculative-algorithm dflash --speculative-draft-model DRAFTER",
    },
    "mlc-llm": {"draft-model": "small_draft --overrides 'spec_draft_length=3;max_num_sequence=4'", "eagle": "--speculative-mode eagle"},
    "mlx-lm": {"draft-model": "--draft-model DRAFTER"},
    "onnx-genai": {
        "draft-model": '{"do_sample": false}, "speculative": {"max_draft_tokens": 3, "min_adaptive_k": 0, "cooldown": false}', "ngram": '"ngram_size": 4, "ngram_chained_lookup": false',
        "dflash2": "dflash2_path=DRAFTER dflash2_num_draft_tokens=3", "dspark": "dspark_path=DRAFTER dspark_num_draft_tokens=3",
    },
    "openvino": {"draft-model": '{"do_sample": false, "num_assistant_tokens": 3}', "ngram": '"do_sample": false, "num_assistant_tokens": 3, "max_ngram_size": 3'},
    "redrafter": {"redrafter": "--greedy_search=True --beam_width=1 --beam_length=4"},
    "rtp-llm": {"mtp": "--sp_type mtp", "eagle3": "--sp_type eagle", "dspark": "--sp_type dspark"},
    "sglang": {
        "eagle3": "EAGLE3 --speculative-draft-model-path DRAFTER", "mtp": "NEXTN --speculative-num-steps 3",
        "draft-model": "STANDALONE --speculative-draft-model-path DRAFTER", "dflash": "DFLASH --speculative-draft-model-path DRAFTER",
        "dflash2": "DFLASH --speculative-draft-model-path DRAFTER",
        "dspark": "DSPARK --speculative-draft-model-path DRAFTER", "ngram": "NGRAM --speculative-num-draft-tokens 4 --speculative-ngram-max-bfs-breadth 1",
    },
    "tensorrt-llm": {
        **{
            drafter: f"decoding_type: {kind}\n  max_draft_len: 3\n  speculative_model: DRAFTER\n"
            for drafter, kind in {"eagle3": "Eagle3", "draft-model": "Draft_Target", "dflash": "DFlash", "dspark": "DSpark", "pard": "PARD"}.items()
        },
        "mtp": "decoding_type: MTP\n", "ngram": "decoding_type: NGram\n  max_draft_len: 3\n  max_matching_ngram_size: 3\n",
    },
    "tgi": {"medusa": "--model-id HEADS --speculate", "ngram": "--model-id MODEL --speculate"},
    "transformers": {"draft-model": '"do_sample": false, "num_assistant_tokens": 3,', "ngram": '"do_sample": false, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 3'},
    "vllm": {
        "eagle3": '"method": "eagle3", "model": "DRAFTER"', "dflash": '"method": "dflash", "model": "DRAFTER"',
        "dflash2": '"method": "dflash", "model": "DRAFTER"', "mtp": '"method": "mtp", "num',
        "p-eagle": '"method": "eagle3", "model": "DRAFTER", "parallel_drafting": true', "dspark": '"method": "dspark", "model": "DRAFTER"',
        "pard": '"method": "draft_model", "model": "DRAFTER", "parallel_drafting": true', "suffix": '"method": "suffix", "num',
        "ngram": '"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1', "draft-model": '"method": "draft_model", "model": "DRAFTER", "num',
    },
}  # fmt: skip


@pytest.mark.parametrize("engine", dict.fromkeys(engine for engine, _ in CHAINS))
def test_options_of_a_chain(engine):
    """An engine is told its drafter, and every command with the length is read back by `import`."""
    for drafter, words in WORDS[engine].items():
        written = chain(engine, drafter)
        assert words in "".join(written.files.values()), drafter
        if re.search(r"--[\w-]+[ =][34]\b", written.command) and engine not in ("mlx-lm", "exllamav3", "edge-llm"):
            assert tree_in(written.files[COMMANDS]) == Tree.chain(3), drafter


# For every method


TREES = [Tree.chain(0), Tree.chain(3), Tree.chain(9), Tree.dense([3, 2, 1]), Tree.from_choices([[1], [1, 2]]),
         Tree.from_choices([[0], [1], [1, 0]]), Tree.from_choices([[r] for r in range(17)] + [[0, 0]])]  # fmt: skip
SCHEDULES = [chains((1, None, 1)), chains((1, None, 20)), chains((1, 8, 3), (9, 32, 1), (33, None, 0)),
             chains((1, 4, 1), (5, None, 2)), chains((1, 8, 3), (9, None, 3))]  # fmt: skip
DYNAMIC = [DynamicTree(5, 4, 16), DynamicTree(3, 1, 4), DynamicTree(3, 2, 8), DynamicTree(8, 8, 60)]
DRAFTS = [*TREES, *SCHEDULES, *DYNAMIC, *(draft for drafts in COPIED.values() for draft in drafts)]
OPTIONS = [{}, {"batch_size": 64}]


@named(METHODS)
def test_export_roundtrip(engine, method):
    """An export is read back as it was asked, or refused: every drafter, rule, draft and option."""
    taken = refused = 0
    for drafter, rule, served, options in product((None, *method.drafters), RULES.values(), DRAFTS, OPTIONS):
        about = {"num_heads": 9, "drafter": drafter, "acceptance": rule, **options}
        try:
            written = export(engine, served, method.name, **about)
        except TreeoptError:
            refused += 1
            continue
        taken += 1
        check_read_back(served, engine, method.name, written.files)
    assert taken
    assert refused


@named(METHODS)
def test_files(engine, method, tmp_path):
    """Files begin with the release, and one has the launch command."""
    line = f"# For {ENGINES[engine].title}, checked against {method.checked}. Written by treeopt {__version__}.\n"
    written = export(engine, draft_for(method), method.name, num_heads=4, drafter=method.drafters[0])
    for name, text in written.files.items():
        assert text.startswith(line) == (not name.endswith(".json")), name
        if name.endswith(".py"):
            (tmp_path / name).write_text(text)
    assert written.command in written.files[COMMANDS]
    options = {word.partition("=")[0] for word in written.command.split() if word[:2] == "--"}
    assert options <= flags(written.files).keys()
    if not any(tmp_path.iterdir()):
        return
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E4,E7,E9,F,I,B,S,UP", tmp_path]
    done = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@named(METHODS)
def test_no_speculation(engine, method):
    """A plan that does not speculate serves the model alone, or is refused."""
    about = {"num_heads": 4, "drafter": method.drafters[0]}
    if engine in ("eagle1", "hydra", "medusa", "modelopt"):  # what they read is the tree alone
        with pytest.raises(InvalidInput, match="not to speculate"):
            export(engine, Tree.chain(0), method.name, **about)
        return
    written = export(engine, Tree.chain(0), method.name, **about)
    assert any(re.search("serves? the (base )?model", note) for note in written.notes)
    assert not re.search(r"--[\w-]*specul|num_assistant|use_eagle3|medusa", written.command)
    check_read_back(Tree.chain(0), engine, method.name, written.files)


@named(METHODS)
def test_unknown_drafter(engine, method):
    """A drafter that the engine cannot run is refused."""
    with pytest.raises(InvalidInput, match="nobody's"):
        export(engine, draft_for(method), method.name, drafter="nobody's")


@named(METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_rule(engine, method, rule):
    """An engine has a rule, or the refusal names the engines that have it."""
    if rule in method.rules:
        notes = check_rule_of(RULES[rule], method)
        assert notes == [] if rule == "greedy" else "requests must ask for the same" in notes[0]
        return
    with pytest.raises(InvalidInput, match="accepts by the rule greedy") as refused:
        export(engine, draft_for(method), method.name, drafter=method.drafters[0], acceptance=RULES[rule])
    assert ("export --to medusa" in str(refused.value)) == (rule == "typical" and "medusa" in method.drafters)


@named(METHODS)
def test_limits(engine, method):
    """A draft beyond the method's depth is refused, and a batch size beyond it is named."""
    notes = export(engine, draft_for(method), method.name, batch_size=64, num_heads=9).notes
    assert any("decodes at most" in note for note in notes) == (method.max_batch_size is not None)
    depth = method.limits.max_depth
    if depth is not None:
        with pytest.raises(InvalidInput, match=f"up to depth {depth}"):
            export(engine, Tree.chain(depth + 1), method.name, num_heads=99)


@named(CHAINS)
def test_notes_on_drafter(engine, method):
    """Notes name the usual drafter if the plan names none, and the blocks that a drafter must know."""
    usual = method.drafters[0]
    notes = export(engine, Tree.chain(3), method.name).notes
    assert f"The plan does not name its drafter; this is written for {usual}." in notes
    for drafter in method.drafters:
        notes = export(engine, Tree.chain(3), method.name, drafter=drafter).notes
        assert sum("blocks" in note for note in notes) == (drafter in BLOCKS)


def test_unknown_names():
    """A refusal of an unknown name lists the known ones."""
    with pytest.raises(Unsupported, match="eagle1, eagle2, edge-llm, exllamav3"):
        method_of("other")
    with pytest.raises(Unsupported, match="medusa, draft-len, block, ngram, dynamic-tree"):
        method_of("tensorrt-llm", method="other")


# Notes and rules of single engines


@pytest.mark.parametrize(
    ("engine", "drafter", "options", "words"),
    [
        ("sglang", "eagle3", {"batch_size": 64}, "--max-running-requests 64"),
        ("sglang", "dflash", {"batch_size": 64}, "--max-running-requests 64"),
        ("sglang", "eagle3", {"acceptance": REJECTED}, "whole vocabulary"),
        ("sglang", "eagle3", {"lengths": chains((1, 5, 5), (6, None, 2))}, "batch sizes 5."),
        ("tgi", "medusa", {"batch_size": 33}, "above 128 rows"),
        ("vllm", "mtp", {}, "does not divide"),
        ("vllm", "dflash", {}, "sample_from_anchor: true"),
        ("vllm", "pard", {}, "seldom right"),
        ("edge-llm", "dflash", {}, "--maxVerifyTreeSize 4 or more"),
        ("vllm", "draft-model", {}, "vocabularies of MODEL and DRAFTER"),
        ("vllm", "eagle3", {"lengths": chains((1, 4, 5), (5, None, 1))}, "drops the schedule and keeps 5"),
        ("tensorrt-llm", "eagle3", {"lengths": chains((1, 8, 4), (9, None, 2))}, "4096"),
        ("tensorrt-llm", "draft-model", {"lengths": chains((1, 8, 4), (9, None, 0))}, "one token"),
    ],
)
def test_notes(engine, drafter, options, words):
    """A note says what an engine does silently."""
    assert any(words in note for note in chain(engine, drafter, **options).notes)
    assert not any(words in note for note in chain(engine, "ngram" if engine == "vllm" else drafter, 1).notes)


def test_rejection():
    """p/q rejection is a flag or a key where an engine has it, and nowhere else."""
    for rule, asks in ((REJECTED, True), (SAMPLED, False), (None, False)):
        config = json.loads(chain("vllm", "draft-model", acceptance=rule).files["speculative_config.json"])
        assert (config.get("draft_sample_method") == "probabilistic") == asks
        assert ("use-rejection-sampling" in chain("sglang", "eagle3", acceptance=rule).command) == asks
        options = chain("tensorrt-llm", "draft-model", acceptance=rule).files["llm_api_options.yml"]
        rejection = yaml.safe_load(options)["speculative_config"].get("use_rejection_sampling")
        assert rejection is (None if rule is None else asks)


def test_options_by_batch_size():
    """Options that follow from the number of sequences."""
    for size in (1, 4):
        assert "--parallel" not in chain("llama-cpp", "mtp", batch_size=size).command
    options = flags(chain("llama-cpp", "mtp", 0, batch_size=5).files)
    assert (options["--parallel"], options["--kv-unified"]) == (
        "5",
        "",
    )  # else every sequence gets a fifth of the context
    assert "max_num_sequence=32'" in chain("mlc-llm", "draft-model", batch_size=8).command
    for length, looked_up in ((1, 1), (8, 3)):
        options = flags(chain("llama-cpp", "ngram", length).files)
        assert options["--spec-ngram-simple-size-n"] == str(looked_up)


WIDER = {
    "vllm": "without a word",
    "tensorrt-llm": "does not start",
    "llama-cpp": "no more than the block, with a warning",
    "onnx-genai": "refuses to build",
    ("edge-llm", "dspark"): "does not start",
}


@pytest.mark.parametrize(
    ("kind", "engine"), sorted({(kind, name) for name, method in METHODS for kind in BLOCKS if kind in method.drafters})
)
def test_chain_longer_than_block(kind, engine):
    """A chain as long as the block is written. A longer one is refused, but for SGLang, which runs it with a warning."""
    assert chain(engine, kind, 5, widest=5).files
    if words := WIDER.get((engine, kind), WIDER.get(engine)):
        with pytest.raises(InvalidInput, match=f"up to 5 guesses from this drafter.*this one has 6, and it .*{words}"):
            chain(engine, kind, 6, widest=5)
    else:
        assert chain(engine, kind, 6, widest=5).files


def test_single_guess_of_dspark():
    """ONNX Runtime builds no block of a single guess."""
    with pytest.raises(InvalidInput, match="blocks of DSpark of 2 guesses or more, but this chain has 1"):
        chain("onnx-genai", "dspark", 1)


def test_dynamic_trees_are_lossless():
    """No export of a dynamic tree loosens acceptance."""
    for (engine, method), rule in product([row for row in METHODS if row[1].limits.dynamic], (None, SAMPLED)):
        if rule is None or "sample" in method.rules:
            written = export(engine, DynamicTree(3, 4, 8), method.name, drafter="eagle3", acceptance=rule)
            assert not re.search("threshold|relaxed|typical", "".join([written.command, *written.files.values()]))
    with pytest.raises(InvalidInput, match="top_p"):
        export("eagle2", DynamicTree(3, 4, 8), acceptance={**SAMPLED, "top_p": 0.9})


# The registry, its pages and its command


def test_readers_are_complete():
    """Every method has a reader of the files that it writes."""
    assert READERS.keys() == {(name, method.name) for name, method in METHODS}


IN_DOCS = FACTS | {
    "engine": lambda e, m: f"`{e.name}`",
    "method": lambda e, m: m.name,
    "shape": lambda e, m: "copied" if m.limits.copies else "dynamic" if m.limits.dynamic else m.limits.shape,
}
HEADS = ("engine", "method", "drafters", "shape", "limits", "acceptance", "by batch size", "versions", "checked")


def refreshed(page):
    """docs/engines.md with its table of methods made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{in_markdown(HEADS)}\n{END}\n" + rest.partition(f"{END}\n")[2]


def in_markdown(heads):
    rows = [[IN_DOCS[head](engine, m) for head in heads] for engine in ENGINES.values() for m in engine.methods]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in [heads, ["---"] * len(heads), *rows]]
    return "".join(f"| {line} |\n" for line in lines).replace("<=", "≤")


def test_page_tables():
    """docs/engines.md has the tables of the registry."""
    page = PAGE.read_text(encoding="utf-8")
    assert refreshed(page) == page, f"refresh it: {REFRESH}"


@pytest.mark.parametrize("drafter_id", ["ngram", None])
def test_note_on_lookup(drafter_id):
    """A note says whether the engine looks n-grams up as treeopt's drafter does."""
    engines = {name for name, method in METHODS if "ngram" in method.drafters}
    fits = {"transformers", "openvino"} if drafter_id else set()
    for engine in engines:
        notes = export(engine, Tree.chain(3), drafter="ngram", drafter_id=drafter_id).notes
        (note,) = [note for note in notes if note.startswith(f"{engine} looks n-grams up ")]
        assert ("as treeopt does" in note) == (engine in fits)
        assert ("so its tokens per step differ" in note) == (engine not in fits)


@named(METHODS)
def test_method_fields(engine, method):
    """A method says where it was read and against which release or commit it was checked, and has a name of its own."""
    assert method.drafters
    assert method.rules[0] == "greedy"
    assert re.search(r"\w/\w", method.source), "a repository and a file, or a pull request"
    assert re.search(r"\d", method.checked), "a release, or a commit and its month"
    assert method.status == "live" or "removed" in method.status
    assert [other.name for other in ENGINES[engine].methods].count(method.name) == 1


def listed(*words, columns=300):
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, ["list", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_list_engines():
    """The list of engines fits a terminal; one engine is shown in full."""
    text = listed("engines")
    assert not any(method.source in text for _, method in METHODS)
    for name, method in METHODS:
        assert {method.name, *method.drafters} <= set(re.findall(r"[^\s│,]+", listed("engines", name)))
        assert {row["engine"] for row in json.loads(listed("engines", name, "--json"))["engines"]} == {name}
    lines = listed("engines", columns=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 2 * len(METHODS)
    words = set(re.findall(r"[^\s│,]+", " ".join(lines)))
    assert {kind for _, method in METHODS for kind in method.drafters} | set(ENGINES) <= words  # none is broken
    assert {word for _, method in METHODS for word in engine_table.checked(method).split()} <= words


def test_an_engine_runs_here_if_its_server_is_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (option,) = engine_table.runs_here(ENGINES["llama-cpp"])
    assert option == "--launch 'llama-server ...'"
    assert engine_table.runs_here(ENGINES["llama-cpp"]) == {option: False}
    (tmp_path / "llama-server").touch(mode=0o755)
    assert engine_table.runs_here(ENGINES["llama-cpp"]) == {option: True}
    rows = json.loads(listed("engines", "--json"))["engines"]
    assert {row["engine"] for row in rows if row["runs_here"].get(option)} == {"llama-cpp"}
    for row, (engine, method) in zip(rows, METHODS, strict=True):
        assert (row["engine"], row["method"], row["checked"]) == (engine, method.name, method.checked)
        assert (row["drafters"], row["shape"]) == ([*method.drafters], method.limits.shape)
    assert "llama-cpp by --launch" in listed("engines", columns=200)


def test_list_topics():
    """The command takes its topics and no other."""
    summary = json.loads(listed("--json"))
    for topic in summary.keys() - {"engines"}:
        named = [line.split()[0] for line in listed(topic).splitlines() if not line.startswith(" ")]
        assert named == summary[topic]
    for words in (["engines", "nobody"], ["trees", "vllm"], ["engine"]):
        result = CliRunner().invoke(cli, ["list", *words])
        assert result.exit_code == (1 if words[0] == "engines" else 2)
    assert "must be one of calibrations, profiles, trees, drafters, engines, acceptance" in result.output


def test_page_schedules():
    """The schedules in docs/engines.md are those that are written."""
    lengths = chains((1, 4, 4), (5, 8, 2), (9, None, 0))

    def texts(engine):
        return "".join(export(engine, lengths, drafter="eagle3").files.values())

    rows = [
        [cell.strip().strip("`") for cell in line.split("|")[2:-1]]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| (\d+ to \d+|from \d+ on): \d", line)
    ]
    assert len(rows) == len(lengths)
    for vllm, sglang, tensorrt_llm in rows:
        assert vllm in texts("vllm")
        assert sglang in texts("sglang")
        assert tensorrt_llm == "no key" or tensorrt_llm in texts("tensorrt-llm")


@pytest.mark.parametrize("rule", ["sample", "reject", "typical"])
def test_page_rules(rule):
    """docs/drafters.md names the engines of every rule."""
    page = (PAGE.parent / "drafters.md").read_text(encoding="utf-8")
    rows, _, _ = page.partition("### What engines can do")[2].partition(f"| `{rule}` |")[2].partition("\n| `")
    able = {e.title for e in ENGINES.values() if any(rule in m.rules and m.status == "live" for m in e.methods)}
    for title in (engine.title for engine in ENGINES.values()):
        assert (re.search(rf"(?<![\w-]){re.escape(title)}(?![\w-])", rows.partition("\n\n")[0]) is not None) == (
            title in able
        ), title
