"""The report: complete, offline, without scripts, as a real browser sees it."""

import html
import json
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.conftest import some_long
from tests.helpers.runs import REJECT, TYPICAL, at_speed, make_run, ruled, shown
from tests.helpers.steps import search
from treeopt.cli import cli
from treeopt.engines.registry import method_of, runners
from treeopt.errors import InvalidInput
from treeopt.files.shell import OBEYED
from treeopt.latency.costs import margins_of_error
from treeopt.pipeline import notebook
from treeopt.pipeline.export import export
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import inputs_of
from treeopt.records.plan import Plan, PlanEntry, PlannedEngine
from treeopt.records.rules import option_of
from treeopt.records.rundir import RunDirectory
from treeopt.report import figures
from treeopt.report.bench_table import bench_table
from treeopt.report.page import write_report
from treeopt.report.terminal import note, out
from treeopt.trees.shapes import Limits

EVIL = """</script></style></svg><script>document.title='owned'</script><img src=x onerror="document.title='owned'">
{{ 7 * 7 }}{% raw %}<!-- "quoted" 'quoted' & &amp; \\u003c ]]> </textarea> $x^{2$"""
CONTROLS = "\x1b[2J\x1b]0;owned\x07\x00\x08\x9b31m\u202e\uffff"


@pytest.fixture
def no_pictures(monkeypatch):
    """For tests of what the page says: drawing its pictures takes seconds."""
    monkeypatch.setattr("treeopt.report.page.pictures", lambda *rest, **options: [])


# Without a browser


def test_without_a_plan_the_command_that_makes_one_is_named(tmp_path):
    with pytest.raises(InvalidInput, match="treeopt search"):
        write_report(RunDirectory(tmp_path))


def test_a_plan_alone_makes_a_report(no_pictures, tmp_path):
    run = RunDirectory(tmp_path)
    search(run, budget=16, batch_sizes=(1,), calibration="vicuna-7b-medusa1")
    page = write_report(run)[0].read_text()
    assert "lmsys/vicuna-7b-v1.3" in page
    assert "No real decoding was measured" in page
    replace(run.read_plan(), inputs={"elsewhere.npz": "0"}).save(run.plan)  # of a trace that is gone
    _, (note,) = figures.draw(run, names=["tree"])
    assert note.startswith("tree was left out: The plan was made from elsewhere.npz")


@pytest.mark.parametrize("gone", [(), ("bench",), ("profile", "bench"), ("trace",), ("trace", "calibration")])
def test_of_some_files_there_is_a_report(no_pictures, tmp_path, gone):
    """What to measure next is in the notes, not on the page."""
    run = make_run(tmp_path)
    for file in (file for name in gone for file in tmp_path.glob(f"{name}*")):
        file.unlink()
    path, notes = write_report(run)
    page = html.unescape(path.read_text())
    assert ("Real decoding of" in page) == ("bench" not in gone)
    said = re.sub("treeopt (calibrate|profile|bench) calm", "", page)
    assert not re.search("treeopt (bench|calibrate|profile|search)", said)
    assert "bench" not in gone or "treeopt bench" in " ".join(notes)
    assert bool(notes) == bool(gone)


def test_what_was_noisy_is_in_the_files_and_in_the_first_lines(no_pictures, tmp_path):
    run = make_run(tmp_path, batch_sizes=(1,))
    page = html.unescape(write_report(run)[0].read_text())
    assert not any(said in page for said in ("The machine is busy", "are not known to", "Settled before"))
    profile, bench = run.read_profile(), Benchmark.load(run.bench_of(1))
    margins = margins_of_error(profile)
    unknown = sum(margin > 1e-6 for margin in margins)
    replace(profile, info={**profile.info, "precision": 1e-6, "processor_share": 0.21}).save(run.profile)
    last = replace(bench.contenders[-1], blocks=bench.contenders[-1].blocks[:-1])
    replace(bench, contenders=(*bench.contenders[:-1], last), processor_share=0.4).save(run.bench_of(1))
    assert Benchmark.load(run.bench_of(1)).processor_share == 0.4
    page = html.unescape(write_report(run)[0].read_text())
    begin = page[page.index("In short") : page.index('class="cards"')]
    for file, said in (
        ("profile.json", "other programs had the processor for 79% of"),
        ("profile.json", f"{unknown} of {len(margins)} latencies are not known to 0.0% yet"),
        ("bench-batch-size-1.json", "other programs had the processor for 60% of"),
        ("bench-batch-size-1.json", "Settled before"),
    ):
        assert re.search(f">{file}: [^<]*{said}", begin)
    assert "60% of the time" in shown(bench_table(Benchmark.load(run.bench_of(1))))


