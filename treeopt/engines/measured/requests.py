"""Drafts of requests, as engines report them: how many drafts had 0, 1, ... guesses taken.

Requests are independent, and so the errors of survival are bootstrapped over them. An engine's file brings its
names to those of `RequestDrafts`, which are vLLM's. Means are read for checks only.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from treeopt.engines.measured.files import File
from treeopt.engines.measured.survival import MOST_DRAFTS, MOST_LENGTH, CountedDrafts, Drafts, Histograms, group_of
from treeopt.errors import InvalidInput
from treeopt.files.bounds import limit_rows
from treeopt.files.storage import typed

Body = dict[str, Any]  # a JSON object as another tool wrote it, nothing of it checked
WRAPPERS = ("response", "body")  # of a batch's output lines


def dense(histogram: Any) -> Any:
    """A histogram as a list; engines may leave its zeros out and have an object, by the number taken.

    >>> dense({"0": 20, "3": 42}), dense([1, 2]), dense(None)
    ([20, 0, 0, 42], [1, 2], [])
    """
    if not isinstance(histogram, dict):
        return [] if histogram is None else histogram
    for name in histogram:
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
    mean_acceptance_length: float | None = None
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


def bodies(content: Any) -> Iterator[Body]:
    """Responses in a document: alone, in lists, or in the lines of a batch's output; not more than are read."""
    return (body for body in limit_rows(_bodies(content), "A file of responses") if body is not None)


def _bodies(content: Any) -> Iterator[Body | None]:
    """The responses, and None for each list."""
    if isinstance(content, list):
        yield None
        for item in content:
            yield from _bodies(item)
    elif isinstance(content, dict):
        inner = next((content[name] for name in WRAPPERS if isinstance(content.get(name), dict)), None)
        yield from _bodies(inner) if inner is not None else iter((content,))


def choices(body: Body) -> list[Body]:
    listed = body.get("choices")
    return [choice for choice in listed if isinstance(choice, dict)] if isinstance(listed, list) else []


def gather(files: Sequence[File], records_of: Callable[[Body], list[Body]]) -> tuple[list[Body], int]:
    """Records of drafts in the responses of files, and how many say nothing; AIPerf's of its warm-up are left out."""
    records: list[Body] = []
    silent = 0
    for content, _ in files:
        for body in bodies(content):
            if not _is_warm_up(body):
                records += (more := records_of(body))
                silent += not more
    return records, silent


def _is_warm_up(body: Body) -> bool:
    metadata = body.get("metadata")
    return isinstance(metadata, dict) and "warmup" in (metadata.get("benchmark_phase"), metadata.get("phase_kind"))


def read_requests(
    records: Sequence[Body],
    path: Path,
    *,
    skipped: int = 0,
    notes: Sequence[str] = (),
    is_sparse: bool = False,
    remedy: str = "",
) -> CountedDrafts:
    """The drafts of requests; ``skipped`` responses had nothing to say of drafts.

    is_sparse : histograms end at the most that was taken, so that they do not tell the draft length
    """
    requests = typed(list[RequestDrafts], list(records), path)
    # The greatest length of the file stands in where a request does not tell its own.
    lengths = [max(len(request.acceptance_histogram) - 1, request.num_spec_tokens or 0) for request in requests]
    longest = max(lengths, default=0)
    groups: list[Drafts] = []
    for r, (request, record) in enumerate(zip(requests, records, strict=True), 1):
        if any(request.acceptance_histogram):
            where = f"{path}, request {r},"
            is_whole = isinstance(record["acceptance_histogram"], list) and not is_sparse
            check_request(request, where, is_whole=is_whole)
            groups.append(drafts_of(request, longest, where))
    responses = skipped + len(requests)
    remarks = list(notes)
    if len(groups) < responses:
        remarks.append(
            f"{responses - len(groups)} of {responses} responses say nothing about drafts (several choices, or "
            "none drafted) and were left out."
        )
    return CountedDrafts(groups, path, remarks, are_requests=True, remedy=remedy)


def check_request(request: RequestDrafts, where: str, *, is_whole: bool) -> None:
    """Raise InvalidInput if the figures of a request contradict one another.

    is_whole : whether the histogram has an entry for every number of tokens that a draft has
    """
    histogram, length = request.acceptance_histogram, request.num_spec_tokens
    steps, accepted = sum(histogram), sum(guesses * drafts for guesses, drafts in enumerate(histogram))
    for name, figure, counted, slack in (
        ("steps", request.num_spec_steps, steps, 0),
        ("accepted tokens", request.num_accepted_draft_tokens, accepted, 0),
        ("tokens a step", request.mean_acceptance_length, 1 + accepted / steps, 0.01),
    ):
        if figure is not None and not abs(figure - counted) <= slack:
            raise InvalidInput(
                f"{where} must have as many {name} as its histogram counts, {counted:.10g}, but has {figure:.10g}."
            )
    if length is not None and (len(histogram) > length + 1 or (is_whole and len(histogram) <= length)):
        raise InvalidInput(
            f"{where} must have a histogram of 0 to {length} tokens taken, as many as are drafted, but it has "
            f"{len(histogram)} entries."
        )
    if length and request.num_draft_tokens is not None and request.num_draft_tokens > length * steps:
        raise InvalidInput(
            f"{where} must draft chains of {length} tokens, but {request.num_draft_tokens} were drafted in {steps} "
            "steps: these are the nodes of trees, which do not tell how good the first guesses are. Measure with a chain."
        )


def drafts_of(request: RequestDrafts, longest: int, where: str) -> Drafts:
    """The drafts of a request, with bounds if it does not tell their lengths."""
    if by_length := _by_step(request):
        return Drafts.of(by_length)
    histogram, drafted, length = request.acceptance_histogram, request.num_draft_tokens, request.num_spec_tokens
    if length is None and drafted is not None:
        a_step, left = divmod(drafted, sum(histogram))
        if left == 0 and len(histogram) - 1 <= a_step <= MOST_LENGTH:
            length = a_step
    k = max(length or longest, len(histogram) - 1, 1)
    counts = [*histogram, *[0] * (k + 1 - len(histogram))]
    return group_of(sum(counts), [sum(counts[j:]) for j in range(1, k + 1)], drafted, where)


def _by_step(request: RequestDrafts) -> Histograms:
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
