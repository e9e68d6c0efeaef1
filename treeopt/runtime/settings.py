"""What a session is opened with: a model, its drafter, prompts, and a rule of acceptance. Importing it is light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treeopt import demo

RULE_SETTINGS = ("top_p", "top_k", "seed", "epsilon", "delta")


@dataclass(frozen=True)
class SessionSettings:
    """The settings of `open_session`, by the names of the commands' options; None is the option's default.

    model, revision, dtype, device, device_map, trust_remote_code : see `load_target`; "demo" is the embedded model
    drawn : conversations of the prompts that are held, `order.MOST_DRAWN` at least
    threads : that a processor computes with; None leaves them as they are
    drafter, draft_depth : see `open_drafter`
    prompts, column, group_by, responses, split, chat_template : see `load_prompts`; "demo", the default with the demo
        model, are pieces of the Python standard library
    seed : of the prompts' order and of rules that sample; with ``in_order`` prompts are taken as they stand
    acceptance, temperature, top_p, top_k, epsilon, delta : see `open_acceptance`; with ``responses`` the temperature
        is that of the given answers

    >>> SessionSettings(acceptance="sample", seed=1).rule()
    {'seed': 1}
    """

    model: str = demo.NAME
    drafter: str | None = None
    prompts: str | None = None
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    column: str | None = None
    group_by: str | None = None
    responses: str | None = None
    split: str | None = None
    chat_template: bool = True
    in_order: bool = False
    drawn: int = 0
    threads: int | None = None
    draft_depth: int | None = None
    acceptance: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    epsilon: float | None = None
    delta: float | None = None

    @property
    def order_seed(self) -> int | None:
        """That prompts are shuffled by; None where they are taken as they stand."""
        return None if self.in_order else self.seed or 0

    def rule(self) -> dict[str, Any]:
        """The settings of the rule that are given, without its temperature."""
        return {name: value for name in RULE_SETTINGS if (value := getattr(self, name)) is not None}


DEMO = SessionSettings()
