"""The tables of docs/formats.md are those of the schemas (`python -m tests.test_schemas` writes them), and every form is read.

tests/forms/ has a sample of each kind of file in each form that there was, from the first release on: KIND-NUMBER.json or .npz.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeopt.arms.arm import Arms
from treeopt.cli.show import SCHEMAS
from treeopt.files.storage import schema
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.trace import RankTrace
from treeopt.report.schemas import DRAFT, KINDS, json_schema

from .conftest import invoke

PAGE = Path(__file__).resolve().parents[1] / "docs" / "formats.md"
SAMPLES = Path(__file__).parent / "forms"


def read_plan(file: Path) -> list[object]:
    entry = Plan.load(file)[1]
    return [str(entry.speedup), str(entry.tokens_per_step), entry.draft.choices, len(entry.curve), entry.tied_sizes]


def read_bench(file: Path) -> list[object]:
    bench = Benchmark.load(file)
    return [str(bench.speedup("chosen")), *(str(contender.tokens_per_step) for contender in bench.contenders)]


def read_calibration(file: Path) -> list[object]:
    calibration = Calibration.load(file)
    return [*calibration.accept[:, 0].round(3).tolist(), *calibration.stderr[:, 0].round(3).tolist()]


FORMS: dict[str, tuple[Callable[[Path], object], object]] = {  # kind -> its reader, and what a sample gives in every form
    "trace": (lambda file: RankTrace.load(file).ranks.tolist(), [[0], [0], [0], [-2], [0], [0], [0], [-2]]),
    "requests": (lambda file: RequestLog.load(file).prompt_tokens.tolist(), [1, 2]),
    "probe": (lambda file: Probe.load(file).tree.choices, [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]),
    "calibration": (read_calibration, [0.409, 0.359, 0.061, 0.095]),
    "profile": (lambda file: [(p.size, p.depth, p.step_ms[0]) for p in LatencyProfile.load(file).points],
                [(2, 1, 2.1), (4, 1, 2.2), (4, 2, 2.2), (8, 2, 2.4)]),
    "plan": (read_plan, ["1.90 [1.66, 2.22]", "2.28 [1.99, 2.64]", [[0], [1], [2], [3], [0, 0], [0, 1], [1, 0]], 8, [5, 6, 7, 8]]),
    "bench": (read_bench, ["1.37 [0.98, 1.91]", "1.00 ±0.00", "1.72 ±0.00"]),
    "arms": (lambda file: [(arm.name, arm.tokens_per_s, arm.stderr) for arm in Arms.load(file).arms],
             [("off", 100.0, 0.02), ("eagle3 3", 150.0, None)]),
}  # fmt: skip
TABLE = re.compile(r"(<!-- keys: (\w+)(?: (?!beside)(\w+))?(?: beside (\w+))? -->\n\n)[^<]*(?=<!-- /keys -->)")
ORIGINS = ("Provenance", "DrafterRecord", "RuleRecord", "Runtime", "SkippedRow")  # whose keys say what they are


def type_words(part: dict[str, Any]) -> str:
    """What a table says of a key's type."""
    if "$ref" in part:
        return part["$ref"].rpartition("/")[2]
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(type_words(each) for each in part["anyOf"] if each.get("type") != "null"))
    if "enum" in part:
        return "text"
    if part.get("type") == "array":
        items = part.get("prefixItems") or [part["items"]]
        return f"[{', '.join(map(type_words, items))}]"
    if part.get("type") == "object":
        values = part.get("additionalProperties")
        return f"{{name: {type_words(values)}}}" if isinstance(values, dict) else "object"
    return {"integer": "int", "boolean": "bool", "string": "text"}.get(
        part.get("type", "object"), part.get("type", "any")
    )


def table(kind: str, name: str | None, beside: str | None) -> str:
    """The keys of a kind of document, or of an object in it but for those of another one."""
    schema = json_schema(kind)
    part = schema["$defs"][name] if name else schema
    others = DRAFT if beside == "Draft" else schema["$defs"][beside]["properties"] if beside else ()
    rows = ["| key | type | | meaning |", "|---|---|---|---|"]
    for key, value in part["properties"].items():
        if key == "schema" or key in others:
            continue
        required = "**required**" if key in part["required"] else ""
        rows.append(f"| `{key}` | {type_words(value)} | {required} | {value.get('description', '')} |")
    return "\n".join(rows) + "\n\n"


def page() -> str:
    return TABLE.sub(lambda found: found[1] + table(*found.groups()[1:]), PAGE.read_text("utf-8"))


def test_page_is_made_of_schemas():
    assert page() == PAGE.read_text("utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_text(kind):
    schema = json_schema(kind)
    parts = [schema, *(part for name, part in schema["$defs"].items() if name not in ORIGINS)]
    keys = {key: value for part in parts for key, value in part.get("properties", {}).items() if key != "schema"}
    assert [key for key, value in keys.items() if "description" not in value] == []


@pytest.mark.parametrize("kind", KINDS)
def test_sample_holds_to_schema(kind):
    validate = pytest.importorskip("jsonschema").validate
    number = schema(kind).rpartition("/")[2]
    if kind == "score":
        text = invoke("score", "mc_sim_7b_63", "--calibration", "vicuna-7b-medusa1", "--json").stdout
    else:
        text = (SAMPLES / f"{kind}-{number}.json").read_text("utf-8")
    validate(json.loads(text), json_schema(kind))


def test_schema_is_printed():
    assert [*KINDS] == [*SCHEMAS]
    assert json.loads(invoke("show", "--schema", "plan").stdout) == json_schema("plan")


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_is_read(kind):
    """A form that changes keeps its sample and its reader: all samples of a kind give the same."""
    reader, given = FORMS[kind]
    files = list(SAMPLES.glob(f"{kind}-*"))
    assert f"{kind}-{schema(kind).rpartition('/')[2]}" in {file.stem for file in files}
    assert [reader(file) for file in files] == [given] * len(files)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
