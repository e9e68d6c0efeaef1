"""What an engine says of a request's drafts: how many of them had 0, 1, ... guesses taken.

Requests are independent, and so the errors of survival are bootstrapped over them. The engines' own
names are brought to those of `Request`, which are vLLM's; means are read for checks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from treeopt.errors import InvalidInput
from treeopt.files.storage import typed
from treeopt.importing.files import Found
from treeopt.importing.survival import (
    BIASED,
    MOST_DRAFTS,
    MOST_LENGTH,
    Drafts,
    Histograms,
    check_counts,
    to_calibration,
)

Histogram = list[int] | dict[str, int]  # dense, or by the number taken and without zeros
WRAPPERS = ("response", "body")  # of a batch's output lines


@dataclass(frozen=True)
class Request:
    """The drafts of one request. All but the histogram may be missing."""

    acceptance_histogram: Histogram | None = None
    acceptance_histogram_by_draft_length: dict[str, Histogram] | None = None
    num_spec_steps: int | None = None
    num_accepted_draft_tokens: int | None = None
    num_draft_tokens: int | None = None
    num_spec_tokens: Annotated[int, Field(ge=0, le=MOST_LENGTH)] | None = None
    mean_acceptance_length: float | None = None
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None

    @property
    def dense(self) -> list[int]:
        """(a + 1,) the histogram, as long as it comes."""
        return dense(self.acceptance_histogram or [])


def bodies(content: Any) -> Iterator[dict[str, Any]]:
    """Responses in a document: alone, in lists, or in the lines of a batch's output."""
    if isinstance(content, list):
        for one in content:
            yield from bodies(one)
    elif isinstance(content, dict):
        inner = next((content[name] for name in WRAPPERS if isinstance(content.get(name), dict)), None)
        yield from bodies(inner) if inner is not None else iter((content,))


def choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of a response, those that are objects."""
    found = body.get("choices")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def read_requests(
    records: Sequence[dict[str, Any]],
    path: Path,
    *,
    skipped: int = 0,
    notes: Sequence[str] = (),
    are_requests: bool = True,
    is_sparse: bool = False,
) -> Found:
    """The calibration of requests; ``skipped`` responses had nothing to say of drafts.

    is_sparse : histograms end at the most that was taken, so that they do not tell the draft length
    """
    requests = typed(list[Request], list(records), path)
    empty = sum(not one.dense or not sum(one.dense) for one in requests)
    # The greatest length of the file stands in where a request does not tell its own.
    longest = max((len(one.dense) - 1 for one in requests), default=0)
    longest = max([longest, *(one.num_spec_tokens or 0 for one in requests)])
    groups, is_mixed = [], False
    for r, one in enumerate(requests):
        where = f"{path}, request {r + 1},"
        check_request(one, where, is_sparse=is_sparse)
        if sum(one.dense):
            rows, unrecorded = histograms(one, longest, where)
            groups.append(rows)
            is_mixed |= unrecorded
    said = [*notes, BIASED] if is_mixed else list(notes)
    if skipped + empty:
        said.append(
            f"{skipped + empty} of {skipped + len(requests)} responses say nothing of drafts (several choices, or "
            "none drafted) and were left out."
        )
    drafts = Drafts.of(groups, are_requests=are_requests)
    return to_calibration(drafts, path, notes=said)


def check_request(one: Request, where: str, *, is_sparse: bool) -> None:
    """InvalidInput where the figures of a request contradict one another."""
    histogram = one.dense
    if max(histogram, default=0) > MOST_DRAFTS or min(histogram, default=0) < 0:
        raise InvalidInput(f"{where} must have counts from 0 to {MOST_DRAFTS}, but has others.")
    steps = sum(histogram)
    taken = sum(a * n for a, n in enumerate(histogram))
    length = one.num_spec_tokens
    for name, said, counted in (
        ("steps", one.num_spec_steps, steps),
        ("accepted tokens", one.num_accepted_draft_tokens, taken),
    ):
        if said is not None and histogram and said != counted:
            raise InvalidInput(f"{where} must have as many {name} as its histogram counts, {counted}, but has {said}.")
    mean = one.mean_acceptance_length
    if mean is not None and steps and not abs(mean - 1 - taken / steps) <= 0.01:
        raise InvalidInput(
            f"{where} must have the mean length of its histogram, {1 + taken / steps:.2f}, but has {mean:g}."
        )
    whole = isinstance(one.acceptance_histogram, list) and not is_sparse
    if length is not None and steps and (len(histogram) > length + 1 or (whole and len(histogram) <= length)):
        raise InvalidInput(
            f"{where} must have a histogram of 0 to {length} tokens taken, as many as are drafted, but it has "
            f"{len(histogram)} entries."
        )
    if length and steps and one.num_draft_tokens is not None and one.num_draft_tokens > length * steps:
        raise InvalidInput(
            f"{where} must draft chains of {length} tokens, but {one.num_draft_tokens} were drafted in {steps} "
            "steps: these are the nodes of trees, and how deep a tree was accepted does not say how good its "
            "first guesses are. Measure with a chain."
        )


def histograms(one: Request, longest: int, where: str) -> tuple[Histograms, bool]:
    """Histograms by draft length, and whether lengths were mixed without being recorded."""
    histogram = one.dense
    steps = sum(histogram)
    by_length = _by_length(one, where) or _by_step(one)
    if by_length:
        return by_length, False
    drafted, length = one.num_draft_tokens, one.num_spec_tokens
    each = drafted / steps if drafted is not None else None
    if length is None and each is not None and each.is_integer() and len(histogram) - 1 <= each <= MOST_LENGTH:
        length = int(each)
    k = max(length if length else longest, len(histogram) - 1, 1)
    check_counts(steps, [sum(histogram[j:]) for j in range(1, k + 1)], None, where)
    return {k: histogram + [0] * (k + 1 - len(histogram))}, each is not None and each != k


def dense(histogram: Histogram) -> list[int]:
    """A histogram as a list, from either form.

    >>> dense({"0": 20, "3": 42}), dense([1, 2])
    ([20, 0, 0, 42], [1, 2])
    """
    if isinstance(histogram, list):
        if len(histogram) > MOST_LENGTH + 1:
            raise InvalidInput(f"A histogram must have at most {MOST_LENGTH + 1} entries, but has {len(histogram)}.")
        return list(histogram)
    places = {_place(name): count for name, count in histogram.items()}
    return [places.get(place, 0) for place in range(max(places, default=-1) + 1)]


def _place(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= 4 and int(name) <= MOST_LENGTH):
        raise InvalidInput(
            f"A histogram must count 0 to {MOST_LENGTH} tokens under their number, but has {name!r:.40}."
        )
    return int(name)


def _by_length(one: Request, where: str) -> Histograms:
    """The rows that a request has for each draft length; steps whose whole draft was invalid are no trial."""
    given = one.acceptance_histogram_by_draft_length or {}
    rows = {_place(name): dense(row) for name, row in given.items()}
    for k, row in rows.items():
        if len(row) > k + 1 or min(row, default=0) < 0:
            raise InvalidInput(f"{where} must have histograms of 0 to {k} tokens for drafts of {k}, but has {row}.")
        row.extend([0] * (k + 1 - len(row)))
    width = max([len(one.dense), *(len(row) for row in rows.values())])
    pooled = [sum(row[a] for row in rows.values() if a < len(row)) for a in range(width)]
    if rows and pooled != one.dense + [0] * (width - len(one.dense)):
        raise InvalidInput(
            f"{where} must have histograms by draft length that sum to the whole one, {one.dense}, but they sum to "
            f"{pooled}."
        )
    drafted = sum(k * sum(row) for k, row in rows.items())
    if rows and one.num_draft_tokens is not None and one.num_draft_tokens != drafted:
        raise InvalidInput(
            f"{where} must draft what its draft lengths sum to, {drafted}, but drafted {one.num_draft_tokens}."
        )
    return {k: row for k, row in rows.items() if k}


def _by_step(one: Request) -> Histograms:
    """The same from what every step drafted and took, where it is all there."""
    accepted, drafted = one.per_step_accepted or [], one.per_step_drafted or []
    if len(accepted) != len(drafted) or any(
        not 0 <= a <= k <= MOST_LENGTH for a, k in zip(accepted, drafted, strict=True)
    ):
        return {}
    rows: dict[int, list[int]] = {}
    for a, k in zip(accepted, drafted, strict=True):
        rows.setdefault(k, [0] * (k + 1))[a] += 1
    taken = [accepted.count(a) for a in range(len(one.dense))]
    if taken != one.dense or len(accepted) != sum(one.dense):
        return {}
    return {k: row for k, row in rows.items() if k}
