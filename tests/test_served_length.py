"""An engine's drafts have the length that was served, also where no draft came so far."""

import json

import pytest

from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan

from .conftest import invoke
from .helpers.engine_files import bench, exposition, vllm_line

LONG = [39, 25, 14, 7, 4, *[0] * 10]  # of 65 drafts of 15 guesses, the drafts that reached each depth
STEPS = "batch_size,num_speculative_tokens,step_ms\n"


def counted(run, drafts, reached):
    """A run of what an engine printed."""
    log = run.path.parent / f"{drafts}.log"
    log.write_text(vllm_line(drafts, reached))
    invoke("import", log, "--run", run.path)
    return log


def timed(run, rows):
    """The run with steps of a table, by the guesses of each."""
    table = run.path.parent / "steps.csv"
    table.write_text(STEPS + "".join(f"1,{guesses},{ms}\n" for guesses, ms in rows.items()))
    invoke("profile", "--from-csv", table, "--run", run.path)


def test_depths_that_no_draft_reached_are_counted_without_a_trial(run):
    """K = 15 was read as 6: only the depths that some draft came to."""
    counted(run, 65, LONG)
    calibration = Calibration.load(run.calibration)
    assert calibration.hits[:, 0].tolist() == LONG
    assert calibration.trials.tolist() == [65, *LONG[:-1]]
    assert calibration.meta["draft_length"] == 15
    assert calibration.survival[6:].tolist() == calibration.accept[6:, 0].tolist() == [0] * 9
    errors = calibration.survival_stderr.tolist()
    assert errors[5:] == sorted(errors[5:], reverse=True)


def test_the_served_length_is_planned_where_its_steps_were_timed(run):
    """2.37 tokens in 110 ms beside one in 80; search refused, since no tree of 7 to 16 rows could be planned."""
    counted(run, 65, LONG)
    timed(run, {0: 80, 15: 110})
    invoke("search", "--run", run.path)
    chosen = Plan.load(run.plan).entries[0].chosen
    assert (chosen.depth, chosen.step_ms) == (15, 110)
    assert chosen.tokens_per_step == pytest.approx(1 + sum(LONG) / 65)
    assert chosen.speedup == pytest.approx((1 + sum(LONG) / 65) * 80 / 110)


def test_a_log_whose_acceptance_fell_is_compared(run):
    """1.06 tokens in 60 ms beside one in 40; compare refused just where nearly nothing is accepted any more."""
    counted(run, 51, [44, 36, 30, 24, 16, 13, 9])
    timed(run, {0: 40, 7: 60})
    invoke("search", "--run", run.path)
    fallen = run.path.parent / "fallen.log"
    fallen.write_text(vllm_line(70, [4, 0, 0, 0, 0, 0, 0]))
    found = json.loads(invoke("compare", run.path, fallen, "--json", code=3).stdout)
    (loss,) = found["losses"]
    assert loss["served"]["tokens_per_step"]["value"] == pytest.approx(1 + 4 / 70)
    assert loss["loss"]["value"] == pytest.approx(1 - (1 + 4 / 70) * 40 / 60)


@pytest.mark.parametrize("steps", [{}, {0: 10, 13: 12}])
def test_a_drafter_that_is_never_right_is_not_planned(run, steps):
    """5,000 drafts of 13, none accepted; a chain of 1 was planned and exported."""
    files = [run.path.parent / name for name in ("before.txt", "after.txt")]
    for file, drafts in zip(files, (0, 5000), strict=True):
        file.write_text(exposition(drafts, [0] * 13))
    invoke("import", *files, "--run", run.path)
    if steps:
        timed(run, steps)
    assert "The drafter does not work: " in invoke("search", "--run", run.path, code=1).stderr
    invoke("export", "--to", "vllm", "--run", run.path, code=1)
    assert not run.plan.exists()
    invoke("import", *files, "--run", run.path, "--drafter", "ngram", "--overwrite")
    invoke("search", "--run", run.path)  # a text that does not repeat is no fault of a drafter that copies


