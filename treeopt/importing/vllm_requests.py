"""What vLLM says of each request (--per-request-spec-decode-metrics), and AIPerf's records of it.

metrics.speculative_decoding        at the root of a response, or of the last chunk of a stream; null for n > 1
spec_decode_acceptance              lines of AIPerf's profile_export.jsonl, of vLLM or TensorRT-LLM; sparse
pooled_spec_decode_acceptance_histogram   of AIPerf's profile_export_aiperf.json: all requests in one sum

A response, a list of them, JSON lines, or the output of a batch. The arrays of the level "detailed" make
mixed lengths exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.importing.files import File
from treeopt.importing.requests import bodies, gather, read_requests
from treeopt.importing.survival import Counted
from treeopt.importing.vllm_metrics import WAY

POOLED = "pooled_spec_decode_acceptance_histogram"
RECORD = "spec_decode_acceptance"
NO_LENGTH = (
    "The pooled histogram does not say how long drafts were. The largest number of accepted tokens "
    "was taken as the length."
)


def matches(content: Any) -> bool:
    return any(records_of(body) or body.get(POOLED) for body in bodies(content))


def read(files: Sequence[File]) -> Counted:
    """Drafts over the requests of all files."""
    for content, path in files:
        pooled = [body[POOLED] for body in bodies(content) if body.get(POOLED)]
        if pooled:
            if len(files) > 1 or len(pooled) > 1:
                raise InvalidInput(f"{path} is a sum over requests: import it alone.")
            return read_requests([{"acceptance_histogram": pooled[0]}], path, notes=[NO_LENGTH], are_requests=False)
    records, skipped = gather(files, records_of)
    return read_requests(records, files[-1][1], skipped=skipped, way=WAY)


def records_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a response says of drafts."""
    metrics = body.get("metrics")
    found = [body.get(RECORD), metrics.get("speculative_decoding") if isinstance(metrics, dict) else None]
    return [one for one in found if isinstance(one, dict)]
