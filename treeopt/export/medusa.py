"""FasterDecoding/Medusa: a Python literal for ``medusa_generate(medusa_choices=...)``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from treeopt.plan import PlanEntry


def write(entry: PlanEntry, num_heads: int, num_layers: int) -> Mapping[str, str]:
    """``medusa_choices.py`` for medusa/model/medusa_choices.py, and the bare list as JSON."""
    choices = json.dumps(entry.medusa_choices)
    return {
        "medusa_choices.py": f"treeopt_{len(entry.medusa_choices)} = {choices}\n",
        "medusa_choices.json": f"{choices}\n",
    }
