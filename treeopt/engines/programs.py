"""Engines that are Python libraries: a generate.py, and the settings that it hands over as JSON.

A chain is written as keys of the settings; how guesses are made are lines and arguments of generate.py.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treeopt.engines import chains
from treeopt.engines.base import Request, Written

SCRIPT = "generate.py"
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Way:
    """How a kind of drafter is asked for.

    length, settings  the key of the chain's length, and what else the file has
    argument          what stands for the drafter on the command line of generate.py, perhaps by the request
    loading, options  lines of generate.py, and arguments of its call
    """

    length: str
    settings: Settings = field(default_factory=dict)
    argument: str | Callable[[Request], str] = ""
    loading: str = ""
    options: str = ""


@dataclass(frozen=True)
class Library:
    """Writes generate.py and its settings for a Python library; without drafting where no chain pays.

    together : the settings of sampling and of drafting as the file has them
    """

    engine: str
    script: str
    ways: Mapping[str, Way]
    notes: tuple[str, ...] = ()
    file: str = "generation_config.json"
    together: Callable[[Settings, Settings], Settings] = lambda sampling, drafting: {**sampling, **drafting}

    def __call__(self, request: Request) -> Written:
        way = self.ways[request.kind]
        length = chains.only_length(request, self.engine)
        drafting = {way.length: length, **way.settings} if length else {}
        way = way if length else Way(way.length)
        drafter = way.argument if isinstance(way.argument, str) else way.argument(request)
        arguments = " ".join(filter(None, ("MODEL", drafter, "PROMPT")))
        text = self.script.format(
            arguments=arguments,
            names="name, drafter, prompt" if drafter else "name, prompt",
            loading=way.loading,
            options=way.options,
        )
        command = f"python {SCRIPT} {arguments}"
        written = chains.launch(command, self.notes) if length else chains.plain(command)
        settings = json.dumps(self.together(sampling(request), drafting))
        return replace(written, files={**written.files, self.file: f"{settings}\n", SCRIPT: text})


def sampling(request: Request) -> Settings:
    """The keys by which a request asks for the plan's temperature; off is said too: models bring settings of their own."""
    if request.rule == "greedy":
        return {"do_sample": False}
    record = request.acceptance or {}
    temperature, top_p, top_k = (
        record.get(key) or off for key, off in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0))
    )
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
