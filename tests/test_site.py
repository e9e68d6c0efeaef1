"""The documentation site: it builds, it is complete, its examples are true, and it needs no network."""

import dataclasses
import doctest
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import pytest

from treeopt.cli import cli
from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.contender import Block
from treeopt.records.drafters import LAYOUTS
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.report.figures import FIGURES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
JSON_FILES = {"calibration": Calibration, "profile": LatencyProfile, "plan": Plan, "bench": Benchmark}
FENCE = re.compile(r"^```(\w+)(?: title=\"(.*?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> dict[str, str]:
    """Fenced blocks of a page in one language, by title, else by their number."""
    found = FENCE.findall(page(name))
    return {title or str(i): text for i, (kind, title, text) in enumerate(found) if kind == language}


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site, built as strictly as it can be: a broken link or anchor fails the build."""
    for package in ("mkdocs", "material", "mkdocs_click"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


class Elements(HTMLParser):
    """All elements of a page with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


def test_the_site_has_a_page_for_every_document(site):
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in site.glob("*.html")}
    assert not list(site.rglob("*.py"))


def test_every_command_and_every_option_is_on_the_commands_page(site):
    html = (site / "commands.html").read_text(encoding="utf-8")
    sections = dict(re.findall(r'<h3 id="treeopt-([\w-]+)">(.*?)(?=<h3|</article>)', html, re.DOTALL))
    assert sections.keys() == cli.commands.keys()
    for name, command in cli.commands.items():
        for parameter in command.params:
            words = [*parameter.opts, *parameter.secondary_opts]
            if isinstance(parameter, click.Argument):
                words = [parameter.make_metavar(click.Context(command))]
            assert all(word in sections[name] for word in words), (name, words)
        assert f"<code>treeopt {name}" in sections[name]
    assert "Sentinel" not in html


def test_the_commands_page_names_the_options_that_must_be_given():
    needs = re.findall(r"`(\w+)` and `(\w+)` need `(--[\w-]+)`", page("commands"))
    required = {
        (name, parameter.opts[-1])
        for name, command in cli.commands.items()
        for parameter in command.params
        if parameter.required and isinstance(parameter, click.Option)
    }
    assert required == {(name, option) for *names, option in needs for name in names}


def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        for tag, attributes in Elements(path.read_text(encoding="utf-8")).found:
            sources = [attributes.get(name, "") for name in ("src", "srcset", "data", "poster")]
            if tag == "link":
                sources.append(attributes.get("href", ""))
            assert not any(re.match(r"(https?:)?//", source) for source in sources), (path.name, tag, sources)
            assert "http" not in attributes.get("style", "")
    for path in site.rglob("*.css"):
        style = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", style), path.name


def test_examples_of_files_load(tmp_path):
    examples = blocks("formats", "json")
    assert examples.keys() == {f"{kind}.json" for kind in JSON_FILES}
    for kind, of_type in JSON_FILES.items():
        path = tmp_path / f"{kind}.json"
        path.write_text(examples[path.name], encoding="utf-8")
        assert isinstance(of_type.load(path), of_type)


def without_each_key(value):
    """Copies of a JSON value, each without one of the keys of its objects, at any depth."""
    if isinstance(value, dict):
        for key in value:
            yield key, {k: v for k, v in value.items() if k != key}
            for removed, part in without_each_key(value[key]):
                yield removed, {**value, key: part}
    elif isinstance(value, list):
        for i, part in enumerate(value):
            for removed, less in without_each_key(part):
                yield removed, [*value[:i], less, *value[i + 1 :]]


@pytest.mark.parametrize("kind", JSON_FILES)
def test_examples_hold_no_key_that_may_be_left_out(kind, tmp_path):
    example = json.loads(blocks("formats", "json")[f"{kind}.json"])
    path = tmp_path / f"{kind}.json"
    for removed, document in without_each_key(example):
        assert f"`{removed}`" in page("formats"), removed
        path.write_text(json.dumps(document), encoding="utf-8")
        with pytest.raises(InvalidInput):
            JSON_FILES[kind].load(path)


def test_a_trace_written_by_hand_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("formats", "python")["trace.npz"], {})
    trace = RankTrace.load(tmp_path / "trace.npz")
    assert (trace.num_heads, trace.num_sequences, trace.lengths.tolist()) == (2, 1, [4])


def test_every_key_that_is_written_is_documented(tmp_path):
    text = page("formats")
    for of_type in (StepTiming, Plan):
        for field in dataclasses.fields(of_type):
            assert f"`{field.name}`" in text, (of_type.__name__, field.name)
    block = Block(round=0, prompts=[0], tokens=1, steps=1, decode_s=0.1, group="a", processor_s=0.1)
    assert all(f"`{name}`" in text for name in storage.document(block.timed))
    trace = RankTrace(np.array([[0], [-2]]), np.array([0, 2]), group=np.zeros(1), meta={"group_names": ["a"]})
    for key in (*Calibration.from_trace(trace).document(), *Calibration.from_trace(trace).meta["groups"]["a"]):
        assert f"`{key}`" in text, key
    trace.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as arrays:
        assert all(f"`{name}`" in text for name in arrays)


def test_what_the_theory_page_shows_is_so():
    """Among it that a larger tree may take more steps."""
    found = blocks("theory", "pycon")
    assert any("[3, 4]" in block for block in found.values())
    names: dict[str, object] = {}
    for number, block in found.items():
        example = doctest.DocTestParser().get_doctest(block, names, f"theory.md, block {number}", None, 0)
        example.globs = names
        said: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(example, out=said.append, clear_globs=False)
        assert result.attempted
        assert not result.failed, "".join(said)


def test_every_layout_and_every_picture_is_explained():
    assert all(f"| `{layout}` |" in page("your-own-model") for layout in LAYOUTS)
    gallery = page("gallery")
    for name in FIGURES:
        assert f"## {name}\n" in gallery
        assert f"](images/{name}.png)" in gallery


def test_commands_on_the_pages_exist_with_their_options():
    checked = 0
    for path in DOCS.glob("*.md"):
        lines = [line for text in blocks(path.stem, "text").values() for line in text.splitlines()]
        lines += re.findall(r"<!-- output: (.*?)(?: \(.*?\))? -->|`(treeopt [a-z].*?)`", path.read_text("utf-8"))
        for line in ("".join(line) for line in lines):
            words = re.sub("'.*'", "TEXT", line).split()
            if len(words) < 2 or words[0] != "treeopt" or not words[1].isalpha() or words[1].isupper():
                continue
            known = {option for parameter in cli.commands[words[1]].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known | {"--help"}, line
            checked += 1
    assert checked > 20
