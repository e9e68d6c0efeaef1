"""What may have made the drafts that an engine counted, and what that means for a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter.

    ends_itself : whether it ends a draft where it is unsure or finds no more, so that its lengths are no choice of ours
    """

    note: str = ""
    ends_itself: bool = False


ENDS = (
    "Drafts of {} end where it finds no more or is unsure, and an end counts as a miss. So survival is right for the limit "
    "that was served, and an estimate for others. A plan counts all rows up to the limit, and fewer are verified."
)
UNDRAFTED = " Steps for which it found nothing are seldom counted by engines: real tokens per step are lower."
BLOCK = (
    "{} drafts a block in one pass: its time hardly depends on the length, which a profile of another drafter does not "
    "show. A block of another length is drafted otherwise."
)

CAPPED = (
    "DSpark's engines verify fewer guesses where it is unsure or the server is busy, and those left out count as misses: "
    "survival holds for the load that was measured. Turn adaptive verification off to measure the guesses themselves."
)

DRAFTERS = {
    **dict.fromkeys(
        ("medusa", "hydra", "hydra++", "eagle", "eagle3", "mtp", "draft-model", "early-exit", "redrafter"),
        DrafterKind(),
    ),
    "ngram": DrafterKind(ENDS.format("n-gram look-up") + UNDRAFTED, ends_itself=True),
    "suffix": DrafterKind(ENDS.format("suffix decoding") + UNDRAFTED, ends_itself=True),
    "dflash": DrafterKind(BLOCK.format("DFlash")),
    "dspark": DrafterKind(CAPPED, ends_itself=True),
}