@pytest.mark.parametrize("engine", [None, *some_long("sglang", "tensorrt-llm")])
def test_the_first_lines_have_the_commands_that_deploy(no_pictures, tmp_path, engine):
    """Those of `export` to the engine that was planned for, or to the first that takes the plan; none for what is slower."""
    run = make_run(tmp_path, batch_sizes=(1, 4))
    drafter = {"kind": "eagle3", "id": "layer", "num_heads": 4}
    chains = plan_trees(run.read_trace(), run.read_profile(), PlanRequest(Limits(8, shape="chain"), (1, 4)))
    planned = engine and PlannedEngine(name=engine, method=method_of(engine, "eagle3").name)
    limits = replace(chains.constraint, engine=planned)
    plan = replace(chains, drafter=drafter, constraint=limits)
    for one in (plan, replace(plan, entries=tuple(replace(e.served(e.plain), others={}) for e in plan.entries))):
        one.save(run.plan)
        page = html.unescape(write_report(run)[0].read_text())
        begin = page[page.index("In short") : page.index("<table")]
        named = re.search("to deploy it with ([^<]*)<", begin)[1]
        assert named == engine or (engine is None and named in runners("eagle3"))
        command = re.sub(r"(# Batch size \d), in \S+", r"\1", export(run, named)[1].command)
        assert f"treeopt export --to {named} --run {run.path}\n{command}</pre>" in begin
    bench = at_speed(Benchmark.load(run.bench_of(4)), 0.9)
    plan.save(run.plan)
    chosen = replace(bench.contender("chosen"), draft=plan[4].draft)
    contenders = (bench.contenders[0], chosen)
    replace(bench, contenders=contenders, inputs=inputs_of(run.plan, run.trace)).save(run.bench_of(4))
    assert "to deploy it" not in write_report(run)[0].read_text()


def alone(run):
    """Not to speculate is the plan."""
    plan = run.read_plan()
    entry = plan.entries[0]
    lone = PlanEntry(**vars(entry.plain), context_tokens=entry.context_tokens, curve=entry.curve)
    return Plan(entries=(lone,), drafter=plan.drafter)


def mixed(run):
    request = PlanRequest(Limits(16), batch_sizes={1: 1.0, 4: 3.0})
    return plan_trees(run.read_trace(), run.read_profile(), request)


@pytest.mark.parametrize(
    ("planned", "says", "not_there"),
    [
        (alone, ["No tree is shown to pay here"], "judged"),
        (mixed, ["One tree for the mix of loads", r"4 \(75%\)", "mean over the time"], "Schedule by"),
        (
            lambda run: run.read_plan(),
            ["<dt>same text</dt>", "two first tokens that differ are at most 0.01 apart"],
            "judged",
        ),
    ],
    ids=["alone", "mix", "greedy"],
)
def test_the_page_says_what_was_planned(no_pictures, tmp_path, planned, says, not_there):
    run = make_run(tmp_path, batch_sizes=(1, 4) if planned is mixed else (1,))
    planned(run).save(run.plan)
    page = html.unescape(write_report(run)[0].read_text())
    assert all(re.search(said, page) for said in says)
    assert not_there not in page


