"""The table of engines: complete, told the same everywhere, and each chain method keeps its own limits."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from treeopt.cli import cli
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.export import listing
from treeopt.export.engine import Request
from treeopt.export.table import ENGINES
from treeopt.trees.shapes import SHAPES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "engines.md"
REFRESH = 'python -c "from tests.test_engines import PAGE, refreshed; PAGE.write_text(refreshed())"'
METHODS = [(engine.name, method) for engine in ENGINES.values() for method in engine.methods]
CHAINS = [(name, method) for name, method in METHODS if method.shape == "chain" and not method.dynamic]


def named(pairs):
    return pytest.mark.parametrize(("engine", "method"), pairs, ids=[f"{e}-{m.name}" for e, m in pairs])


BEGIN, END = "<!-- table of engines: begin -->", "<!-- table of engines: end -->"


def refreshed() -> str:
    """The page with its table made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + markdown() + rest.partition(f"{END}\n")[2]


def markdown() -> str:
    """The table of engines for docs/engines.md, with syntax, matching fields and sources, between its two marks."""
    heads = ["engine", "method", "drafters", "shape", "limits", "acceptance", "by batch size", "versions", "checked"]
    details = ["method", "carrier", "syntax", "must match", "source"]
    lines = [
        *(BEGIN, "", row_of(heads), row_of(["---"] * len(heads))),
        *(row_of([f"`{engine}`", *listing.cells(method)]) for engine, method in METHODS),
        *("", row_of(details), row_of(["---"] * len(details))),
        *(
            row_of([f"`{engine}` {m.name}", m.carrier, f"`{m.syntax}`", "; ".join(m.derived) or listing.NONE, m.source])
            for engine, m in METHODS
        ),
        *("", END),
    ]
    return "\n".join(lines) + "\n"


