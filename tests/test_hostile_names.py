"""Names that attack: nothing in a script, a command or a file name is obeyed, whatever a user or a file calls things."""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import treeopt as api
from treeopt import demo
from treeopt.cli import cli
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files.shell import OBEYED, command_line, printable, shell_word
from treeopt.pipeline.session import resolve
from treeopt.records.calibration import Calibration
from treeopt.records.options import Source
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.runtime.checkpoints.files import find_checkpoint
from treeopt.runtime.prompts.rows import read_rows
from treeopt.runtime.target import load_target
from treeopt.trees.published import published_tree
from treeopt.trees.tree import Tree

from .conftest import treeopt
from .helpers.engine_rows import COPIED, chains, export, export_plan
from .helpers.runs import make_run

NAMES = (
    "$(touch x)", "`touch x`", "; touch x", "&& touch x", "| touch x", "> x", "< x", "& touch x #", "1; touch x #",
    "'; touch x; '", '"; touch x; "', "\\'; touch x; \\'", "'\"'\"'; touch x", "a\ntouch x\n", "a\r\ntouch x", "\ttouch x",
    "$x", "${IFS}touch${IFS}x", "!touch x", "*", "?", "[a-z]", "~", "~root", "{a,b}", "#", "--help", "-", "--", "-rf",
    "..", "../..", "../../x", "/", "é\u202ex\u061c", "\x1b]0;x\x07", "\x07\x7f", "x" * 5000, "\\", "%s%n{0}{x}", " ", "x\u2028y",
    "</script><script>x</script>", "{{ 7 * 7 }}", "[bold]x[/bold]",
)  # fmt: skip
PATHS = ("./x", "../x", "~/no-such-thing", "/no/such", "a/b/c", "models/x", "x/", "a b", "~nobody-here/x", ".x")


def run_shell(script: str, folder: Path, shell: str = "bash") -> list[list[str]]:
    """Run a script where every command is a stand-in that writes down its words, and see that nothing else happened."""
    stubs = folder / "bin"
    stubs.mkdir(parents=True)
    said = folder / "said"
    for name in ("python", "python3", "treeopt", "touch", "rm", "trtllm-build", "trtllm-bench", "vllm", "command"):
        stub = stubs / name
        stub.write_text(f'#!/bin/bash\nprintf "%s\\0" "${{0##*/}}" "$@" >> {said}\nprintf "\\n\\0" >> {said}\n')
        stub.chmod(0o755)
    work = folder / "work"
    work.mkdir()
    path = Path("/bin") / shell
    subprocess.run(
        [path, "-c", script], cwd=work, env={"PATH": str(stubs)}, capture_output=True, timeout=20, check=False
    )
    assert list(work.iterdir()) == [], "the script wrote a file"
    words = said.read_bytes().decode().split("\0")[:-1] if said.exists() else []
    lines: list[list[str]] = [[]]
    for word in words:
        lines[-1].append(word) if word != "\n" else lines.append([])
    return lines[:-1]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_shell_reads_a_quoted_name_as_one_word(tmp_path, shell):
    """Back as it was in bash; in a shell without $'...' too it is one word, and nothing is run."""
    script = "\n".join(command_line("treeopt", "run", "--drafter", name, "--seed", 0) for name in NAMES)
    lines = run_shell(script, tmp_path, shell)
    assert len(lines) == len(NAMES)
    for name, line in zip(NAMES, lines, strict=True):
        assert [*line[:3], *line[4:]] == ["treeopt", "run", "--drafter", "--seed", "0"]
        if shell == "bash" or name.isprintable():
            assert line[3] == name
    assert all(shell_word(name).isprintable() for name in NAMES)
    assert all(c.isprintable() or c in "\n\t" for name in NAMES for c in printable(name))


