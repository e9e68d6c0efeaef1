"""Tables as people paste them become arms (forms and right values: tests/data/pasted_tables.txt)."""

import re
from pathlib import Path

import pytest

from treeopt.arms.tables import read_tables
from treeopt.errors import InvalidInput

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
