"""Engines as they were released last: nothing that treeopt writes for them or reads of them is gone."""

import pytest

from tests.engines_live import fake
from tests.engines_live.archives import AWAY, release_of
from tests.engines_live.check import facts_of, look
from tests.engines_live.places import NOT_THERE
from treeopt.engines.registry import ENGINES

pytestmark = pytest.mark.slow
PACKAGED = [name for name, engine in ENGINES.items() if engine.package]


@pytest.mark.parametrize("engine", PACKAGED)
def test_nothing_is_gone(engine):
    report = look(engine)
    if not report.facts:
        pytest.skip(report.release)
    assert report.lines() == []


@pytest.mark.parametrize("engine", [name for name in PACKAGED if name not in NOT_THERE])
def test_every_fact_is_missed_where_its_word_is_renamed(engine):
    try:
        release = release_of(ENGINES[engine].package)
    except AWAY as error:
        pytest.skip(str(error))
    noticed = {
        (fact.what, word): fact.gone(fake.renamed(release, fact.where, word)) is not None
        for fact in facts_of(engine)
        if fact.gone(release) is None
        for word in fact.words
    }
    assert noticed
    assert all(noticed.values()), [one for one, was_noticed in noticed.items() if not was_noticed]