def test_the_commands_that_exports_write_run_nothing_else(tmp_path):
    """Every script and launch line, run where each command is a stand-in: as many as it has lines, and no other."""
    tree, number = published_tree(), 0
    for engine in ENGINES:
        for way in ENGINES[engine].methods:
            served = chains((1, 4, 3), (5, None, 0)) if way.by_batch_size else Tree.chain(3)
            served = COPIED[engine][0] if way.limits.copies else served if way.limits.shape == "chain" else tree
            try:
                written = export(engine, served, way.name, num_heads=5, drafter=way.drafters[0])
            except TreeoptError:
                continue  # a limit of the engine's
            for script in (written.command, written.files.get("commands.sh", "")):
                number += 1
                lines = run_shell(script, tmp_path / str(number))
                wanted = [shlex.split(line) for line in script.replace("\\\n", "").splitlines()]
                known = {stub.name for stub in (tmp_path / str(number) / "bin").iterdir()}
                assert lines == [words for words in wanted if words and words[0] in known]
    assert number > 20


@pytest.mark.parametrize("key", ["num_layers", "num_heads", "kind"])
@pytest.mark.parametrize("value", ["1; touch x #", "$(touch x)", [1], {"a": 1}, 1.5, True, -1, 0], ids=str)
def test_what_a_file_says_of_its_drafter_is_typed_and_reaches_no_script(tmp_path, key, value):
    if (key == "kind" and isinstance(value, str)) or (key == "num_layers" and value == 0):
        return  # a text may be any, and no layers are one
    drafter = {"kind": "medusa", "id": "heads", "num_heads": 4, "num_layers": 1, key: value}
    run = RunDirectory(tmp_path / "run")
    ranks, starts = np.array([[0, 1], [1, -1], [-2, -2]]), np.array([0, 3])
    RankTrace(ranks, starts, meta={"drafter": drafter, "group_names": []}).save(run.trace)
    calibration = Calibration.from_trace(RankTrace(ranks, starts))
    calibration.meta["drafter"] = drafter
    calibration.save(run.calibration)
    profile = {"points": [], "autoregressive": [{"batch_size": 1, "context_tokens": 1, "step_ms": [1.0]}]}
    run.profile.write_text(json.dumps({"schema": "treeopt.profile/2", **profile, "provenance": {"drafter": drafter}}))
    if not isinstance(value, int) or isinstance(value, bool):
        for load in (RankTrace.load, Calibration.load, LatencyProfile.load):
            file = {RankTrace: run.trace, Calibration: run.calibration}.get(load.__self__, run.profile)
            with pytest.raises(InvalidInput, match=f"drafter.{key}"):
                load(file)
    if key != "kind":  # in memory, where nothing was read
        plan = treeopt_search(calibration)
        for engine in ("tensorrt-llm", "neuron-medusa", "modelopt"):
            with pytest.raises(InvalidInput, match=key):
                export_plan(replace(plan, drafter=drafter), engine)


def treeopt_search(calibration: Calibration) -> Plan:
    calibration.meta.pop("drafter")
    return api.search(calibration, budget=3)


@pytest.mark.parametrize(
    "name", ["../precious", "..", ".", "/etc/hostname", "nested/../../precious", "folder", "", "commands.sh\n..\n"]
)
def test_the_list_of_an_export_reaches_nothing_outside_its_folder(tmp_path, name):
    run = RunDirectory(tmp_path / "run")
    folder = run.export / "tensorrt-llm"
    (folder / "folder").mkdir(parents=True)
    (folder / "old.yml").write_text("of the export before")
    precious = [folder / "mine.txt", run.export / "precious", run.path / "precious"]
    for file in precious:
        file.write_text("mine")
    (folder / ".written").write_text(f"old.yml\n{name}\n")
    treeopt("export", "--run", run.path, "--to", "tensorrt-llm", "--tree", "mc_sim_7b_63")
    assert all(file.read_text() == "mine" for file in precious)
    assert (folder / "folder").is_dir()
    assert not (folder / "old.yml").exists()
    assert (folder / "commands.sh").exists()


def is_a_file_name(name: str) -> bool:
    return "/" not in name and len(name.encode()) < 200 and name not in ("..", "-", "~")


