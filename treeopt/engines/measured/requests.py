"""Drafts of requests, as engines report them: how many drafts had 0, 1, ... guesses taken.

Requests are independent, and so the errors of survival are bootstrapped over them. The names of `RequestDrafts` are vLLM's.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from treeopt.engines.measured.files import File
from treeopt.engines.measured.survival import MOST_DRAFTS, MOST_LENGTH, CountedDrafts, Drafts
from treeopt.errors import InvalidInput
from treeopt.files.bounds import limit_rows
from treeopt.files.storage import typed

Body = dict[str, Any]  # a JSON object as another tool wrote it, nothing of it checked
WRAPPERS = ("response", "body", "data", "responses", "results")  # of a batch's output lines, of clients
NAMES = {  # figures of `RequestDrafts` to their names in SGLang, the newest first, and in TensorRT-LLM
    "acceptance_histogram": ("spec_correct_drafts_histogram", "spec_accept_histogram"),
    "num_spec_steps": ("spec_verify_ct",),
    "num_accepted_draft_tokens": ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "total_accepted_draft_tokens"),
    "num_draft_tokens": ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num", "total_draft_tokens"),
}  # fmt: skip


def dense(histogram: Any) -> Any:
    """A histogram as a list; engines may leave its zeros out and have an object, by the number taken.

    >>> dense({"0": 20, "3": 42}), dense([1, 2]), dense(None)
    ([20, 0, 0, 42], [1, 2], [])
    """
    if not isinstance(histogram, dict):
        return [] if histogram is None else histogram
    for name in map(str, histogram):
        if not (name.isascii() and name.isdigit() and len(name) <= 4 and int(name) <= MOST_LENGTH):
            raise ValueError(
                f"a histogram must count 0 to {MOST_LENGTH} tokens under their number, but has {name!r:.40}"
            )
    counts = {int(name): count for name, count in histogram.items()}
    return [counts.get(taken, 0) for taken in range(max(counts, default=-1) + 1)]


Length = Annotated[int, Field(ge=0, le=MOST_LENGTH)]
Drafted = Annotated[int, Field(ge=0, le=MOST_DRAFTS)]
Histogram = Annotated[list[Drafted], Field(max_length=MOST_LENGTH + 1), BeforeValidator(dense)]


@dataclass(frozen=True)
class RequestDrafts:
    """The drafts of one request; all may be missing. The histogram is as long as it comes."""

    acceptance_histogram: Histogram = field(default_factory=list)
    num_spec_steps: Drafted | None = None
    num_accepted_draft_tokens: Drafted | None = None
    num_draft_tokens: Drafted | None = None
    num_spec_tokens: Length | None = None
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


def bodies(content: Any) -> Iterator[Body]:
    """Responses in a document: alone, in lists, or wrapped as in the lines of a batch's output; not more than are read."""
    return (body for body in limit_rows(_bodies(content), "A file of responses") if body is not None)


def _bodies(content: Any) -> Iterator[Body | None]:
    """The responses, and None for each list."""
    if isinstance(content, list):
        yield None
        for item in content:
            yield from _bodies(item)
    elif isinstance(content, dict):
        inner = next((content[name] for name in WRAPPERS if isinstance(content.get(name), dict | list)), None)
        yield from _bodies(inner) if inner is not None else iter((content,))


def records_in(body: Body, places: Sequence[str]) -> list[Body]:
    """The figures of drafts in a response, at the first of its places that has some.

    places : keys that lead there, with dots between them; lists on the way are gone through

    >>> records_in({"choices": [{"meta_info": {"spec_verify_ct": 9}}]}, ("meta_info", "choices.meta_info"))
    [{'num_spec_steps': 9}]
    """
    for place in places:
        found: list[Any] = [body]
        for key in place.split("."):
            values = [value.get(key) for value in found if isinstance(value, dict)]
            found = [item for value in values for item in (value if isinstance(value, list) else [value])]
        records = [_figures(value) for value in found if isinstance(value, dict)]
        if any(records):
            return [record for record in records if record]
    return []


