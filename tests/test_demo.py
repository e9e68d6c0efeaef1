"""The embedded model and the prompts that are cut for it."""

import json
import sysconfig

import pytest
from click.testing import CliRunner

from treeopt import demo
from treeopt.demo.corpus import fingerprint, is_held_out, standard_library
from treeopt.errors import InvalidInput
from treeopt.runtime.prompts import DEMO_TOKENS, demo_prompts
from treeopt.runtime.session import open_session


@pytest.fixture(scope="module")
def session():
    return open_session()


def test_the_embedded_files_are_at_most_16_mb():
    files = [*demo.MODEL.iterdir(), *demo.HEADS.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 16 * 2**20


def test_no_module_of_a_held_out_package_was_trained_on():
    held_out, training = standard_library(held_out=True), standard_library(held_out=False)
    packages = [{m.name.split("/")[0].removesuffix(".py") for m in part} for part in (held_out, training)]
    assert not packages[0] & packages[1]
    assert all(is_held_out(package) for package in packages[0])
    assert 0.03 < len(held_out) / (len(held_out) + len(training)) < 0.3
    for part in packages:
        assert not part & {"test", "encodings", "pydoc_data", "idlelib", "lib2to3", "site-packages"}


def test_demo_prompts_are_cut_from_held_out_modules(session):
    texts = {module.name: module.text for module in standard_library(held_out=True)}
    prompts = session.prompts.prompts
    assert len(prompts) > 500
    assert len({p.sha256 for p in prompts}) == len(prompts)
    for prompt in prompts[:50]:
        assert len(prompt.tokens) <= DEMO_TOKENS[1]
        assert session.target.tokenizer.decode(prompt.tokens) in texts[prompt.group]
    assert demo_prompts(session.target) == session.prompts
    assert session.prompts.fingerprint == fingerprint(standard_library(held_out=True))


def test_a_python_without_its_sources_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InvalidInput, match="needs the sources of the Python standard library"):
        standard_library(held_out=True)


@pytest.mark.slow
def test_the_recipe_runs_and_continues(tmp_path):
    from treeopt.demo.build import main

    books = tmp_path / "books.txt"
    books.write_text("CHAPTER I\n\nIt was a dark and stormy night. " * 4000, encoding="utf-8")
    options = ["--books", str(books), "--work", str(tmp_path / "work"), "--tokens", "16384", "--prompts", "64",
               "--epochs", "1"]  # fmt: skip
    for _ in range(2):  # the second time everything is there
        result = CliRunner().invoke(main, options, catch_exceptions=False)
        assert result.exit_code == 0
    card = json.loads((tmp_path / "work" / "card.json").read_text())
    assert card["held_out_bits_per_byte"] > 1
    assert (tmp_path / "work" / "heads" / "medusa_lm_head.safetensors").exists()