@pytest.mark.parametrize("drafter", ["eagle3", "ngram"])
def test_steps_without_a_draft_count(run, drafter):
    """1,000 drafts that give 2.82 tokens, and 500 steps of one token: 3,320 in 1,500 steps, of which each has its own price."""
    (counts := run.path.parent / "bench.json").write_text(json.dumps(bench()))
    invoke("import", counts, "--drafter", drafter, "--tokens", 3320, "--run", run.path)
    timed(run, {0: 10, 3: 13})
    invoke("search", "--run", run.path)
    (entry,) = Plan.load(run.plan).entries
    assert entry.chosen.tokens_per_step == pytest.approx(3320 / 1500)
    assert entry.chosen.speedup == pytest.approx(3320 * 10 / (1000 * 13 + 500 * 10))


def test_each_length_keeps_its_own_rates(run):
    """Pooled, a length of 3 would have 2.98 tokens per step, and that of 5 would have 3.18."""
    logs = [run.path.parent / name for name in ("3.log", "5.log")]
    for log, counts in zip(logs, ((1000, [800, 600, 420]), (500, [450, 300, 200, 100, 50])), strict=True):
        log.write_text(vllm_line(*counts))
    invoke("import", *logs, "--run", run.path)
    timed(run, {0: 10, 3: 12, 5: 12})
    invoke("search", "--run", run.path)
    (entry,) = Plan.load(run.plan).entries
    assert entry.chosen.tokens_per_step == pytest.approx(3.2)
    (three,) = [point for point in entry.curve if point.depth == 3]
    assert three.tokens_per_step == pytest.approx(2.82)


def test_a_block_is_planned_as_it_was_served(run):
    """A block of 3 is no prefix of one of 7."""
    (log := run.path.parent / "7.log").write_text(vllm_line(51, [44, 36, 30, 24, 16, 13, 9]))
    invoke("import", log, "--drafter", "dflash", "--run", run.path)
    timed(run, {0: 40, 3: 70, 7: 140})
    told = invoke("search", "--run", run.path).stderr
    (entry,) = Plan.load(run.plan).entries
    assert (entry.chosen.depth, float(entry.chosen.speedup)) == (7, pytest.approx((1 + 172 / 51) * 40 / 140))
    assert "A block of another length has other guesses" in " ".join(told.split())


GUESSES = "head,rank,hits,trials\n" + "".join(f"{head},0,9000,10000\n" for head in range(1, 7))
COMMANDS = (("profile", "--from-csv", "steps.csv"), ("import", "guesses.csv"))


@pytest.mark.parametrize(
    "commands", [COMMANDS, COMMANDS[::-1], (*COMMANDS, COMMANDS[0])], ids=["steps first", "last", "twice"]
)
def test_the_order_of_commands_does_not_decide_the_plan(run, commands):
    """Steps without depths were taken to be 4 deep before the drafter's 6 guesses were known, and stayed so."""
    folder = run.path.parent
    (folder / "steps.csv").write_text("batch_size,size,step_ms\n1,1,10\n1,3,12\n1,7,15\n")
    (folder / "guesses.csv").write_text(GUESSES)
    for *words, file in commands:
        invoke(*words, folder / file, "--run", run.path)
    invoke("search", "--run", run.path)
    (entry,) = Plan.load(run.plan).entries
    tokens = sum(0.9**depth for depth in range(7))
    assert (entry.chosen.size, entry.chosen.depth) == (7, 6)
    assert entry.chosen.speedup == pytest.approx(tokens * 10 / 15)
    assert not [warning for warning in entry.warnings if "depths up to" in warning]
    assert [(point.size, point.depth) for point in run.read_profile().points] == [(3, 2), (7, 6)]


def test_a_depth_that_is_said_stays(run):
    """With --heads 4 a tree of 7 rows is 4 deep, whatever the drafter guesses."""
    (table := run.path.parent / "steps.csv").write_text("batch_size,size,step_ms\n1,1,10\n1,7,15\n")
    (guesses := run.path.parent / "guesses.csv").write_text(GUESSES)
    invoke("profile", "--from-csv", table, "--heads", 4, "--run", run.path)
    invoke("import", guesses, "--run", run.path)
    assert [(point.size, point.depth) for point in run.read_profile().points] == [(7, 4)]
