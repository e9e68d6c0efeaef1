"""Engines whose source is in repositories alone: every option that an export writes stands in the list kept of theirs."""

import json
from pathlib import Path

import pytest

from tests.engines_live.places import NOT_THERE
from tests.engines_live.written import words_of_engine
from treeopt.engines.registry import ENGINES

KEPT = json.loads((Path(__file__).parent / "data" / "engine_options.json").read_text())["engines"]
OPTIONS = {kept["engine"]: set(kept["options"]) for kept in KEPT}
NOT_KEPT = {"tensorrt-llm"}  # the option of its YAML is newer than what was stored of its source


def unpackaged() -> set[str]:
    return {name for name, engine in ENGINES.items() if engine.package is None} | set(NOT_THERE)


def test_every_engine_without_a_package_has_its_options_kept():
    assert set(OPTIONS) == unpackaged() - NOT_KEPT


@pytest.mark.parametrize("engine", sorted(OPTIONS))
def test_every_option_that_is_written_is_one_of_the_engine(engine):
    written = {word.text for word in words_of_engine(engine) if word.kind == "flag"}
    assert written
    assert written <= OPTIONS[engine]


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept["engine"])
def test_the_lists_say_where_they_were_read(kept):
    assert all(kept[key] for key in ("repository", "commit", "files", "read"))