def test_a_benchmark_in_another_runtime_is_shown_too(no_pictures, tmp_path):
    run = make_run(tmp_path, batch_sizes=(4,))  # the plan has no entry of batch size 1
    bench = Benchmark.load(run.bench_of(4))
    engine = {"name": "transformers <b>", "version": "5.0", "about": "It <i>looks up</i> otherwise."}
    inputs = {run.plan.name: "0" * 64}
    replace(bench, inputs=inputs, provenance=replace(bench.provenance, engine=engine)).save(
        run.bench_in("transformers")
    )
    shutil.copy(run.bench_in("transformers"), tmp_path / "bench-before.json")
    (tmp_path / "bench-notes.json").write_text('{"a": 1}')
    path, notes = write_report(run)
    page = html.unescape(path.read_text())
    assert page.count("Real decoding of") == 2
    assert "by transformers <b> 5.0, 2 rounds" in page
    assert '<p class="note">It <i>looks up</i> otherwise.</p>' in page
    assert "was not decoded as the plan's steps were timed (there), but differs in" in page
    assert "bench-transformers.json was made from another plan.json" in page
    assert any("bench-transformers.json" in said and "--engine transformers --run" in said for said in notes)
    run.bench_in("transformers").write_text("{")
    with pytest.raises(InvalidInput, match="bench-transformers"):
        write_report(run)


def test_the_search_is_told_with_its_time_limits_and_inputs(no_pictures, tmp_path):
    run = make_run(tmp_path, batch_sizes=(1,))
    search(run, budget=8, batch_sizes=(1,))
    page = html.unescape(write_report(run)[0].read_text())
    origin = page[page.index('id="origin"') :]
    plan = run.read_plan()
    for said in (plan.provenance.time, "budget 8", "shape sibling-closed", plan.provenance.versions["python"]):
        assert said in origin, said
    for name, sha256 in plan.inputs.items():
        assert f"{name} sha256 {sha256[:12]}" in origin
    assert sha256 not in page
    before = run.plan.read_bytes()
    search(run, budget=8, batch_sizes=(1,))
    assert run.plan.read_bytes() == before  # so that its benchmarks are not those of another plan
    search(run, budget=6, batch_sizes=(1,))
    assert run.plan.read_bytes() != before


def test_the_same_run_gives_the_same_bytes(no_pictures, tmp_path):
    """Pictures do too: see `test_figure_drawings`."""
    run = make_run(tmp_path)
    assert write_report(run)[0].read_bytes() == write_report(run)[0].read_bytes()


def test_a_calibration_with_damaged_notes_is_named(no_pictures, tmp_path):
    run = make_run(tmp_path)
    run.calibration.write_text(json.dumps({**json.loads(run.calibration.read_text()), "skipped": 3}))
    with pytest.raises(InvalidInput, match=r"calibration\.json"):
        write_report(run)


def test_every_id_is_there_once(report):
    page = report.read_text()
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


@pytest.mark.parametrize("acceptance", [REJECT, TYPICAL])
def test_a_rule_that_changes_the_text_is_named_with_what_it_costs(no_pictures, tmp_path, acceptance):
    run = make_run(tmp_path, batch_sizes=(1,))
    replace(run.read_plan(), acceptance=acceptance).save(run.plan)
    bench = Benchmark.load(run.bench_of(1))
    ruled(bench, acceptance).save(run.bench_of(1))
    page = html.unescape(write_report(run)[0].read_text())
    summary = page[page.index('id="summary"') : page.index('id="batch-size-1"')]
    option = option_of(acceptance)
    assert f"Guesses are accepted by {option}" in summary
    assert ("0.157 ±0.062 nats per token less likely" in summary) == (acceptance is TYPICAL)
    assert ("the target's own distribution" in summary) == (acceptance is REJECT)
    assert "judged by the target itself at temperature 1" in page
    for greedy in ("same text", "near-ties", "logits for the two"):
        assert greedy not in page
    assert "rejection" not in page
    assert "-0.157 ±0.062" in page


# In a browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a run in which every text of a user or a data set is hostile."""
    return write_report(make_run(tmp_path_factory.mktemp("run"), text=EVIL + CONTROLS, batch_sizes=(1,)))[0]


@pytest.fixture
def visit(browser):
    """Open a file; whatever the page complains of or asks for besides itself fails the test."""
    contexts, wrong = [], []

    def open_page(path, *, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda request: request.url != path.as_uri() and wrong.append(request.url))
        page.goto(path.as_uri())
        page.wrong = wrong
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def title(page, mark: str) -> str:
    """The title of the first mark of a selector, which a browser shows under the pointer."""
    return page.locator(f"{mark} > title").first.text_content()