# Every command that takes a name: its words, of which NAME is one, and its exit codes. Where nothing is of that name:
FEW = ("--num-prompts", 3, "--max-new-tokens", 8)
MISSING = ((("calibrate", "--model", "NAME-", *FEW, "--run", "RUN"), (1, 2)),
           (("search", "--calibration", "NAME-", "--run", "RUN"), (1, 2)))  # fmt: skip
# In a run directory of that name, whose model, drafter, data set, machine and groups have it, too:
LIGHT = ((("search", "--calibration", "vicuna-7b-medusa1", "--budget", 8), (0,)), (("show",), (0,)),
         (("export", "--to", "tensorrt-llm"), (0,)), (("export", "--to", "NAME."), (1,)))  # fmt: skip
HEAVY = tuple((command, (0,)) for command in (("search", "--budget", 8), ("score", "mc_sim_7b_63"), ("status",),
                                              ("plot", "groups", "--format", "svg"), ("report",)))  # fmt: skip
# With prompts, a column, groups and heads of that name:
MODEL = ((("calibrate", "--prompts", "./RUN.jsonl", "--column=NAME", "--group-by", "g", "--drafter", "./RUN-heads", "--overwrite", *FEW), (0,)),
         (("report",), (0,)), (("import", "./RUN.jsonl"), (1,)))  # fmt: skip
WORST = "a $(touch x); 'rm'\n\x1b[31m\u202e\u061c"


def attack(name: str, work: Path, commands, groups) -> None:
    """Run the commands in a new folder: no traceback, nothing that a terminal obeys, no file outside."""
    mine = name if is_a_file_name(name) else "mine"
    for words, codes in commands:
        if commands is not MISSING and not Path(mine).exists():
            make_run(mine, text=name, groups=groups, batch_sizes=(1,))
        if words is MODEL[0][0]:
            shutil.copytree(demo.HEADS, mine + "-heads")
            rows = [{name: f"def f{i}(x):", "g": f"{name} {i % 2}", "prompt": "x"} for i in range(12)]
            Path(f"{mine}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [str(word).replace("NAME", name).replace("RUN", mine) for word in words]
        command += ["--run", mine] * ("RUN" not in words and words[0] != "import")
        result = CliRunner().invoke(cli, command)
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
        assert result.exit_code in codes, (command, result.output, result.stderr)
        assert "Traceback" not in result.output + result.stderr
        assert not OBEYED.search(result.output + result.stderr), result.output
        if words == ("report",):
            assert "<script>x</script>" not in Path(mine, "report.html").read_text()
        if words[:3] == ("export", "--to", "tensorrt-llm"):
            script = (Path(mine) / "export/tensorrt-llm/commands.sh").read_text()
            run_shell(script, work.parent.parent / f"shell {work.parent.name}")
    there = {mine, mine + "-heads", f"{mine}.jsonl"} if commands is not MISSING else set()
    assert {path.name for path in work.iterdir()} <= there
    assert [path.name for path in work.parent.iterdir()] == ["work"]


@pytest.mark.parametrize(
    ("names", "commands"),
    [
        ((WORST,), LIGHT),
        pytest.param((WORST,), HEAVY, marks=pytest.mark.long),
        pytest.param(NAMES, MISSING, marks=pytest.mark.slow),
        pytest.param(NAMES, (*LIGHT, *HEAVY[1:3]), marks=pytest.mark.slow),
        pytest.param(NAMES[::9], MODEL, marks=pytest.mark.slow),
    ],
    ids=["light", "heavy", "missing", "runs", "models"],
)
def test_hostile_names_in_every_place_are_names(tmp_path, monkeypatch, names, commands):
    for number, name in enumerate(names):
        work = tmp_path / str(number) / "work"
        work.mkdir(parents=True)
        monkeypatch.chdir(work)
        attack(name, work, commands, [group[:80] for group in (NAMES if commands is HEAVY else (name, "g"))])


def test_all_that_commands_print_passes_the_filter():
    """What is wrong in the words of a command, too. Each other module hands its texts to those that print."""
    for words in (
        ("status", "\u061c"),
        ("status", "--\u061c"),
        ("\u061c",),
        ("list", "engines", "\u061c"),
        ("show", "\u061c"),
    ):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code in (1, 2)
        assert not OBEYED.search(result.output)
    printing = re.compile(r"(?<![>.\w] )\b(?:print|echo|Console)\(")
    files = (
        file for room in ("cli", "report", "pipeline") for file in Path(api.__file__).parent.glob(f"{room}/**/*.py")
    )
    assert {file.name for file in files if printing.search(file.read_text())} == {
        "terminal.py",
        "command.py",
        "notebook.py",
    }


def test_an_empty_path_is_refused_not_taken_for_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".notes.tmp").write_text("mine")
    for arguments, option in (
        (("search", "--calibration", "vicuna-7b-medusa1", "--run", ""), "--run"),
        (("search", "--calibration", "vicuna-7b-medusa1", "--run="), "--run"),
        (("train", "--steps", "1", "-o", ""), "-o"),
        (("train", "--steps", "1", "-o", "x", "--answers", ""), "--answers"),
        (("convert", "heads", "--to", "medusa", "--output", ""), "--output"),
        (("calibrate", "--model", ""), "--model"),
        (("import", ""), "An argument"),
    ):
        assert f"{option} must not be empty" in treeopt(*arguments, code=2)
    with pytest.raises(InvalidInput, match="must have a name"):
        RunDirectory("")
    assert [path.name for path in tmp_path.iterdir()] == [".notes.tmp"]


