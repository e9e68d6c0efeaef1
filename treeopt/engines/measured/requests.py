"""Drafts of requests, as engines say them: how many of them had 0, 1, ... guesses taken.

Requests are independent, and so the errors of survival are bootstrapped over them. The engines' own
names are brought to those of `RequestDrafts`, which are vLLM's; means are read for checks only.
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
        for one in content:
            yield from _bodies(one)
    elif isinstance(content, dict):
        inner = next((content[name] for name in WRAPPERS if isinstance(content.get(name), dict)), None)
        yield from _bodies(inner) if inner is not None else iter((content,))


def choices(body: Body) -> list[Body]:
    found = body.get("choices")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def gather(files: Sequence[File], records_of: Callable[[Body], list[Body]]) -> tuple[list[Body], int]:
    """Records of drafts in the responses of files, and how many say nothing; AIPerf's of its warm-up are left out."""
    found = [records_of(body) for content, _ in files for body in bodies(content) if not _is_warm_up(body)]
    return [record for records in found for record in records], sum(not records for records in found)


def _is_warm_up(body: Body) -> bool:
    metadata = body.get("metadata")
    return isinstance(metadata, dict) and "warmup" in (metadata.get("benchmark_phase"), metadata.get("phase_kind"))


def read_requests(
    records: Sequence[Body],
    path: Path,
    *,
    skipped: int = 0,
    notes: Sequence[str] = (),
    are_requests: bool = True,
    is_sparse: bool = False,
    way: str = "",
) -> CountedDrafts:
    """The drafts of requests; ``skipped`` responses had nothing to say of drafts.

    is_sparse : histograms end at the most that was taken, so that they do not tell the draft length
    """
    requests = typed(list[RequestDrafts], list(records), path)
    # The greatest length of the file stands in where a request does not tell its own.
    longest = max((max(len(one.acceptance_histogram) - 1, one.num_spec_tokens or 0) for one in requests), default=0)
    groups: list[Drafts] = []
    for r, (one, record) in enumerate(zip(requests, records, strict=True), 1):
        if any(one.acceptance_histogram):
            where = f"{path}, request {r},"
            check_request(one, where, is_whole=isinstance(record["acceptance_histogram"], list) and not is_sparse)
            groups.append(drafts_of(one, longest, where))
    said = list(notes)
    if silent := skipped + len(requests) - len(groups):
        said.append(
            f"{silent} of {skipped + len(requests)} responses say nothing about drafts (several choices, or "
            "none drafted) and were left out."
        )
    return CountedDrafts(groups, path, said, are_requests, way=way)


def check_request(one: RequestDrafts, where: str, *, is_whole: bool) -> None:
    """Raise InvalidInput if the figures of a request contradict one another.

    is_whole : whether the histogram has an entry for every number of tokens that a draft has
    """
    histogram, length = one.acceptance_histogram, one.num_spec_tokens
    steps, taken = sum(histogram), sum(a * n for a, n in enumerate(histogram))
    mean = 1 + taken / steps
    for name, said, counted, slack in (
        ("steps", one.num_spec_steps, steps, 0),
        ("accepted tokens", one.num_accepted_draft_tokens, taken, 0),
        ("tokens a step", one.mean_acceptance_length, mean, 0.01),
    ):
        if said is not None and not abs(said - counted) <= slack:
            raise InvalidInput(
                f"{where} must have as many {name} as its histogram counts, {counted:.10g}, but has {said:.10g}."
            )
    if length is not None and (len(histogram) > length + 1 or (is_whole and len(histogram) <= length)):
        raise InvalidInput(
            f"{where} must have a histogram of 0 to {length} tokens taken, as many as are drafted, but it has "
            f"{len(histogram)} entries."
        )
    if length and one.num_draft_tokens is not None and one.num_draft_tokens > length * steps:
        raise InvalidInput(
            f"{where} must draft chains of {length} tokens, but {one.num_draft_tokens} were drafted in {steps} "
            "steps: these are the nodes of trees, which do not tell how good the first guesses are. Measure with a chain."
        )


def drafts_of(one: RequestDrafts, longest: int, where: str) -> Drafts:
    """The drafts of a request, with bounds if it does not tell their lengths."""
    if by_length := _by_step(one):
        return Drafts.of(by_length)
    histogram, drafted, length = one.acceptance_histogram, one.num_draft_tokens, one.num_spec_tokens
    each = drafted / sum(histogram) if drafted is not None else None
    if length is None and each is not None and each.is_integer() and len(histogram) - 1 <= each <= MOST_LENGTH:
        length = int(each)
    k = max(length or longest, len(histogram) - 1, 1)
    counts = [*histogram, *[0] * (k + 1 - len(histogram))]
    return group_of(sum(counts), [sum(counts[j:]) for j in range(1, k + 1)], drafted, where)


def _by_step(one: RequestDrafts) -> Histograms:
    """Draft length to histogram, from the steps of a request; empty if it does not list them all.

    A draft of which a grammar left no guess is one whose first guess was wrong.
    """
    accepted, drafted = one.per_step_accepted or [], one.per_step_drafted or []
    if len(accepted) != len(drafted) or Counter(accepted) != Counter(dict(enumerate(one.acceptance_histogram))):
        return {}
    steps = Counter(zip(drafted, accepted, strict=True))
    if not all(0 <= a <= k <= MOST_LENGTH for k, a in steps):
        return {}
    if empty := steps.pop((0, 0), 0):
        steps[1, 0] += empty
    return {k: [steps[k, a] for a in range(k + 1)] for k in dict.fromkeys(k for k, _ in steps)}
