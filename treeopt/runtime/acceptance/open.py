"""Make the acceptance rule that a user names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.records.rules import OPTIONS, RULES
from treeopt.runtime.acceptance.greedy import Acceptance, Greedy
from treeopt.runtime.acceptance.sampling import Sampling
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.target import Target

if TYPE_CHECKING:
    from treeopt.runtime.acceptance.rejection import Rejection, SampledChain


def open_acceptance(
    name: str | None, temperature: float | None = None, *, given: bool = False, **options: Any
) -> Acceptance:
    """The rule called ``name`` (one of `RULES`), with those of its options that were given.

    Rejection needs the draft model too: here it is sampling, and `by_rejection` makes the two of them.

    temperature : of sampling (default 1.0) and of typical acceptance (default 0.7); with ``given`` answers and no
                  name it is what they were sampled at, so that their rule is sample-then-match

    >>> open_acceptance(None).record["rule"]
    'greedy'
    """
    if name is None and temperature and not given:
        raise InvalidInput(
            f"`temperature={temperature}` needs a rule that samples: add `acceptance=sample` (lossless) or "
            "`acceptance=typical`."
        )
    name = name or ("sample" if temperature else "greedy")
    if name not in RULES:
        raise InvalidInput(f"`acceptance` must be one of {', '.join(RULES)}, but got {name!r}.")
    strange = sorted(options.keys() - {*OPTIONS[name], "seed"})  # a seed is also that of the prompts' order
    if strange:
        raise InvalidInput(f"`{strange[0]}` is not for `acceptance={name}`: leave it out.")
    if name == "greedy":
        if temperature:
            raise InvalidInput(f"`acceptance=greedy` has no temperature: leave `temperature={temperature}` out.")
        return Greedy()
    options = {option: value for option, value in options.items() if option in OPTIONS[name]}
    if temperature is not None:
        options["temperature"] = temperature
    if name == "typical":
        from treeopt.runtime.acceptance.typical import Typical

        return Typical(**options)
    return Sampling(**{"temperature": 1.0, **options})


def by_rejection(drafter: Drafter, target: Target, sampling: Acceptance) -> tuple[SampledChain, Rejection]:
    """A draft model that draws its chains, and the rule that accepts them; InvalidInput for other drafters."""
    from treeopt.runtime.acceptance.rejection import Rejection, SampledChain
    from treeopt.runtime.drafters.draft_model import DraftModel

    if not isinstance(drafter, DraftModel):
        raise InvalidInput(
            "`acceptance=reject` needs a draft model, `drafter=MODEL` or early-exit, but the drafter is of the kind "
            f"{drafter.kind}: use `acceptance=sample`."
        )
    assert isinstance(sampling, Sampling), "rejection samples"
    chains = SampledChain(drafter, target, sampling)
    return chains, Rejection(chains)
