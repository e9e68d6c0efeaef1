"""A server that a command starts, as a Stepper: it answers whole, in text, and counts the steps of all answers together."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np

from treeopt.records.contender import Answer, Block, Prompt
from treeopt.records.origins import Runtime
from treeopt.runtime.stepper import Passes, Stepper
from treeopt.runtime.stop import StopRule
from treeopt.serving.client import Server, run_async
from treeopt.serving.launch import Launcher
from treeopt.serving.visit import Visit, visited
from treeopt.trees.draft import Draft


class Served(Stepper):
    """What a command serves with some options. It is started when it is asked first, and stopped when it is renewed.

    setting : name of the options
    most    : tokens of an answer, where the prompt has no limit of its own
    length  : longest draft that the options may make
    logs    : folder of the server's logs
    number  : of the round, in the name of a log
    """

    version, is_stepwise, is_launched = "", False, True

    def __init__(
        self,
        runtime: Runtime,
        launcher: Launcher,
        setting: str,
        options: Sequence[str],
        most: int,
        logs: Path,
        length: float = inf,
    ) -> None:
        self.name, self._runtime = runtime.get("name") or "", runtime
        self.launcher, self.setting, self.options = launcher, setting, options
        self.most, self.logs, self.length, self.number = most, logs, length, 0
        self._up, self._url = ExitStack(), ""

    @property
    def stop(self) -> StopRule:
        return StopRule(frozenset(), self.most)

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def renew(self) -> None:
        self._url = ""
        self._up.close()

    def answer(self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1) -> Passes:
        raise NotImplementedError("a server answers whole")

    def decode(self, prompts: Sequence[Prompt], draft: Draft | None, rows: int = 1) -> list[Block]:
        """A block of each answer, timed where it ended while all rows were busy; the server's counts are in the first."""
        texts, limits = [prompt.text for prompt in prompts], [prompt.limit or self.most for prompt in prompts]

        async def visit() -> Visit:
            async with Server(self._url) as server:
                return await visited(server, self.setting, texts, limits, clients=rows, length=self.length)

        try:
            if not self._url:
                log = self.logs / f"{self.setting.replace(' ', '-')}-{self.number + 1}.log"
                self._url = self._up.enter_context(self.launcher.launched(self.options, log))
            return blocks_of(run_async(visit), prompts)
        except BaseException:
            self._url = ""
            self._up.__exit__(*sys.exc_info())  # which says it, where the server has ended
            raise


def blocks_of(visit: Visit, prompts: Sequence[Prompt]) -> list[Block]:
    """A block of each answer of a visit. The server's steps are spread over the answers."""
    ends = np.cumsum([answer.step_tokens for answer in visit.answers]) * visit.steps / max(visit.emitted, 1)
    steps, timed = np.diff(np.rint(ends), prepend=0).astype(int).tolist(), visit.timed
    blocks = []
    for place, (answer, prompt) in enumerate(zip(visit.answers, prompts, strict=True)):
        is_timed, tokens = place in timed, answer.step_tokens
        whole = Answer(
            id=prompt.id,
            group=prompt.group,
            tokens=max(answer.num_tokens, 1),
            steps=steps[place],
            identical=True,
            text=answer.text,
        )
        block = Block(
            round=0,
            prompts=[place],
            group=prompt.group,
            tokens=tokens if is_timed else 0,
            steps=round(tokens / visit.tokens_per_step) if is_timed else 0,
            decode_s=answer.steps_s / visit.batch_size if is_timed else 0.0,
            answers=[whole],
        )
        blocks.append(block)
    if visit.drafts:
        blocks[0].counted = [more - fewer for more, fewer in pairwise([visit.drafts, *visit.reached, 0])]
    return blocks
