"""treeopt tune against servers whose every step is known, and against servers that lie."""

from __future__ import annotations

import itertools
import json
import operator
import re
import resource
import signal
import subprocess
import sys
import time
import tracemalloc

import anyio
import numpy as np
import pytest

from treeopt.errors import TreeoptError
from treeopt.pipeline.tune import _ask_on, tune
from treeopt.records.exchange import Watching
from treeopt.report.server_table import first_line_of, server_table
from treeopt.serving import watch
from treeopt.serving.client import KEY, Server
from treeopt.serving.watch import Pace, Recording, Tuned, over_plain

from .conftest import invoke as command
from .helpers.lying_server import COUNTS, STREAMS, TRANSPORT, Engine, Liar, lying, page, slowly
from .helpers.runs import shown

SURVIVAL = (0.7, 0.5, 0.3)
MINUTES = 0.006


@pytest.fixture(scope="module", autouse=True)
def plain(tmp_path_factory):
    """The recording of a server without a drafter, whose step takes 1.2 ms; what is imported at first takes no test's time."""
    with pytest.MonkeyPatch.context() as patched, lying(Engine((), 0.0012)) as server:
        hurry(patched)
        run = tmp_path_factory.mktemp("plain") / "run"
        invoke("tune", server.url, "--minutes", MINUTES, "--run", run)
    return run / "watched.json"


