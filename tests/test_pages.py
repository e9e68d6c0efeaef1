"""What README and docs show is what treeopt prints and draws. `make pages` writes it anew; it names pages to write some.

A page has a file in a block with a title, and what a command prints in a block below `<!-- output: COMMAND -->`, both
streams or a part of the lines where the comment says so. The commands of a page share a folder.
"""

import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.helpers.runs import make_run, some_bench
from treeopt.cli import cli
from treeopt.records.plan import Plan
from treeopt.records.rundir import RunDirectory
from treeopt.report.bench_table import bench_table
from treeopt.report.figures.registry import FIGURES, Inputs
from treeopt.report.latency_table import profile_table
from treeopt.report.plan_table import plan_table
from treeopt.report.tables import calibration_table

ROOT = Path(__file__).resolve().parents[1]
README, GALLERY = "README.md", "docs/gallery.md"
PAGES = (README, "docs/tutorial.md", "docs/your-server.md")
BLOCK = re.compile(
    r'^```text title="(?P<file>[^"\n]+)"\n(?P<text>[^`]+)^```\n'
    r"|^(?P<mark><!-- output: treeopt (?P<words>[^(\n]+?)"
    r'(?: \((?P<stream>stderr|both streams)\)| \(from "(?P<first>.+?)" to "(?P<last>.+?)"\))? -->\n```text\n)[^`]*^```\n',
    re.MULTILINE,
)
DRAWING = ("style", "chart", "tree")  # modules of figures; the others compute what is drawn
DRAWN_BY = re.compile(r"<!-- drawn by: (\w+) -->")
GROUPS = (
    "calibrate --run groups --group-by module --num-prompts 96",
    "search --run groups",
    "plot groups --run groups",
)


def printed(words: str, stream: str | None = None) -> str:
    """What a command prints on lines of 100 characters."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(cli, shlex.split(words), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    text = {None: result.stdout, "stderr": result.stderr, "both streams": result.output}[stream]
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def part(text: str, first: str, last: str) -> str:
    """The lines of a text from one that begins with ``first`` to the next one that begins with ``last``."""
    found = re.search(rf"^{re.escape(first)}.*?^{re.escape(last)}.*?\n", text, re.MULTILINE | re.DOTALL)
    assert found, text
    return found[0]


def written_anew(block: re.Match[str]) -> str:
    """A block of a page with what its command prints here; a file is written here and stays as it is."""
    if block["file"]:
        Path(block["file"]).write_text(block["text"], encoding="utf-8")
        return block[0]
    text = printed(block["words"], block["stream"])
    if block["first"]:
        text = part(text, block["first"], block["last"])
    return f"{block['mark']}{text}```\n"


def without_models(block: re.Match[str]) -> bool:
    return bool(block["file"]) or block["words"].startswith("tune ") or " --calibration " in block["words"]


def drawn_by(folder: Path) -> str:
    """A name for what draws pictures: the code that draws, and the words of the charts of a run that has everything."""
    inputs = Inputs(make_run(folder))
    charts = [repr(figure.compute(inputs, 1 if figure.per_batch_size else None)) for figure in FIGURES.values()]
    words = {re.sub(r"[\d.,–-]+", "", word) for word in re.findall(r"'([^']*)'", "".join(charts))}
    code = [(ROOT / "treeopt" / "report" / "figures" / f"{name}.py").read_text("utf-8") for name in DRAWING]
    return hashlib.sha256("\n".join([*code, *sorted(words)]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_is_printed(page, tmp_path, monkeypatch):
    """Where no model is run; what is measured differs from run to run."""
    monkeypatch.chdir(tmp_path)
    for block in filter(without_models, BLOCK.finditer((ROOT / page).read_text("utf-8"))):
        assert written_anew(block) == block[0]


def test_every_output_of_a_page_can_be_written_anew():
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        outputs = [block for block in BLOCK.finditer(text) if block["words"]]
        assert len(outputs) == text.count("<!-- output:") > 0, page


def column_heads(text: str) -> list[tuple[str, ...]]:
    """The heads of the columns of each table in a text; a head may take several lines."""
    heads = []
    for table in re.findall(r"^┏[━┳┓]+\n(.*?)^┡", text, re.MULTILINE | re.DOTALL):
        lines = [line.strip("┃").split("┃") for line in table.splitlines()]
        heads.append(tuple(" ".join(" ".join(parts).split()) for parts in zip(*lines, strict=True)))
    return heads


@pytest.mark.parametrize("page", [README, "docs/tutorial.md"])
def test_tables_of_measured_runs_have_todays_columns(page, demo_run):
    """`make pages` measures them anew. Of dynamic trees the run here has nothing."""
    run, console = RunDirectory(demo_run), Console(width=100, markup=False)
    with console.capture() as today:
        console.print(calibration_table(run.read_calibration()), profile_table(run.read_profile()))
        console.print(plan_table(run.read_plan()), bench_table(some_bench()))
    blocks = BLOCK.finditer((ROOT / page).read_text("utf-8"))
    page_heads = [heads for block in blocks if not without_models(block) for heads in column_heads(block[0])]
    assert {heads for heads in page_heads if "kind" not in heads} <= set(column_heads(today.get()))


def test_the_readme_claims_what_its_command_chooses(tmp_path, monkeypatch):
    """Its claim for a model that is not here: the rows, and the speedup over plain decoding."""
    monkeypatch.chdir(tmp_path)
    text = " ".join((ROOT / README).read_text("utf-8").split())
    command, claim = re.findall(r"`treeopt (search --calibration [^`]+)` (.*?) plain", text)[0]
    printed(command)
    entry = Plan.load("published/plan.json").entries[0]
    numbers = [f"{entry.chosen.size}", f"{entry.chosen.speedup.value:.2f}"]
    assert re.findall(r"\d+(?:\.\d+)?", claim) == numbers


def test_the_readme_fits_ninety_lines_and_says_how_to_set_up_first():
    lines = (ROOT / README).read_text("utf-8").splitlines()
    assert len(lines) <= 90
    assert [line.split("#")[0].strip() for line in lines if line.startswith("make ")] == ["make demo", "make test"]
    assert "make test" in "\n".join(lines[:12])


def test_the_pictures_are_drawn_by_this_code(tmp_path):
    """`make pages` draws them anew."""
    assert DRAWN_BY.findall((ROOT / GALLERY).read_text("utf-8")) == [drawn_by(tmp_path / "run")]


def draw() -> None:
    """Write the pictures of the run here, and of one by groups, into docs/images."""
    for words in GROUPS:
        printed(words)
    for picture in (*Path("treeopt-run/figures").glob("*.png"), Path("groups/figures/groups.png")):
        shutil.copy(picture, ROOT / "docs" / "images")
    gallery = ROOT / GALLERY
    gallery.write_text(
        DRAWN_BY.sub(f"<!-- drawn by: {drawn_by(Path('everything'))} -->", gallery.read_text("utf-8")), "utf-8"
    )


if __name__ == "__main__":
    for page in sys.argv[1:] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = BLOCK.sub(written_anew, (ROOT / page).read_text("utf-8"))
            (ROOT / page).write_text(text, encoding="utf-8")
            if page == README:
                draw()
            os.chdir(ROOT)
