"""vLLM: ``--speculative-config``, with one chain length or one for each range of batch sizes; and its counts of drafts.

/metrics                       counters since the start (vllm/v1/spec_decode/metrics.py): one scrape or two
log line "SpecDecoding metrics" sums of an interval, as rates by position (same file)
vllm bench serve               JSON, or JSON lines of --append-result: the difference of two scrapes
vllm bench sweep serve         summary.json: the same, run by run
metrics.speculative_decoding   of a request (--per-request-spec-decode-metrics): at the root of a response, or of the last
                               chunk of a stream; null for n > 1. The arrays of the level "detailed" make mixed lengths exact
spec_decode_acceptance         lines of AIPerf's profile_export.jsonl, of vLLM or TensorRT-LLM; sparse

The target's own token is in every acceptance length, and in no number of accepted tokens. Only rates by
position are read: the plain acceptance rate is in percent in some places and a share in others. vLLM does not
count steps without a draft. Older log lines have means only.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from treeopt.engines import copied
from treeopt.engines.base import LAST, About, Kind, Method, ServingEngine, Written
from treeopt.engines.measured.benchmarks import POSITIONS, Record, records_of
from treeopt.engines.measured.exposition import counters_among, is_exposition
from treeopt.engines.measured.files import File
from treeopt.engines.measured.rates import Printed, PrintedRates, alone, drafters_named, pooled
from treeopt.engines.measured.requests import Body, bodies, read_requests, records_in
from treeopt.engines.measured.survival import CountedDrafts, Drafts
from treeopt.engines.speculation import Speculation
from treeopt.engines.templates import launch, plain
from treeopt.errors import InvalidInput
from treeopt.files.fields import Count, Share
from treeopt.files.fields import checked as row_of
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import CopiedText, Draft

FILE = "speculative_config.json"
SCHEDULE = "num_speculative_tokens_per_batch_size"
SCHEDULED = ("eagle3", "eagle", "mtp", "draft-model", "ngram", "dflash", "dflash2", "dspark")
METHODS = {"draft-model": "draft_model", "dflash2": "dflash", "p-eagle": "eagle3", "pard": "draft_model"}
PARALLEL = ("p-eagle", "pard")
DRAFTERS = {  # kinds of drafter by method
    method: tuple(kind for kind in (*SCHEDULED, *PARALLEL, "suffix") if METHODS.get(kind, kind) == method)
    for method in ("eagle3", "eagle", "mtp", "draft_model", "ngram", "dflash", "dspark", "suffix")
}
ANY_LENGTH = "All lengths have the same guesses; those deeper than DRAFTER was trained for are seldom right."
ALONE = ("mtp", "ngram", "suffix")  # all others have a DRAFTER
NOTES = {
    "draft-model": "vLLM does not start where the vocabularies of MODEL and DRAFTER differ in size, unless the config has "
    '"use_heterogeneous_vocab": true, which goes with greedy drafts alone.',
    "dflash": "vLLM does not start with a DFlash drafter whose config.json has sample_from_anchor: true.",
    "dspark": "Releases from 0.26.0 on may refuse fewer tokens than DRAFTER's block (PR #47419).",
    **dict.fromkeys(PARALLEL, ANY_LENGTH),
    "suffix": "Suffix decoding needs Arctic Inference: pip install arctic-inference==0.1.1",
}


def write(served: Ranges[Draft], about: About) -> Written:
    """Command and config for one chain length, or for a length per range of batch sizes.

    Suffix decoding runs on model runner V1, which drops a schedule.
    """
    kind, longest = about.drafter, max(draft.depth for *_, draft in served)
    if longest == 0:
        return plain("vllm serve MODEL")
    config: dict[str, object] = {"method": METHODS.get(kind, kind)}
    if kind not in ALONE:
        config["model"] = "DRAFTER"
    if kind == "ngram":
        config["prompt_lookup_max"], config["prompt_lookup_min"] = LOOKED_UP, 1
    if kind in PARALLEL:
        config["parallel_drafting"] = True
    if about.rule == "reject":
        config["draft_sample_method"] = "probabilistic"
    config["num_speculative_tokens"] = longest
    notes = [NOTES[kind]] if kind in NOTES else []
    if kind == "mtp" and longest > 1:
        notes.append(
            f"vLLM does not start where the model has fewer MTP layers than {longest} and their number does not divide "
            f"{longest}."
        )
    if len(served) > 1:
        config[SCHEDULE] = [[first, last or LAST, draft.depth] for first, last, draft in served]
        notes += [
            f"The last range ends at {LAST}: above it vLLM carries its length forward.",
            f"With --data-parallel-size above 1 vLLM drops the schedule and keeps {longest} at every batch size.",
            "Schedules run with full CUDA graphs on model runner V2 only, the default of 0.33.0; releases from 0.25.0 on "
            "take VLLM_USE_V2_MODEL_RUNNER=1.",
        ]
    text = json.dumps(config)
    return launch("vllm serve MODEL", notes, {FILE: f"{text}\n"}, ("--speculative-config", text))


ENVIRONMENT = {
    "vllm:ngram-v1": ["VLLM_USE_V2_MODEL_RUNNER=0"],
    "vllm:ngram-v2": ["VLLM_USE_V2_MODEL_RUNNER=1"],
    "arctic:suffix": ["ARCTIC_INFERENCE_ENABLED=1"],
}
ABOUT_COPIED = {
    "vllm:suffix": [NOTES["suffix"]],
    "arctic:suffix": ["The options are those of Arctic Inference: pip install 'arctic-inference[vllm]'"],
}


def config_of(draft: Draft) -> dict[str, Any]:
    return {"method": draft.drafter.partition(":")[2].partition("-")[0], **draft.options}


def write_copied(served: Ranges[CopiedText], about: About) -> Written:
    """Command and config for drafters that copy text. The model runner decides how n-grams are looked up."""
    draft = only(served)
    if draft.depth == 0:
        return plain("vllm serve MODEL")
    text = json.dumps(config_of(draft))
    notes, environment = ABOUT_COPIED.get(draft.drafter, ()), ENVIRONMENT.get(draft.drafter, ())
    return launch("vllm serve MODEL", notes, {FILE: f"{text}\n"}, ("--speculative-config", text), environment)


PREFIX = r"(?:ray_)?vllm[:_]"
LINE = re.compile(r"(?:SpecDecoding|Speculative) metrics: |Per-position acceptance rate: ")
# All are searched for in turn, since a pattern with gaps in it takes hours on a line that repeats its beginning.
LENGTH = re.compile(r"Mean acceptance length: (\d{1,4}\.\d{1,4}|nan), ")
TOTALS = re.compile(r"Accepted: (\d{1,13}) tokens, Drafted: (\d{1,13}) tokens")
RATES = re.compile(r"Per-position acceptance rate: ((?:\d\.\d+|nan)(?:, (?:\d\.\d+|nan))*)")
# In the line that says how the engine starts.
METHOD = re.compile(r"speculative_config=SpeculativeConfig\(method='(\w+)'")
OLD_LINE = (
    "only means of its drafts: rates by position are needed, and its log lines have none. vLLM prints them as "
    "'Per-position acceptance rate' since 2025; update it, or save /metrics"
)
REMEDY = ", or serve with --per-request-spec-decode-metrics detailed and save the responses"


def is_of_metrics(content: Any) -> bool:
    if isinstance(content, str) and (is_exposition(content, PREFIX) or LINE.search(content)):
        return True
    return any(run.keys() & {POSITIONS, "spec_decode_acceptance_length"} for run in runs_of(content))


def read_metrics(files: Sequence[File]) -> CountedDrafts | PrintedRates:
    """Drafts of all files together: scrapes are subtracted, logs and runs are pooled."""
    if counters := counters_among(files, PREFIX):
        return counters.drafts(REMEDY)
    path = files[-1][1]
    logs = [(text, file) for text, file in files if isinstance(text, str) and LINE.search(text)]
    lines = [line for text, file in logs for line in log_lines(text, file)]
    drafters = drafters_named((method for text, _ in logs for method in METHOD.findall(text)), DRAFTERS, path)
    complete = [line for line in lines if line.rates and line.drafted]
    if not complete and (rates := [line.rates for line in lines if line.rates]):
        return alone(rates, path, drafters)
    groups, notes = pooled(complete, len(lines) - len(complete))
    if logs and not groups:
        raise InvalidInput(f"{path} has {OLD_LINE if lines else 'no interval with drafts'}.")
    tokens = requests = None
    for content, file in (other for other in files if other not in logs):
        more, remarks, tokens, requests = read_runs(content, file)
        groups, notes = [*groups, *more], [*notes, *remarks]
    if len(files) > 1:
        tokens = requests = None
    return CountedDrafts(groups, path, notes, remedy=REMEDY, drafters=drafters, tokens=tokens, requests=requests)


def log_lines(text: str, path: Path) -> list[Printed]:
    """What a log prints of each interval with drafts; 0 for counts that are not there."""
    lines = []
    for place, line in enumerate(text.splitlines(), 1):
        if LINE.search(line) is None:
            continue
        mean, totals, rates = (form.search(line) for form in (LENGTH, TOTALS, RATES))
        said = (mean[1] if mean else "0") + (rates[1] if rates else "")
        if "nan" not in said:
            length = float(mean[1]) if mean else 0.0
            values = [float(rate) for rate in rates[1].split(", ")] if rates else []
            accepted, drafted = map(int, totals.groups()) if totals and mean else (0, 0)
            lines.append(Printed(f"{path}, line {place},", values, accepted, drafted, length))
    return lines


class Run(BaseModel):
    """What vllm bench serve or spec_decode.py says of a run's drafts."""

    drafts: Count = Field(validation_alias="spec_decode_num_drafts")
    drafted: Count = Field(validation_alias="spec_decode_draft_tokens")
    rates: list[Share] = Field(validation_alias=POSITIONS)
    tokens: Count | None = Field(None, validation_alias="total_output_tokens")
    completed: Count = 0