def hurry(monkeypatch):
    """Look fifty times a second, with less patience, and draw no report."""
    monkeypatch.setattr(watch, "EVERY_S", 0.02)
    monkeypatch.setattr(watch, "BLOCK_S", 0.06)
    monkeypatch.setattr(Server, "within_s", 0.3)
    monkeypatch.setattr(Server, "answered_within_s", 1)
    monkeypatch.setattr(sys.modules[tune.__module__], "REFUSED_S", 0.02)
    monkeypatch.setattr(sys.modules[tune.__module__], "write_report", lambda run: (run.report, []))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return path


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, results and talk of a command."""
    result = command(*arguments, code=None)
    return result.exit_code, result.stdout, result.stderr


def test_it_says_what_the_counters_say_and_what_speculation_brings(run):
    """2.5 tokens in a step of 2 ms beside one in 1.2 ms: 1.5 times as fast."""
    with lying(Engine(SURVIVAL, 0.002)) as server, lying(Engine((), 0.0012)) as plain:
        found = tune(run, server.url, Watching(minutes=MINUTES, plain=plain.url, drafter="eagle3"))
        assert set(server.asked + plain.asked) == {"GET"}
    before, after = ((run.path / name).read_text() for name in ("before.txt", "after.txt"))
    drafts, *reached = (
        float(new.split()[-1]) - float(old.split()[-1])
        for old, new in zip(before.splitlines(), after.splitlines(), strict=True)
        if "num_drafts_total" in old or "per_pos" in old
    )
    rates = (count / before for before, count in itertools.pairwise([drafts, *reached]))  # survival is their product
    assert found.survival == list(itertools.accumulate(rates, operator.mul))
    assert found.tokens_per_step == pytest.approx(2.5, rel=0.01)
    assert found.paces[4].step_ms == pytest.approx(2, rel=1e-6)
    assert found.over_plain.value == pytest.approx(1.5, rel=0.02)
    assert found.over_plain.low <= 1.5 * 1.02
    assert found.over_plain.high >= 1.5 / 1.02
    assert first_line_of(found).startswith("Speculation pays now: 1.")
    assert '"num_speculative_tokens": 3' in found.command
    assert run.plan.exists()
    assert run.read_profile().settings == [(4, 0)]


def test_where_speculation_costs_the_plan_is_to_serve_without(run, plain):
    """The other server was watched before; 1.2 tokens in a step of 2.4 ms beside one in 1.2 ms."""
    assert Recording.load(plain).tokens_per_step == 1
    with lying(Engine((0.2,), 0.0024)) as server:
        found = tune(run, server.url, Watching(minutes=MINUTES, plain=str(plain), drafter="eagle3"))
    assert found.over_plain.value == pytest.approx(0.6, rel=0.03)
    assert first_line_of(found).startswith("Speculation is slower than plain decoding now: 0.")
    assert found.command == "vllm serve m"


def test_a_plain_server_that_counts_drafts_has_none(run):
    """That acceptance by position is not known, with a refusal of import, was said of a server without a drafter."""

    class Plain(Engine):
        def metrics(self) -> str:
            zero = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n'
            return super().metrics() + zero + zero.replace("num_drafts", "num_draft_tokens")

    with lying(Plain((), 0.0012)) as server:
        found = tune(run, server.url, Watching(minutes=MINUTES))
    assert first_line_of(found) == "The server decodes without speculation now."
    assert any(sentence.startswith("No drafts are counted") for sentence in found.unknown)
    assert "by position" not in " ".join(found.unknown)


def test_too_little_traffic_for_an_interval_is_said():
    mine, plain = Pace(np.array([[250.0, 100.0, 0.2]])), Pace(np.array([[100.0, 100.0, 0.12]]))
    ratio = over_plain([mine], [plain])
    found = Tuned(
        engine="vllm", model="m", tokens_per_step=2.5, paces={4: mine}, plain={4: plain}, over_plain=ratio, unknown=()
    )
    first = (
        "Speculation is not shown to pay now, for too little traffic was watched for an interval: 1.50 times plain's"
    )
    assert first_line_of(found).startswith(first)
    assert "1.50 (too little traffic)" in shown(server_table(found))


def test_a_second_watch_adds_to_the_first(run):
    """Of the same server only; --overwrite begins anew, and the file of the plain server is read, not added to."""
    path = run.path / "watched.json"
    with lying(Engine(SURVIVAL, 0.002)) as server, lying(Engine(SURVIVAL, 0.002)) as other:
        words = ("tune", server.url, "--minutes", MINUTES, "--run", run.path)
        looks = [len(Recording.load(path).looks) for _ in range(2) if not invoke(*words)[0]]
        assert looks[1] > looks[0] + 3
        assert json.loads(invoke(*words, "--json")[1])["tokens_per_step"] == pytest.approx(2.5, rel=0.01)
        before = path.read_bytes()
        _, _, refused = invoke("tune", other.url, *words[2:])
        _, _, read = invoke(*words, "--plain", path)
        assert path.read_bytes() == before
        assert "only with --overwrite" in refused
        assert "would be added to" in read
        assert invoke("tune", other.url, *words[2:], "--overwrite")[0] == 0
        assert len(Recording.load(path).looks) < looks[1]


@pytest.mark.parametrize("lie", ["a refusal", "a cut stream"])
def test_what_was_watched_is_kept_where_prompts_are_refused(run, prompts, lie):
    with lying(Liar(lie)) as server:
        words = ("tune", server.url, "--minutes", 10, "--drive", prompts, "--run", run.path)
        code, out, said = invoke(*words)  # ends, since nothing is answered
    assert code == 0
    assert "Speculation gives 2." in out
    assert "Watching ended early" in said
    assert len(Recording.load(run.path / "watched.json").looks) > 1


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_what_was_watched_is_kept_where_it_is_interrupted(tmp_path, prompts, number):
    """60 lines of exception groups were printed."""
    words = ("--minutes", 10, "--drive", prompts, "--clients", 4, "--run", tmp_path / "run")
    with lying(Engine(SURVIVAL, 0.002)) as server:
        slow = server.answer
        server.answer = lambda path: (
            slow(path) if "completions" not in path else slowly(b"HTTP/1.1 200 OK\r\n\r\n", b" ")
        )
        command = [sys.executable, "-m", "treeopt", "tune", server.url, *map(str, words)]
        tuned = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while server.asked.count("GET") < 3:
            assert tuned.poll() is None
            time.sleep(0.02)
        tuned.send_signal(number)
        _, said = tuned.communicate(timeout=10)
    assert tuned.returncode == 128 + number
    assert said.strip().count("\n") == 0
    assert "treeopt: interrupted" in said
    assert len(Recording.load(tmp_path / "run" / "watched.json").looks) > 1


def test_it_runs_where_a_loop_runs(run):
    """As in a notebook."""

    async def cell():
        return tune(run, server.url, Watching(minutes=MINUTES))

    with lying(Engine(SURVIVAL, 0.002)) as server:
        assert anyio.run(cell).tokens_per_step == pytest.approx(2.5, rel=0.01)


def test_clients_share_the_prompts(monkeypatch):
    """They were multiplied by the clients: 5 GB."""

    class Answering:
        async def complete(self, *_):
            await anyio.sleep(0.01)

    async def load():
        with anyio.move_on_after(0.05):
            await _ask_on(Answering(), ["x"] * 10**5, 500, [])

    tracemalloc.start()
    anyio.run(load)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**24


def test_more_clients_than_open_files(run, prompts):
    """It was said that no server answers."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    try:
        with lying(Engine(SURVIVAL, 0.002)) as server:
            code, _, said = invoke("tune", server.url, "--drive", prompts, "--clients", 400, "--run", run.path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (code, "--clients must be at most 200" in said) == (1, True)


@pytest.mark.parametrize("beyond", ["off", "last"])
def test_what_a_schedule_does_above_the_load_that_was_watched(run, plain, beyond):
    """That is a line of its own, and the user's choice."""
    with lying(Engine(SURVIVAL, 0.002)) as server:
        words = ("tune", server.url, "--minutes", MINUTES, "--plain", plain, "--drafter", "eagle3", "--run", run.path)
        _, out, said = invoke(*words, "--beyond", beyond)
    assert ("[[1, 4, 3], [5, 4096, 0]]" in out) == (beyond == "off")
    (line,) = [line for line in said.splitlines() if line.startswith("Above batch size 4 nothing was searched")]
    assert ("vllm does not speculate there" in line) == (beyond == "off")


def test_two_hours_are_a_file_that_is_read(tmp_path):
    """Of an engine of 8 parts: what was kept of every look made a file that was refused as too large."""
    page = "".join(Engine(SURVIVAL, 0.002).metrics().replace('engine="0"', f'engine="{i}"') for i in range(8))
    recording = Recording("http://x", "m", "vllm")
    recording.add(page)
    recording.looks *= 7200
    recording.save(tmp_path / "watched.json")
    assert len(Recording.load(tmp_path / "watched.json").looks) == 7200
    assert (tmp_path / "watched.json").stat().st_size < 2**20


@pytest.mark.parametrize("full", [0.99, 0.9])
def test_drafts_that_the_ends_of_answers_cut_are_planned_by_their_length(run, full):
    """Nothing was planned for llama-server, whose last drafts are shorter; where many are, steps are of no one length."""
    with lying(Engine(SURVIVAL, 0.002, full=full)) as server, lying(Engine((), 0.0012)) as plain:
        found = tune(run, server.url, Watching(minutes=MINUTES, plain=plain.url, drafter="eagle3"))
    assert (found.command is not None and '"num_speculative_tokens": 3' in found.command) == (full == 0.99)


@pytest.mark.parametrize("printed", [7, 3])
def test_a_step_has_the_rows_that_are_served_where_the_last_guesses_are_never_right(run, printed):
    """1.85 tokens in a step of 3 ms beside one in 2: a step of 8 rows was read as one of 5, or of 4 where only three positions are
    printed. Shorter drafts have nearly as many tokens: 1.8 in 16/7 ms, if every guess takes as long."""
    engine = Engine((0.6, 0.2, 0.05, 0, 0, 0, 0), 0.003)

    def answer(path: str) -> bytes:
        if path != "/metrics":
            return engine(path)
        lines = engine.metrics().splitlines(keepends=True)
        return page("".join(line for line in lines if not re.search(rf'position="[{printed}-9]"', line)))

    with lying(answer) as server, lying(Engine((), 0.002)) as plain:
        found = tune(run, server.url, Watching(minutes=MINUTES, plain=plain.url, drafter="eagle3"))
    assert any("2 guesses would have 1.28 times the throughput" in text for text in found.unknown)
    assert found.tokens_per_step == pytest.approx(1.85, rel=0.01)
    assert [(point.size, point.depth) for point in run.read_profile().points] == [(8, 7)]
    assert '"num_speculative_tokens": 7' in found.command


def test_without_plain_it_says_what_a_step_may_cost_and_plans_nothing(run):
    with lying(Engine((0.7, 0.5, 0.35), 0.002)) as server:
        code, out, said = invoke("tune", server.url, "--minutes", "0.01", "--run", run.path)
    assert code == 0
    assert "it pays while its step takes less than 2.5" in " ".join(out.split())
    assert "What a plain step takes is not known" in said
    assert run.calibration.exists()
    assert not run.plan.exists()


def test_a_restart_is_said_and_only_what_follows_counts(run):
    with lying(Engine(SURVIVAL, 0.002, restarts_at=3)) as server:
        found = tune(run, server.url, Watching(minutes=MINUTES))
    assert "The server restarted while it was watched: what it did before is left out." in found.unknown
    assert found.survival == pytest.approx(SURVIVAL, abs=0.01)
    assert found.tokens_per_step == pytest.approx(2.5, rel=0.01)
    assert max(pace.blocks.max() for pace in found.paces.values()) < 1e5  # no jump from before


def test_prompts_are_sent_only_if_asked_for(run, prompts):
    with lying(Liar("none")) as server:
        tune(run, server.url, Watching(minutes=MINUTES, drive=str(prompts), clients=(1, 2)))
        assert set(server.asked) == {"GET", "POST"}


SUITE = ("silence", "3 MiB of line breaks", "redirect to another host", "gzip bomb", "tokens stand still", "seconds of 1e-300",
         "tokens and steps that jump", "a restart at every look", "10^15 tokens", "a refusal")  # fmt: skip
CASES = [*((name, 0) for name in (*TRANSPORT, *COUNTS, *STREAMS)), *((name, 3) for name in (*TRANSPORT, *COUNTS))]


@pytest.mark.parametrize(
    ("lie", "honest_looks"), [pytest.param(*case, marks=[] if case[0] in SUITE else pytest.mark.long) for case in CASES]
)
def test_a_server_that_lies(run, plain, prompts, lie, honest_looks):
    """In the time given: no traceback, one sentence where nothing is known, and no figure that cannot be."""
    drive = ("--drive", prompts, "--clients", 2) if lie in STREAMS else ()
    began = time.monotonic()
    with lying(Liar(lie, honest_looks)) as server:
        words = ("tune", server.url, "--minutes", 0.004, "--plain", plain, "--drafter", "eagle3", "--json", *drive)
        code, out, said = invoke(*words, "--run", run.path)
    assert time.monotonic() - began < 15  # on a busy machine; less than a second passes where none waits
    assert "\x1b" not in said
    if code:
        assert (code, said.count("treeopt: "), out) == (1, 1, "")
        assert len(said) < 2000
        assert lie not in STREAMS  # what was seen before is kept
        assert not honest_looks or "counted nothing" in said
        return
    found = json.loads(out)
    for pace in (found, *found["paces"]):
        assert pace["tokens_per_step"] is None or 1 <= pace["tokens_per_step"] <= 4
    for pace in (*found["paces"], *found["plain"]):
        assert 0.05 <= pace["step_ms"] <= 1e5
    assert found["over_plain"] is None or 0.01 < found["over_plain"]["value"] < 4.4
    assert all(0 <= share["value"] <= 1 for share in found["survival"])


def test_a_redirect_names_its_port():
    with lying(Liar("redirect to another host")) as server:
        assert "'http://127.0.0.2:1'" in invoke("tune", server.url)[2]


@pytest.mark.parametrize("lie", STREAMS)
def test_a_damaged_stream_is_one_sentence(lie):
    async def ask(url: str) -> None:
        async with Server(url) as server:
            await server.complete("x", 4)

    with lying(Liar(lie)) as server, pytest.raises(TreeoptError) as caught:
        anyio.run(ask, server.url)
    assert str(caught.value).isprintable()


def test_the_key_goes_to_the_server_alone_and_into_no_message_or_file(run, monkeypatch):
    monkeypatch.setenv(KEY, "sesame-open")
    engine = Engine(SURVIVAL, 0.02)
    with lying(engine) as server:
        tune(run, server.url, Watching(minutes=MINUTES))
        assert all("bearer sesame-open" in "\n".join(head).lower() for head in server.heads)
    for file in run.path.rglob("*"):
        assert file.is_dir() or b"sesame" not in file.read_bytes()
    with lying(lambda path: page("your key sesame-open is wrong", "500 No")) as server:
        _, _, said = invoke("tune", server.url, "--overwrite", "--run", run.path)
    assert "sesame" not in said
    _, _, said = invoke("tune", "http://me:secret@localhost", "--run", "other")
    assert "secret" not in said
    assert KEY in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('"vllm"', '"x"'),
        ("4.0", "-4.0"),
        ('"looks": [', '"looks": [], "x": ['),
        ("vllm:", "y:"),
        ("1", "1e300"),
    ],
)
def test_a_damaged_recording_is_one_sentence(run, plain, tmp_path, old, new):
    path = tmp_path / "watched.json"
    path.write_text(plain.read_text().replace(old, new) if old else "{")
    with lying(Engine(SURVIVAL, 0.002)) as server:
        code, _, said = invoke("tune", server.url, "--minutes", MINUTES, "--plain", path, "--run", run.path)
    assert (code, said.count("treeopt: "), len(said.splitlines()) < 9) == (1, 1, True)


def test_a_server_that_loads_its_model_is_waited_for(run, caplog):
    """llama-server answers with status 503 until then; a server that never ends is not waited for longer than is said."""
    engine, left = Engine(SURVIVAL, 0.002), [3]

    def loading(path: str) -> bytes:
        left[0] -= 1
        return (
            engine(path) if left[0] < 0 else page('{"error": {"message": "Loading model"}}', "503 Service Unavailable")
        )

    caplog.set_level("INFO")
    with lying(loading) as server:
        found = tune(run, server.url, Watching(minutes=MINUTES, drafter="eagle3"))
    assert found.tokens_per_step == pytest.approx(2.5, rel=0.01)
    (waited,) = [record.message for record in caplog.records if "Waiting for it" in record.message]
    assert "Loading model" in waited


def test_a_server_that_never_has_its_model_is_given_up(run, monkeypatch):
    monkeypatch.setattr(watch, "LOADING_S", 0.05)
    with (
        lying(lambda path: page("Loading model", "503 Service Unavailable")) as server,
        pytest.raises(TreeoptError, match="Loading model"),
    ):
        tune(run, server.url, Watching(minutes=MINUTES))
