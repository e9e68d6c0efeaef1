from __future__ import annotations

from pathlib import Path

import pytest

from .programs import PROGRAMS, Program
from .started import chain_run


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run directory with the plan of a chain, for the demo model and its draft model."""
    return chain_run(tmp_path_factory.mktemp("engines-live") / "draft", "draft")


@pytest.fixture(scope="session")
def lookup_run(tmp_path_factory) -> Path:
    """The same for guesses that are looked up in the text."""
    return chain_run(tmp_path_factory.mktemp("engines-live") / "ngram", "ngram")


@pytest.fixture(scope="session", params=PROGRAMS)
def program(request, tmp_path_factory) -> Program:
    """A server that runs here, as a user starts it."""
    return PROGRAMS[request.param](tmp_path_factory.mktemp(request.param))