def test_marks_have_titles(visit, report):
    """A node says its path, share, visits and gain."""
    page = visit(report)
    node = title(page, "[id$='-node-0']")
    assert re.match(r"path \[0\]\naccepted in \d+\.\d\d% of steps\nvisits [\d,]+ of [\d,]+ steps\n", node)
    assert re.search(r"gain \+0\.\d+ tokens per step$", node)
    assert title(page, "[id$='-node-root']").startswith("root")


@pytest.mark.parametrize("bypass_csp", [False, True])  # escaping alone must do
def test_texts_of_others_are_inert(visit, report, bypass_csp):
    page = visit(report, bypass_csp=bypass_csp)
    page.wait_for_timeout(200)
    assert page.title().startswith("treeopt report: model </script>")
    assert page.locator("img, iframe, object, embed, form, [onerror], [onclick]").count() == 0
    assert page.locator("script").count() == 0
    assert page.locator("h1").text_content().startswith(f"model {EVIL}")
    assert "{{ 7 * 7 }}{% raw %}" in page.locator("h1").inner_text()
    told = page.locator("body").text_content()
    for start in ("prompts ", "heads ", "mine ", "beware ", "treeopt bench ", "code ", "chat "):
        assert f"{start}{EVIL}" in told, start
    assert f"empty {EVIL}" in told


def test_the_policy_lets_no_script_run(visit, report):
    page = visit(report)
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.owned = 1";
        document.body.append(script);
    }""")
    assert page.evaluate("window.owned") is None
    assert "Content Security Policy" in page.wrong.pop()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off(visit, report, width):
    """With the longest words and all details open: the page never scrolls sideways, its boxes may."""
    page = visit(report, width=width)
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate("""() => [...document.querySelectorAll("main *:not(svg, svg *)")]
        .filter((box) => !box.closest(".scroll") && box.scrollWidth > box.clientWidth + 1 && box.clientWidth)
        .map((box) => box.outerHTML.slice(0, 200))""")
    assert cut == []
    if width == 390:  # tables are not boxes that scroll there
        assert page.evaluate("""() => [...document.querySelectorAll(".figures td, .figures th")]
            .every((cell) => cell.getBoundingClientRect().right <= innerWidth)""")


CONTRAST = """() => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
            .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (box) => {
        for (; box; box = box.parentElement) {
            const colour = getComputedStyle(box).backgroundColor;
            if (!colour.startsWith("rgba(0, 0, 0, 0")) return colour;
        }
    };
    const pairs = [...document.querySelectorAll("h1, h2, h3, p, td, th, small, summary, span, strong")]
        .filter((box) => box.textContent.trim() && box.checkVisibility())
        .map((box) => [getComputedStyle(box).color, behind(box)]);
    return Math.min(...pairs.map((pair) => {
        const [a, b] = pair.map(light).sort();
        return (b + 0.05) / (a + 0.05);
    }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(visit, report, scheme):
    assert visit(report, color_scheme=scheme).evaluate(CONTRAST) >= 4.5


def test_it_prints_with_everything_open(visit, report):
    page = visit(report, color_scheme="dark")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print")
    shown = "[...document.querySelectorAll('details > :last-child')].every((part) => part.checkVisibility({contentVisibilityAuto: true}))"
    assert page.evaluate(shown)
    page.set_viewport_size({"width": 700, "height": 1000})  # about A4
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_control_characters_of_names_reach_no_page_picture_or_terminal(report, tmp_path, capsys):
    run = RunDirectory(report.parent)
    assert not OBEYED.search(report.read_text())
    for path in figures.draw(run, names=["groups"], formats=("svg",))[0]:
        ElementTree.parse(path)
    calibration = Calibration.load(run.calibration)
    for record in (calibration, Plan.load(run.plan), Benchmark.load(run.bench_of(1))):
        out(notebook.TABLES[type(record)](record))
        assert not OBEYED.search(record._repr_html_())
    note(f"Of {calibration.meta['drafter']['id']}.")
    with pytest.raises(SystemExit):
        cli(["show", "--run", str(tmp_path), f"of {CONTROLS}".replace("\0", "")])
    shown = capsys.readouterr()
    assert r"\x1b[2J" in shown.out
    assert not OBEYED.search(shown.out + shown.err)
