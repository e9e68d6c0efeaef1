"""treeopt list: everything that has a name."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import TYPE_CHECKING

import click

from treeopt.cli.declared import command
from treeopt.cli.output import show_result

if TYPE_CHECKING:
    from treeopt.engines.base import ServingEngine


@command(name="list")
def list_(as_json: bool, topic: str | None = None, name: str | None = None) -> None:
    """List engines, shipped files, trees and all that has a name.

    TOPIC is calibrations, profiles, trees, drafters, engines, acceptance, objectives, layouts or figures.
    With the NAME of an engine everything that is known of it is shown.

    \b
    Example:
        treeopt list
        treeopt list engines
        treeopt list engines vllm
    """
    from treeopt.engines.registry import ENGINES
    from treeopt.files.shipped import shipped
    from treeopt.growth.objectives import OBJECTIVES
    from treeopt.records.drafters import DRAFTERS, LAYOUTS
    from treeopt.records.rules import MEANINGS, RULES
    from treeopt.report.figures import FIGURES
    from treeopt.trees.published import PUBLISHED_TREES

    found = {
        "calibrations": list(shipped("calibration")),
        "profiles": list(shipped("profiles")),
        "trees": list(PUBLISHED_TREES),
        "drafters": list(DRAFTERS),
        "engines": list(ENGINES),
        "acceptance": list(RULES),
        "objectives": list(OBJECTIVES),
        "layouts": list(LAYOUTS),
        "figures": list(FIGURES),
    }
    if name is not None and (topic != "engines" or name not in ENGINES):
        known = f"must be one of {', '.join(ENGINES)}" if topic == "engines" else "goes with engines alone"
        raise click.BadParameter(f"{known}, but got {name!r}.", param_hint="NAME")
    if topic is None:
        show_result(found, _lines({topic: ", ".join(names) or "none" for topic, names in found.items()}), as_json)
    elif topic == "engines":
        _show_engines(ENGINES if name is None else {name: ENGINES[name]}, name is not None, as_json)
    elif topic in found:
        drafters, layouts = ({name: row.about for name, row in rows.items()} for rows in (DRAFTERS, LAYOUTS))
        said = {"drafters": drafters, "layouts": layouts, "acceptance": MEANINGS}.get(topic, {})
        table = _lines({name: said[name] for name in found[topic]}) if said else "\n".join(found[topic])
        show_result({topic: found[topic]}, table, as_json)
    else:
        raise click.BadParameter(f"must be one of {', '.join(found)}, but got {topic!r}.", param_hint="TOPIC")


def _lines(said: Mapping[str, str]) -> str:
    """Names and what is said of each, within the width of the terminal."""
    width, indent = click.get_current_context().make_formatter().width, max(map(len, said)) + 2
    return "\n".join(
        fill(text, width, initial_indent=name.ljust(indent), subsequent_indent=" " * indent, break_on_hyphens=False)
        for name, text in said.items()
    )


def _show_engines(engines: Mapping[str, ServingEngine], in_full: bool, as_json: bool) -> None:
    from treeopt.report.engine_table import engine_table, method_table, records

    table = method_table(*engines.values()) if in_full else engine_table(engines)
    show_result({"engines": records(engines)}, table, as_json)