def test_a_name_that_is_no_text_is_refused(tmp_path):
    assert r"must be UTF-8, but got b'x\xff'" in treeopt("search", "--run", os.fsdecode(b"x\xff"), code=2)


def test_a_path_is_never_asked_of_a_hub(tmp_path, monkeypatch):
    """And the sentence has the whole path that was looked at."""
    import huggingface_hub
    import transformers

    def asked(*arguments, **options):
        raise AssertionError(f"a hub was asked for {arguments}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", asked)
    monkeypatch.setattr("datasets.load_dataset", asked)
    (tmp_path / "models").mkdir()
    for name in PATHS:
        for option, load in (("model", load_target), ("drafter", find_checkpoint), ("prompts", read_rows)):
            with pytest.raises(InvalidInput, match=f"^{option} must be a f.* does not exist") as error:
                load(name)
            assert f"but {os.path.abspath(os.path.expanduser(name))} does" in str(error.value)
    for name in ("x", "owner/name"):
        for load in (load_target, find_checkpoint, read_rows):
            with pytest.raises((AssertionError, InvalidInput), match=r"asked|huggingface"):
                load(name)


def test_what_later_commands_load_is_found_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "my").mkdir()
    monkeypatch.chdir(tmp_path)
    given = {"model": "./my", "drafter": "my", "prompts": "prompts.txt"}
    whole = {"model": f"{tmp_path}/my", "drafter": f"{tmp_path}/my", "prompts": f"{tmp_path}/prompts.txt"}
    run = RunDirectory(tmp_path / "run")
    assert resolve(run, Source(**given)).given == whole
    named = {"model": "demo", "drafter": "medusa", "prompts": "demo", "dtype": "float32"}
    (tmp_path / "medusa").mkdir()
    assert resolve(run, Source(**named)).given == named
    RankTrace(np.array([[0], [-2]]), np.array([0, 2]), meta={"source": whole}).save(run.trace)
    monkeypatch.chdir(tmp_path / "my")
    assert resolve(run, Source(model="../my")).given == whole
    assert resolve(run, Source()).given == whole
    (tmp_path / "my" / "hydra").mkdir()  # with another model than the demo it is a folder like others
    assert resolve(run, Source(drafter="hydra")).drafter == f"{tmp_path}/my/hydra"