def runs_of(content: Any) -> list[Record]:
    """The runs in a file: what a benchmark printed, or its JSON."""
    if isinstance(content, str):
        return [record for _, record in records_of(content) if POSITIONS in record]
    return list(bodies(content))


def read_runs(content: Any, path: Path) -> tuple[list[Drafts], list[str], int | None, int | None]:
    """The drafts of each run with speculation, a note on the others, the tokens that all steps emitted, and the requests."""
    records = runs_of(content)
    groups, tokens, requests = list[Drafts](), list[int | None](), list[int]()
    for r, record in enumerate(records, 1):
        if record.get(POSITIONS) is None:
            continue
        where = f"{path}, run {r},"
        try:
            run = row_of(Run, record)
        except InvalidInput as error:
            raise InvalidInput(f"{where} is not as it should be: {error}") from None
        groups.append(Drafts.of(run.drafts, [round(rate * run.drafts) for rate in run.rates], run.drafted, where))
        tokens.append(None if run.tokens is None else run.tokens - run.completed)
        requests.append(run.completed)
    if not groups:
        raise InvalidInput(
            f"{path} must have {POSITIONS} in some run, but has none: vllm bench serve writes them only with "
            "speculation, and only if it can read the server's /metrics."
        )
    left = len(records) - len(groups)
    notes = [f"{left} of {len(records)} runs have no drafts and were left out."] if left else []
    emitted = None if None in tokens else sum(filter(None, tokens))
    return groups, notes, emitted, sum(requests) if all(requests) else None


