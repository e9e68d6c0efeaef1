"""vLLM in a process of its own: what `treeopt.runtime.engines.vllm` speaks to, one JSON document a line.

It runs in the Python that has vllm, where treeopt is not installed, so it imports nothing else. The first line that it is sent
has the arguments of `vllm.LLM`. Each further one is a request for answers, or tells after a pass which of them to end.
Whatever vLLM prints goes to stderr. Read and run with vllm 0.32.0: vllm/v1/engine/llm_engine.py, vllm/v1/core/sched/scheduler.py.
"""

import json
import os
import time
from collections.abc import Callable
from typing import IO, Any

# Of the scheduler: guesses by the number of requests in a step; internal, so it may be missing.
TABLE = "dynamic_sd_lookup"


def main() -> None:
    told, said = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no document
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB: two engines are up at a time

    def say(**document: Any) -> None:
        said.write(json.dumps(document) + "\n")

    try:
        import vllm

        engine = vllm.LLM(**json.loads(told.readline())).llm_engine
        scheduler = getattr(getattr(engine.engine_core, "engine_core", None), "scheduler", None)
        table = getattr(scheduler, TABLE, None)
        say(version=vllm.__version__, has_table=isinstance(table, list))
        for line in told:
            answer(engine, table, json.loads(line), told, say)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}"[:2000])
        raise


def answer(engine: Any, table: Any, asked: dict[str, Any], told: IO[str], say: Callable[..., None]) -> None:
    """Answer prompts, so many at a time, and tell every pass; what ends after it is told in return.

    asked : prompts {place: tokens}, most new tokens of each by place, rows, eos, and length, the guesses of every step
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if asked["length"] is not None and isinstance(table, list):
        table[:] = [0] + [asked["length"]] * (len(table) - 1)
    waiting, live, silent = list(asked["prompts"].items()), set[str](), set[str]()
    while waiting or live:
        while waiting and len(live) < asked["rows"]:
            place, tokens = waiting.pop(0)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=asked["most"][place],
                stop_token_ids=asked["eos"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(place, {"prompt_token_ids": tokens}, params)
            live.add(place)
            silent.add(place)
        reads, began = bool(silent), time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - began
        emitted = {one.request_id: list(one.outputs[0].token_ids) for one in outputs}
        silent -= {place for place, tokens in emitted.items() if tokens}
        ended = {one.request_id for one in outputs if one.finished}
        live -= ended
        say(emitted=emitted, seconds=seconds, reads_prompt=reads, ended=sorted(ended))
        stop = json.loads(told.readline())
        gone = list(live) if stop["all"] else [place for place in stop["ended"] if place in live]
        if gone:
            engine.abort_request(gone)
            live -= set(gone)
            silent -= set(gone)
        if stop["all"]:
            waiting = []
            while engine.has_unfinished_requests():
                engine.step()
    say(done=True)


if __name__ == "__main__":
    main()
