from __future__ import annotations

from pathlib import Path

import pytest

from .started import chain_run


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run directory with the plan of a chain, for the demo model and its draft model."""
    return chain_run(tmp_path_factory.mktemp("engines-live") / "draft", "draft")


@pytest.fixture(scope="session")
def lookup_run(tmp_path_factory) -> Path:
    """The same for guesses that are looked up in the text."""
    return chain_run(tmp_path_factory.mktemp("engines-live") / "ngram", "ngram")