def row_of(cells):
    escaped = [cell.replace("|", "\\|").replace("<=", "≤") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def test_the_page_has_the_table_as_it_is():
    assert refreshed() == PAGE.read_text(encoding="utf-8"), f"refresh it: {REFRESH}"


@named(METHODS)
def test_every_row_says_what_a_reader_needs(engine, method):
    assert ENGINES[engine].name == engine
    assert method.shape in SHAPES
    assert method.drafters
    assert re.search(r"\w/\w", method.source), "a repository and a file, or a pull request"
    assert method.carrier
    assert method.syntax
    assert method.versions
    assert re.search(r"\d", method.checked), "a release, or a commit and its month"
    for field in method.derived:
        assert re.search(r"=|<=|≤", field), field


def test_names_are_unique():
    names = [(engine, method.name) for engine, method in METHODS]
    assert len(set(names)) == len(names)


@named(CHAINS)
@pytest.mark.parametrize("length", [1, 3])
def test_every_chain_method_reads_its_own_files_back(engine, method, length):
    for drafter in (None, *method.drafters):
        request = Request(lengths=((1, None, length),), num_heads=4, drafter=drafter)
        written = method.write(request)
        said = "".join([written.command, *written.files.values()])
        assert str(length) in said or str(length + 1) in said
        assert method.parse(written.files) == request.lengths


@named(CHAINS)
def test_a_chain_method_takes_a_schedule_only_if_its_row_says_so(engine, method):
    request = Request(lengths=((1, 8, 3), (9, 32, 1), (33, None, 0)), num_heads=4, drafter=method.drafters[0])
    if method.by_batch_size:
        assert method.parse(method.write(request).files) == request.lengths
    else:
        with pytest.raises(InvalidInput, match="--batch-size"):
            method.write(request)


@named(CHAINS)
def test_a_chain_method_refuses_a_drafter_that_it_cannot_run(engine, method):
    with pytest.raises(TreeoptError, match="nobody's"):
        method.write(Request(lengths=((1, None, 2),), num_heads=4, drafter="nobody's"))


@pytest.mark.parametrize(
    "engine", ["vllm", "sglang", "tensorrt-llm", "tgi", "lmdeploy", "llama-cpp", "redrafter", "rtp-llm"]
)
def test_engines_that_people_serve_with_are_there(engine):
    assert engine in ENGINES


def listed(*words, columns=300):
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, ["list", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_list_engines_is_short_and_an_engine_is_shown_in_full():
    text = listed("engines")
    assert all(name in text for name in ENGINES)
    assert not any(method.source in text for _, method in METHODS)
    assert all(listing.checked(method) in text for _, method in METHODS)
    for name, method in METHODS:
        assert method.name in listed("engines", name)


def test_list_engines_fits_a_terminal_of_80_columns_and_breaks_no_word():
    lines = listed("engines", columns=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 2 * len(METHODS)
    words = set(re.findall(r"[^\s│,]+", " ".join(lines)))
    assert {name for _, method in METHODS for name in method.drafters} | set(ENGINES) <= words
    assert {word for _, method in METHODS for word in listing.checked(method).split()} <= words


def test_list_engines_as_json_has_all_fields():
    rows = json.loads(listed("engines", "--json"))["engines"]
    assert [(row["engine"], row["method"]) for row in rows] == [(e, m.name) for e, m in METHODS]
    for row, (_, method) in zip(rows, METHODS, strict=True):
        assert row["package"] == ENGINES[row["engine"]].package
        assert row["drafters"] == list(method.drafters)
        for field in (
            "shape",
            "dynamic",
            "max_rank",
            "max_depth",
            "max_nodes",
            "max_batch_size",
            "carrier",
            "syntax",
            "by_batch_size",
            "built_for_size",
            "versions",
            "status",
            "source",
            "checked",
        ):
            assert row[field] == getattr(method, field)


def test_list_takes_its_topics_and_no_other():
    summary = json.loads(listed("--json"))
    for topic in summary.keys() - {"engines"}:
        named = [line.split()[0] for line in listed(topic).splitlines() if not line.startswith(" ")]
        assert named == summary[topic]
    result = CliRunner().invoke(cli, ["list", "engine"])
    assert result.exit_code == 2
    assert "must be one of calibrations, profiles, trees, drafters, engines, acceptance" in result.output


def test_what_is_removed_upstream_is_said():
    for _, method in METHODS:
        if method.status != "live":
            assert method.status in listing.available(method)
            assert "removed" in method.status


def test_schedules_of_the_page_are_those_that_are_written():
    page = PAGE.read_text(encoding="utf-8")
    lengths = ((1, 4, 4), (5, 8, 2), (9, None, 0))

    def texts(engine, name, **options):
        (method,) = (m for m in ENGINES[engine].methods if m.name == name)
        return "".join(method.write(Request(lengths=lengths, num_heads=4, drafter="eagle3", **options)).files.values())

    rows = [
        [cell.strip().strip("`") for cell in line.split("|")[2:-1]]
        for line in page.splitlines()
        if re.match(r"\| (\d+ to \d+|from \d+ on): \d", line)
    ]
    assert len(rows) == len(lengths)
    for vllm, sglang, newer, older in rows:
        assert vllm in texts("vllm", "batch-size")
        assert sglang in texts("sglang", "adaptive")
        assert newer == "no key" or newer in texts("tensorrt-llm", "draft-len")
        assert older in texts("tensorrt-llm", "draft-len", version="lower-bound")


@pytest.mark.parametrize("rule", ["sample", "reject", "typical"])
def test_the_page_of_drafters_names_the_engines_of_every_rule(rule):
    page = (PAGE.parent / "drafters.md").read_text(encoding="utf-8")
    rows, _, _ = page.partition("### What engines can do")[2].partition(f"| `{rule}` |")[2].partition("\n| `")
    able = {e.title for e in ENGINES.values() if any(rule in m.rules and m.status == "live" for m in e.methods)}
    assert able
    for title in (engine.title for engine in ENGINES.values()):
        assert (re.search(rf"(?<![\w-]){re.escape(title)}(?![\w-])", rows.partition("\n\n")[0]) is not None) == (
            title in able
        ), title
