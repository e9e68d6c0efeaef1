"""treeopt list: everything that has a name."""

from __future__ import annotations

import click

from treeopt.cli.options import AS_JSON, show_result

DRAFTERS = {
    "medusa": "the demo model's Medusa-1 heads; of your own: their folder, file or hub id",
    "hydra": "the demo model's Hydra heads; of your own: as above",
    "draft": "the demo model's draft model; of your own: a folder of a small causal LM with the same tokenizer",
    "ngram": "what came in the text before behind its last tokens; no weights",
    "early-exit": "the target's own first layers, early-exit:LAYER; no weights, and no engine that runs it",
}


@click.command("list")
@click.argument("topic", required=False, metavar="[TOPIC]")
@AS_JSON
def list_(topic: str | None, as_json: bool) -> None:
    """List shipped calibrations and profiles, the demo's drafters, published trees, engines, acceptance rules, objectives,
    layouts and figures.

    TOPIC is one of them. For engines there is a table: what each can take, where it goes, which releases.

    \b
    Example:
        treeopt list
        treeopt list engines
    """
    from treeopt import demo
    from treeopt.export import listing
    from treeopt.export.table import ENGINES
    from treeopt.files.shipped import LAYOUTS, shipped
    from treeopt.growth.objectives import OBJECTIVES
    from treeopt.records.rules import MEANINGS, RULES
    from treeopt.report.figures import FIGURES
    from treeopt.trees.published import PUBLISHED_TREES

    found = {
        "calibrations": list(shipped("calibration")),
        "profiles": list(shipped("profiles")),
        "trees": list(PUBLISHED_TREES),
        "drafters": [*demo.DRAFTERS, "ngram", "early-exit"],
        "engines": list(ENGINES),
        "acceptance": list(RULES),
        "objectives": list(OBJECTIVES),
        "layouts": list(LAYOUTS),
        "figures": list(FIGURES),
    }
    if topic is None:
        show_result(found, "\n".join(f"{k}: {', '.join(v) or 'none'}" for k, v in found.items()), as_json)
    elif topic == "engines":
        show_result({"engines": listing.records(ENGINES)}, listing.table(ENGINES), as_json)
    elif topic in found:
        said = {"drafters": DRAFTERS, "acceptance": MEANINGS}.get(topic, {})
        lines = [f"{name:<12}{said[name]}" if said else name for name in found[topic]]
        show_result({topic: found[topic]}, "\n".join(lines), as_json)
    else:
        raise click.BadParameter(f"must be one of {', '.join(found)}, but got {topic!r}.", param_hint="TOPIC")
