"""Files as other tools write them are read back as the measurement that they came from."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.engines.imports import read_measurement
from treeopt.errors import InvalidInput
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan

from .conftest import invoke

FILE = Path("file")


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


@st.composite
def calibrations(draw) -> Calibration:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads, ranks = rng.integers(1, 5, 2)
    trials = rng.integers(1, 5000, heads)
    shares = rng.dirichlet(np.ones(ranks + 1), heads)
    return Calibration(np.stack([rng.multinomial(n, p)[:-1] for n, p in zip(trials, shares, strict=True)]), trials)


def csv_files(calibration):
    trials = calibration.trials.tolist()
    exact, upto = calibration.hits.tolist(), calibration.hits.cumsum(1).tolist()
    ranks = range(calibration.top_k)

    def long(header, first, table, count):
        cells = ((k, r, table[k][r], n) for r in ranks for k, n in enumerate(trials))
        return "\n".join(
            [f"head,{header},trials", *(f"{k},{r + first},{c if count else c / n!r},{n}" for k, r, c, n in cells)]
        )

    wide = [",".join(["head", *(f"top{r + 1}" for r in ranks), "trials"])]
    wide += [",".join(map(repr, [k + 1, *(u / n for u in upto[k]), n])) for k, n in enumerate(trials)]
    return {
        "rank,hits": long("rank,hits", 0, exact, True),
        "rank,accuracy": long("rank,accuracy", 0, exact, False),
        "top_k,hits": long("top_k,hits", 1, upto, True),
        "top_k,accuracy": long("top_k,accuracy", 1, upto, False),
        "wide": "\n".join(wide),
    }


@pytest.mark.parametrize("form", ["rank,hits", "rank,accuracy", "top_k,hits", "top_k,accuracy", "wide"])
@given(calibrations())
def test_table_roundtrip(tmp_path_factory, form, calibration):
    """A table comes back as the counts it was made from."""
    path = write(tmp_path_factory.mktemp("c") / "table.csv", csv_files(calibration)[form])
    kind, measurement = read_measurement(path)
    assert kind == "csv"
    assert measurement.calibration.hits.tolist() == calibration.hits.tolist()
    assert measurement.calibration.trials.tolist() == calibration.trials.tolist()


# File, content, options, and why it is refused.
REFUSED = [
    ("x.txt", "", {}, "empty"),
    ("x.txt", "hello", {}, "looks like none"),
    ("x.json", '{"a": 1}', {}, "looks like none"),
    ("x.json", '{"a": [[0.5]', {}, "valid JSON"),
    ("x.csv", "head,top1,top2\n1,0.5,0.6", {}, "pass trials"),
    ("x.csv", "head,top1,trials\n1,0.5,9", {"trials": 5}, "leave trials out"),
    ("x.csv", "head,top1,trials\n1,0.4,9\n2,0.5,", {}, "each of its 2 heads"),
    ("x.csv", "head,top1,top2,trials\n1,0.5,0.4,9", {}, "never fall"),
    ("x.csv", "head,rank,hits,trials\n1,0,5,9\n1,1,2,9\n2,0,4,9", {}, "as many ranks"),
    ("x.csv", "head,top1\n5,0.5", {"trials": 5}, "number its heads"),
    ("x.csv", "head,top2,top3\n1,0.5,0.6", {"trials": 5}, "each top_k from 1"),
    ("x.json", '{"meta_info": {}}', {"trials": 3, "kind": "csv"}, "CSV with a column 'head'"),
    ("x.csv", "head,rank,hits,trials\n0,0,9,5", {}, "may not exceed its trials"),
    ("x.csv", "head,rank,hits,trials\n0,0,1.5,5", {}, "line 2: hits must be a whole number of at least 0, but got '1.5'"),
    ("x.csv", "head,rank,hits,trials\n0,0,1,5\n0,1,1,6", {}, "same trials"),
    ("x.csv", "head,rank,accuracy,trials\n0,1,0.5,5", {}, "each rank from 0"),
    ("x.csv", "head,rank,accuracy,trials\n0,0,nan,5", {}, "line 2: accuracy must be a share .* got 'nan'"),
    ("x.csv", "head,rank,accuracy,trials\n0,0,62.5,5", {}, "from 0 to 1"),
    ("x.csv", "head,rank,accuracy,trials\n0,0,0.9,5\n0,1,0.95,5", {}, "sum to 1.85"),
    ("x.csv", "head,rank,hits\n", {"trials": 5}, "below its header"),
    ("x.csv", "head,rank,hits\n0,0", {"trials": 5}, "line 2 must have 3 cells, but it has 2"),
    ("x.csv", "head,rank,top_k,hits\n0,0,1,1", {"trials": 5}, "must have the columns"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "options", "message"), REFUSED)
def test_refused_file(tmp_path, name, content, options, message):
    """A file that cannot be is refused by its rule."""
    with pytest.raises(InvalidInput, match=message):
        read_measurement(write(tmp_path / name, content), **options)


def test_search_of_accuracies(tmp_path):
    """Imported accuracies are searched by products, and notes keep the assumptions."""
    path, run = write(tmp_path / "t.csv", "head,top1,top2\n1,0.6,0.8\n2,0.4,0.5\n"), tmp_path / "run"
    shown = invoke("import", path, "--run", run, "--trials", "100")
    assert "rank 1" in shown.stdout
    for notes in (" ".join(shown.stderr.split()), *Calibration.load(run / "calibration.json").meta["notes"][-1:]):
        assert "100 trials a head were assumed" in notes
    invoke("search", "--run", run, "--budget", "3")
    assert Plan.load(run / "plan.json").entries[0].tree.choices == [[0], [0, 0]]
