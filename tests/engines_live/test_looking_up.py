"""Every word that treeopt writes for an engine, or reads of it, has a place in the engine's source where it is looked up."""

import pytest

from tests.engines_live.check import place_of
from tests.engines_live.places import NOT_THERE
from tests.engines_live.readings import words_read
from tests.engines_live.written import words_of_engine
from treeopt.engines.registry import ENGINES

PACKAGED = [name for name, engine in ENGINES.items() if engine.package and name not in NOT_THERE]


@pytest.mark.parametrize("engine", PACKAGED)
def test_every_word_has_a_place_to_be_looked_up_in(engine):
    lacking = [str(word) for word in {**words_of_engine(engine), **words_read(engine)} if not place_of(engine, word)]
    assert not lacking, f"say in tests/engines_live/places.py where {engine} defines: {', '.join(lacking)}"
