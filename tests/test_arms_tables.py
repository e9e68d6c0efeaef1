"""Tables as people paste them become arms (forms and right values: tests/data/pasted_tables.txt)."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.arms.arm import Arm
from treeopt.arms.tables import read_tables
from treeopt.arms.tuned import read_arms
from treeopt.errors import InvalidInput

from .helpers.runs import some_bench

FORMS = re.findall(
    r"^===== (.+)\n((?:.*\n)*?)=>\n((?:(?!=====).*\n)*)",
    (Path(__file__).parent / "data/pasted_tables.txt").read_text("utf-8"),
    re.MULTILINE,
)


def shown(arm, expected):
    """The arm as a line of the file of forms, with the fields that are expected."""
    about = ",".join(f"{key}:{value}" for key, value in arm.about.items())
    values = {
        **vars(arm),
        "about": about,
        "model": arm.model.replace(" ", "_"),
        "positions": ",".join(f"{rate:g}" for rate in arm.positions),
    }
    named = re.findall(r" (\w+)=", expected) or []
    named += [name for name in ("model", "dataset", "about") if values[name] and name not in named]
    named += ["unit"] * (arm.unit != "all" and "unit" not in named)
    fields = [
        f" {name}={values[name]:.3g}" if isinstance(values[name], float) else f" {name}={values[name]}"
        for name in named
    ]
    numbers = ["-" if value is None else f"{value:g}" for value in (arm.tokens_per_s, arm.tokens_per_step)]
    k = "-" if arm.k is None else arm.k
    drafter = arm.drafter.replace(" ", "_")
    return f"{drafter} {k} @{arm.concurrency} {' '.join(numbers)}{''.join(fields)}"


@pytest.mark.parametrize(("text", "right"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
def test_pasted_forms(text, right):
    """Every form gives the arms that a reader sees in it."""
    lines = right.splitlines()
    if lines[0].startswith("! "):
        with pytest.raises(InvalidInput, match=re.escape(lines[0][2:])):
            read_tables(text, Path("t.md"), {})
        return
    arms = read_tables(text, Path("t.md"), {}).arms
    lines += [""] * (len(arms) - len(lines))
    assert [shown(arm, line) for arm, line in zip(arms, lines, strict=False)] == [
        re.sub(r"(?<=[ =,])(-?\d+\.\d+|\d+)(?=[ ,]|$)", lambda match: f"{float(match[0]):.6g}", line) for line in lines
    ]


HEADER = "k,concurrency,tok/s,accept len,positions,repeats\n"
WHOLE = "column 'k': a cell must be a whole number from 0"
LEAST = "column 'concurrency': a cell must be a whole number from 1"
NUMBER = "column 'tok/s': a cell must be a number, but it is"
CUT = "must have 6 cells, as its header has"
# Rows below HEADER, and what is said of them; or what is read.
DAMAGED = {
    "0,1,$(rm -rf /),,,": NUMBER, "0,1,=SUM(A1:A3),,,": NUMBER, "0,1,#REF!,,,": NUMBER, "0,1,True,,,": NUMBER,
    "0,1,0x50,,,": NUMBER, "0,1,5²,,,": NUMBER, "0,1,٥٠,,,": NUMBER, "0,1,５０,,,": NUMBER, "0,1,45-50,,,": NUMBER,
    "0,1,45 / 50,,,": NUMBER, "0,1,45 → 50,,,": NUMBER, "0,1,2026-09-01,,,": NUMBER, "0,1,fast,,,": NUMBER,
    "0,1,inf,,,": "tokens_per_s must be a number above 0", "0,1,-inf,,,": "tokens_per_s must be", "0,1,1e400,,,": "tokens_per_s must be",
    "0,1,-50,,,": "tokens_per_s must be", "0,1,0,,,": "tokens_per_s must be", "0,1,0%,,,": "tokens_per_s must be",
    "-2,1,50,,,": WHOLE, "2.5,1,50,,,": WHOLE, "1e9,1,50,,,": WHOLE, "inf,1,50,,,": WHOLE, "99999999999999999999,1,50,,,": WHOLE,
    "２,1,50,,,": "column 'k': a cell must be a number", "2,0,50,,,": LEAST, "2,-8,50,,,": LEAST, "2,1e400,50,,,": LEAST,
    "2,1.5,50,,,": LEAST, "2,many,50,,,": "column 'concurrency': a cell must be a number", "2,1,50,lots,,": "column 'accept len'",
    "2,1,50,-1,,": "tokens_per_step must be", "2,1,50,,a;b,": "column 'positions'", "2,1,50,,0.7;-0.5,": "positions.1 must be a share",
    "2,1,50,,0.7;1.5,": "positions.1 must be a share", "2,1,50,,70;101,": "positions.1 must be a share", "2,1,50,,,0": "repeats must be",
    "2,1,50,,,-1": "repeats must be", "2,1,50,,,2.5": "repeats must be", "2,1,50,,,many": "column 'repeats'", "2,1,50": CUT,
    "2,1,50,2.1,,,9,9": CUT, '2,1,"50,,,': "no row of a table", '2,1,"5"0",,,': "no row of a table", "2,1,5\x000,,,": "control character",
    "2,1,5\x070,,,": "control character", "2,1,50\ud800,,,": "control character", "2,1,\u202e50,,,": "control character",
    "2,1,5\u200b0,,,": "control character", "2,1," + "9" * 3000 + ",,,": "characters", "2,1,50,,," + "x" * 2**20: "no row of a table",
    "2,1,50,,,\n" * 20_000: "8,192 rows",
    "2,1,nan,,,": (2, 1, None), "2,1,1e2,,,": (2, 1, 100), "2,1,\xa050\xa0,,,": (2, 1, 50), "3.0,1,50,,,": (3, 1, 50),
    "2,1,\x1b[1m50\x1b[0m,,,": (2, 1, 50), '2,1,"1,234.5",,,': (2, 1, 1234.5), "2,1,1_000,,,": (2, 1, 1000), "k=2,c=8,+50,,,": (2, 8, 50),
    "2,1,50,,,,,": (2, 1, 50), "2 (default),1,50 tok/s (best),,,": (2, 1, 50), "2,1,OOM,,,": None,
}  # fmt: skip
TEXTS = {
    "k,tok/s,tok/s\n2,80,81\n": "every column once", "| k | tok/s |\n|---|---|\n| 0 | 50 |\n| 2 | 8": "was it cut off",
    "| k | tok/s |\n|---|---|\n| 0 | 50 | 3 |": "must have 2 cells", "k,gain\n2,-100%\n": "tokens_per_s must be",
    "k,tok/s,acceptance rate\n2,80,150%\n": "at most 1", "k,tok/s,stderr\n2,80,-1\n": "stderr must be",
    ",".join(f"c={i}" for i in range(1, 300)) + "\n" + "5," * 298 + "5\n": "200 columns", "": "tokens per second", HEADER: "tokens per second",
    "|" * 10**5: "tokens per second", "x " * 2**18: "tokens per second",
}  # fmt: skip


@pytest.mark.parametrize("row", DAMAGED, ids=lambda row: ascii(row)[:30])
def test_damaged_rows(row):
    """A damaged or hostile row is read right or refused in one sentence that names its line and column."""
    right = DAMAGED[row]
    text = f"{HEADER}0,1,25,,,\n{row}\n"
    if isinstance(right, str):
        with pytest.raises(InvalidInput, match=re.escape(right)) as error:
            read_tables(text, Path("t.csv"), {})
        assert "t.csv line 3" in str(error.value) or "rows" in right
        assert str(error.value).isprintable()
    else:
        arms = [(arm.k, arm.concurrency, arm.tokens_per_s) for arm in read_tables(text, Path("t.csv"), {}).arms]
        assert arms == [(0, 1, 25), right][: 1 if right is None else 2]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:30])
def test_damaged_texts(text):
    with pytest.raises(InvalidInput, match=re.escape(TEXTS[text])):
        read_tables(text, Path("t.csv"), {})


def test_columns_are_corrected():
    """What the user says of a column holds; a column that is not there is named with those that are."""
    text = "k,speed,accept len,who\n2,80,1.5,a\n2,81,1.5,b\n4,82,1.9,a\n"
    told = {"accept len": "accepted_per_step", "who": "version"}
    arms = read_tables(text, Path("t.csv"), told).arms
    assert [arm.tokens_per_step for arm in arms] == [2.5, 2.5, 2.9]
    assert [arm.about for arm in arms] == [{"version": "a"}, {"version": "b"}, {"version": "a"}]
    wide = read_tables("c,off,K=2,accept K=2\n1,50,80,1.5\n", Path("t.csv"), {"accept": "accepted_per_step"})
    assert wide.arms[1].tokens_per_step == 2.5
    assert wide.meanings["accept"] == "accepted tokens per step, without the bonus token"
    assert wide.meanings["tokens_per_s"] == "all requests together"
    with pytest.raises(InvalidInput, match=r"has no column 'acept len', only 'k'.*Did you mean 'accept len'"):
        read_tables(text, Path("t.csv"), {"acept len": "ignore"})


PLAIN = st.builds(Arm, concurrency=st.integers(1, 512), tokens_per_s=st.floats(0.1, 1e6), tokens_per_step=st.just(1.0))
DRAFTED = st.builds(
    Arm,
    drafter=st.sampled_from(["MTP", "EAGLE-3 chain", "DFlash2", "DSpark (other data)", "n-gram"]),
    k=st.integers(1, 64),
    concurrency=st.integers(1, 512),
    tokens_per_s=st.none() | st.floats(0.1, 1e6),
    tpot_ms=st.none() | st.floats(0.01, 1e4),
    tokens_per_step=st.none() | st.floats(1, 65),
    positions=st.lists(st.floats(0, 1).map(lambda share: round(share, 6)), max_size=8).map(tuple),
    prompts=st.none() | st.integers(1, 10**6),
).map(lambda arm: arm if arm.tokens_per_s else replace(arm, tpot_ms=None))  # a time alone is a speed
FIELDS = ("drafter", "k", "concurrency", "tokens_per_s", "tpot_ms", "tokens_per_step", "positions", "prompts")


@given(
    plain=PLAIN,
    drafted=st.lists(DRAFTED, max_size=9, unique_by=lambda arm: (arm.setting, arm.concurrency)),
    mark=st.sampled_from([",", ";", "\t", " | "]),
)
def test_long_tables_roundtrip(plain, drafted, mark):
    """Arms that are written as a long table come back."""

    def cell(value):
        if isinstance(value, tuple):
            value = " ".join(format(share, "f") for share in value)
        text = "" if value is None else str(value)
        return text.replace(".", ",") if mark == ";" else text

    arms = [plain, *drafted]
    lines = [mark.join(FIELDS).replace("tokens_per_s" + mark, "tok/s (all requests)" + mark)]
    lines += [mark.join(cell(getattr(arm, name)) for name in FIELDS) for arm in arms]
    if mark == " | ":
        lines = [f"| {line} |" for line in lines]
    read = read_tables("\n".join(lines) + "\n", Path("t.csv"), {}).arms
    key = [tuple(getattr(arm, name) for name in FIELDS) for arm in arms]
    assert sorted(map(repr, (tuple(getattr(arm, name) for name in FIELDS) for arm in read))) == sorted(map(repr, key))


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(0, 20), min_size=2, max_size=5, unique=True),
    st.data(),
)
def test_wide_tables_roundtrip(loads, lengths, data):
    """Speeds that are written with a column for each K, or for each concurrency, come back."""
    speeds = {(k, c): data.draw(st.floats(100, 1e5)) for c in loads for k in lengths}
    by_k = ["| c | " + " | ".join(f"K={k}" if k else "off" for k in lengths) + " |", "|---|" + "---|" * len(lengths)]
    by_k += [f"| {c} | " + " | ".join(f"{speeds[k, c]}" for k in lengths) + " |" for c in loads]
    by_c = ["k," + ",".join(f"bs {c}" for c in loads)]
    by_c += [f"{k}," + ",".join(f"{speeds[k, c]}" for c in loads) for k in lengths]
    for lines in (by_k, by_c):
        arms = read_tables("\n".join(lines) + "\n", Path("t"), {}).arms
        assert {(arm.k, arm.concurrency): arm.tokens_per_s for arm in arms} == speeds


def test_a_file_of_treeopt_is_no_table_of_words(tmp_path):
    """A benchmark in JSON became arms, and "Serve medusa_choices : [" the advice."""
    some_bench().save(tmp_path / "arms.txt")
    with pytest.raises(InvalidInput, match=r"must have .*treeopt.arms/.*but it has 'treeopt.bench/"):
        read_arms([tmp_path / "arms.txt"])