PLACES = ("spec_decode_acceptance", "metrics.speculative_decoding")  # of AIPerf's records and of responses


def is_of_requests(content: Any) -> bool:
    return any(records_in(body, PLACES) for body in bodies(content))


def read_responses(files: Sequence[File]) -> CountedDrafts:
    counts = read_requests(files, PLACES, remedy=REMEDY)
    return replace(counts, tokens=sum(emitted_by(body) for content, _ in files for body in bodies(content)) or None)


def emitted_by(body: Body) -> int:
    """Tokens that the steps of a request emitted, all but its first; 0 where it does not say them."""
    usage, is_chunk = body.get("usage"), str(body.get("object")).endswith(".chunk")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens - 1 if isinstance(tokens, int) and (records_in(body, PLACES) or not is_chunk) else 0


IMPORTS = {
    "vllm-metrics": Kind("vLLM's /metrics, its log lines 'SpecDecoding metrics', or results of vllm bench serve with speculation",
                         is_of_metrics, read_metrics),
    "vllm-requests": Kind("responses with metrics.speculative_decoding (serve with --per-request-spec-decode-metrics summary, "
                          "and ask streams for stream_options.include_usage), or AIPerf's records of them",
                          is_of_requests, read_responses),
}  # fmt: skip
CONFIG = "num_speculative_tokens in --speculative-config"
OPTIONS = Speculation(
    program="vllm",
    flags=r"--speculative[-_]config(?:\..*)?|-sc|--spec[-_](?:method|model|tokens)",
    named_by="method|--spec[-_]method",
    key="num_speculative_tokens",
    lengths={".*": "--spec-tokens {length}"},
)
ENGINE = ServingEngine(name="vllm", title="vLLM", package="vllm", server="vllm serve", options=OPTIONS, imports=IMPORTS, methods=(
    Method(name="batch-size", checked="0.33.0", drafters=SCHEDULED, rules=("greedy", "sample", "reject"),
           looks_up="from the latest place, or on model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0) the earliest",
           carrier="num_speculative_tokens_per_batch_size in --speculative-config", by_batch_size=True,
           wider="would draft them without a word, in a block with other and mostly worse guesses",
           versions="PR #32374 on; not with data parallelism",
           source="vllm-project/vllm vllm/v1/spec_decode/dynamic/utils.py, vllm/config/speculative.py, vllm/config/vllm.py",
           write=write),
    Method(name="parallel", checked="0.33.0", drafters=PARALLEL, rules=("greedy", "sample"), carrier=CONFIG,
           source="vllm-project/vllm vllm/config/speculative.py, PR #32887", write=write),
    Method(name="suffix", checked="0.33.0", drafters=("suffix",), rules=("greedy", "sample"), carrier=CONFIG,
           source="vllm-project/vllm vllm/config/speculative.py, vllm/config/vllm.py", write=write),
    copied.method("vllm", "arctic", write=write_copied, checked="0.33.0, arctic-inference 0.1.1", carrier="--speculative-config",
                  source="vllm-project/vllm vllm/config/speculative.py, snowflakedb/ArcticInference arctic_inference/vllm/config.py"),
))  # fmt: skip
