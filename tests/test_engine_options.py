"""Engines without a package: every option that an export writes is in the stored list of the engine's options."""

import json
from pathlib import Path

import pytest

from tests.engines_live.archives import Release
from tests.engines_live.check import NOT_THERE, report_of
from tests.engines_live.written import words_of_engine
from treeopt.engines.registry import ENGINES

KEPT = json.loads((Path(__file__).parent / "data" / "engine_options.json").read_text())["engines"]
OPTIONS = {kept["engine"]: set(kept["options"]) for kept in KEPT}
NOT_KEPT = {"tensorrt-llm"}  # the option of its YAML is newer than what was stored of its source


def unpackaged() -> set[str]:
    return {name for name, engine in ENGINES.items() if engine.package is None} | set(NOT_THERE)


def test_lists_are_complete():
    """Every engine without a package has a list."""
    assert set(OPTIONS) == unpackaged() - NOT_KEPT


@pytest.mark.parametrize("engine", sorted(OPTIONS))
def test_written_options(engine):
    """Every option that is written is in the engine's list."""
    written = {word.text for word in words_of_engine(engine) if word.kind == "flag"}
    assert written
    assert written <= OPTIONS[engine]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept["engine"])
def test_sources_of_lists(kept):
    """Every list names its repository, commit and files."""
    assert all(kept[key] for key in ("repository", "commit", "files", "read"))


@pytest.mark.parametrize("word", ["spec_decode_draft_tokens", "total_output_tokens", "per pos = (", "meta_info"])
def test_words_that_are_read(word):
    """Keys and texts that an import reads are looked up: a release without them lacks them."""
    gone = [line for engine in ("vllm", "llama-cpp", "sglang") for line in report_of(engine, Release("1", {})).gone]
    assert f"{word!r} is gone (read by import)" in gone
