"""Chains of a draft model under p/q rejection: the tokens that they bring by the acceptance rate.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023. The rate is
taken as the same at every token, independently of the others; real texts have easy and hard places, so decoding
differs somewhat.

accept : P(a drafted token is accepted | those before it were): the overlap sum min(p, q) of the two models' next-token
         distributions, averaged over the places of a text (their alpha)
chain  : K, tokens drafted in every step (their gamma)
"""

from __future__ import annotations

from treeopt.errors import InvalidInput


def chain_tokens_per_step(accept: float, chain: int) -> float:
    """Expected tokens per step, (1 - accept^(K+1)) / (1 - accept): their equation 1.

    >>> chain_tokens_per_step(0.5, 2), chain_tokens_per_step(1.0, 4)
    (1.75, 5.0)
    """
    if not 0 <= accept <= 1:
        raise InvalidInput(f"An acceptance rate must be between 0 and 1, but got {accept}.")
    if chain < 0:
        raise InvalidInput(f"A chain must have at least 0 tokens, but got {chain}.")
    return float(sum(accept**k for k in range(chain + 1)))  # holds where accept is 1, too
