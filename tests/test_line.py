"""Every drafter and rule goes through the line: calibrate, plan, bench, on the demo model in float64."""

import json

import pytest

from treeopt.records.rules import RULES, SAME_TEXT

from .conftest import invoke

CSV = "batch_size,size,depth,step_ms\n1,1,0,2.0\n1,2,1,2.1\n1,4,1,2.2\n1,3,2,2.3\n1,8,2,2.4\n1,4,3,2.5\n1,12,3,2.6\n"
WAYS = [
    ("--drafter", "hydra"),
    ("--drafter", "draft"),
    ("--drafter", "ngram"),
    ("--drafter", "draft", "--rule", "reject:temperature=0.8"),
    ("--rule", "sample:temperature=0.7"),
    ("--rule", "typical:temperature=0.7"),
]


@pytest.mark.parametrize(
    "way", [way if "typical" in way else pytest.param(way, marks=pytest.mark.long) for way in WAYS], ids=" ".join
)
def test_a_drafter_and_a_rule_from_calibration_to_proof(way, tmp_path):
    run = ("--run", tmp_path / "run")
    (tmp_path / "steps.csv").write_text(CSV)
    short = ("--num-prompts", 6, "--max-new-tokens", 12)
    invoke("calibrate", *way, "--dtype", "float64", *short, *run)
    invoke("profile", "--from-csv", tmp_path / "steps.csv", *run)
    invoke("search", "--budget", 12, *run)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["entries"][0]["rows"] > 1
    invoke("bench", "--num-prompts", 2, "--rounds", 1, *run)
    bench = json.loads((tmp_path / "run" / "bench.json").read_text())
    rule = RULES[way[way.index("--rule") + 1].partition(":")[0] if "--rule" in way else "greedy"]
    assert plan["acceptance"]["rule"] == rule
    contenders = {contender["name"]: contender for contender in bench["contenders"]}
    for name, of in contenders.items():
        if rule in SAME_TEXT:
            assert of["identical"] == of["compared"]
            assert of["steps"] == of["replayed_steps"]
        else:
            assert "replayed_steps" not in of
            assert name in bench["quality"]
    assert contenders["chosen"]["tokens_per_step"]["value"] > 1
