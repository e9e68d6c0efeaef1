"""All that has a name: what treeopt list shows, and what the shell completes an option with.

An option of files takes them beside the names: the shell looks for files where no name fits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import click
from click.shell_completion import CompletionItem

# The topics whose names complete a parameter; what is no name of theirs is a file, if it may be.
TOPICS = {
    "calibration": "calibrations", "profile": "profiles", "tree": "trees", "trees": "trees", "drafter": "drafters",
    "acceptance": "acceptance", "objective": "objectives", "layout": "layouts", "names": "figures", "name": "engines",
}  # fmt: skip
FILES = ("calibration", "profile", "tree", "trees", "drafter", "model", "prompts", "sources", "from_csv")
FOLDERS = ("run", "runs")
RUNTIMES = ("profile", "bench")  # commands whose --engine is a runtime on this machine


def names() -> dict[str, list[str]]:
    """Topic -> the names of what there is."""
    from treeopt.engines.registry import ENGINES
    from treeopt.files.places import shipped
    from treeopt.growth.objectives import OBJECTIVES
    from treeopt.records.drafters import DRAFTERS, LAYOUTS
    from treeopt.records.rules import RULES
    from treeopt.report.figures import FIGURES
    from treeopt.trees.published import PUBLISHED_TREES

    found: dict[str, Collection[str]] = {
        "calibrations": shipped("calibration"),
        "profiles": shipped("profiles"),
        "trees": PUBLISHED_TREES,
        "drafters": DRAFTERS,
        "engines": ENGINES,
        "acceptance": RULES,
        "objectives": OBJECTIVES,
        "layouts": LAYOUTS,
        "figures": FIGURES,
    }
    return {topic: list(of) for topic, of in found.items()}


def completion(parameter: str) -> dict[str, Any]:
    """The option of click that has the shell complete a parameter; none where the type of its values does so."""
    known = parameter in (*TOPICS, *FILES, *FOLDERS, "engine", "kind", "topic")
    return {"shell_complete": _complete} if known else {}


def _complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """What a word that was begun may become: files first, since bash forgets what came before them."""
    from treeopt.engines.imports import KINDS
    from treeopt.records.rundir import ENGINES

    if isinstance(parameter.type, click.Choice):
        return parameter.type.shell_complete(context, parameter, begun)
    name, known = str(parameter.name), names()
    engines = ENGINES if context.info_name in RUNTIMES else known["engines"]
    of_topic = known.get(TOPICS.get(name, ""), [])
    fitting: Collection[str] = {"engine": engines, "kind": KINDS, "topic": known}.get(name, of_topic)
    kind = [CompletionItem(begun, type="dir" if name in FOLDERS else "file")] if name in (*FILES, *FOLDERS) else []
    return [*kind, *(CompletionItem(one) for one in fitting if one.startswith(begun))]