def _figures(record: Body) -> Body:
    """What `RequestDrafts` takes of a record; of several names that which comes first in `NAMES`."""
    figures: Body = {}
    for figure in fields(RequestDrafts):
        for name in (figure.name, *NAMES.get(figure.name, ())):
            if record.get(name) is not None:
                figures.setdefault(figure.name, record[name])
    return figures


def _is_warm_up(body: Body) -> bool:
    """Whether it is AIPerf's record of a request before its measurement."""
    metadata = body.get("metadata")
    return isinstance(metadata, dict) and "warmup" in (metadata.get("benchmark_phase"), metadata.get("phase_kind"))


def read_requests(
    files: Sequence[File], places: Sequence[str], *, ask: str = "", notes: Sequence[str] = (), remedy: str = ""
) -> CountedDrafts:
    """The drafts of the requests in files.

    places : of records in a response, as `records_in` takes them
    ask    : how to have the engine write histograms, for files without any
    """
    path, records, silent = files[-1][1], list[Body](), 0
    for content, _ in files:
        for body in bodies(content):
            more = [] if _is_warm_up(body) else records_in(body, places)
            records += more
            # Only the last chunk of a stream says something about drafts.
            silent += not (more or _is_warm_up(body) or str(body.get("object")).endswith(".chunk"))
    responses = silent + len(records)
    requests = typed(list[RequestDrafts], records, path)
    # The greatest length of the file stands in where a request does not tell its own.
    longest = max((max(len(r.acceptance_histogram) - 1, r.num_spec_tokens or 0) for r in requests), default=0)
    groups: list[Drafts] = []
    for number, request in enumerate(requests, 1):
        if any(request.acceptance_histogram):
            groups += drafts_of(request, longest, f"{path}, request {number},", number)
        else:
            silent += 1
    if ask and not groups:
        raise InvalidInput(f"{path} has only means of its drafts: survival needs counts by position. Instead, {ask}.")
    remarks = list(notes)
    if silent:
        remarks.append(
            f"{silent} of {responses} responses say nothing about drafts (several choices, or none drafted) and were left out."
        )
    return CountedDrafts(groups, path, remarks, are_requests=True, remedy=remedy)


def drafts_of(request: RequestDrafts, longest: int, where: str, number: int) -> list[Drafts]:
    """The drafts of a request, those of each length where it lists all steps."""
    histogram, drafted, length = request.acceptance_histogram, request.num_draft_tokens, request.num_spec_tokens
    steps = sum(histogram)
    if length and (drafted or 0) > length * steps:
        raise InvalidInput(
            f"{where} must draft chains of {length} tokens, but {drafted} were drafted in {steps} "
            "steps: these are the nodes of trees, which do not tell how good the first guesses are. Measure with a chain."
        )
    if by_length := _by_step(request):
        return [chain_of(one, k, k * sum(one), where, number) for k, one in by_length.items()]
    if length is None and drafted is not None:
        a_step, left = divmod(drafted, steps)
        if left == 0 and len(histogram) - 1 <= a_step <= MOST_LENGTH:
            length = a_step
    return [chain_of(histogram, length or longest, drafted, where, number)]


def chain_of(histogram: Sequence[int], length: int, drafted: int | None, where: str, number: int) -> Drafts:
    """Drafts of up to ``length`` guesses, by how many had 0, 1, ... guesses taken."""
    k = max(length, len(histogram) - 1, 1)
    reached = [sum(histogram[j:]) for j in range(1, k + 1)]
    return Drafts.of(sum(histogram), reached, drafted, where, request=number)


def _by_step(request: RequestDrafts) -> Mapping[int, list[int]]:
    """Draft length to histogram, from the steps of a request; empty if it does not list them all.

    A draft counts as one wrong guess if a grammar left none of its guesses.
    """
    accepted, drafted = request.per_step_accepted or [], request.per_step_drafted or []
    if len(accepted) != len(drafted) or Counter(accepted) != Counter(dict(enumerate(request.acceptance_histogram))):
        return {}
    steps = Counter(zip(drafted, accepted, strict=True))
    if not all(0 <= a <= k <= MOST_LENGTH for k, a in steps):
        return {}
    if empty := steps.pop((0, 0), 0):
        steps[1, 0] += empty
    return {length: [steps[length, a] for a in range(length + 1)] for length, _ in steps}
