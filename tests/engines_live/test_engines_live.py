"""Engines as they were released last: nothing that treeopt writes for them or reads of them is gone."""

import pytest

from tests.engines_live.check import look
from treeopt.engines.registry import ENGINES

pytestmark = pytest.mark.slow
PACKAGED = [name for name, engine in ENGINES.items() if engine.package]


@pytest.mark.parametrize("engine", PACKAGED)
def test_nothing_is_gone(engine):
    report = look(engine)
    if not report.words:
        pytest.skip(report.release)
    assert report.lines() == []
