"""JSON schemas of files and of what commands print, made of the types that they are read as.

The text of a key is that of its field: in the docstring of the class the line ``name : text``, or the docstring of a property.
"""

import re
from dataclasses import is_dataclass
from inspect import cleandoc
from typing import Any, get_type_hints

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from treeopt.arms.arm import Arms
from treeopt.files.fields import adapter
from treeopt.files.storage import keys_of, schema
from treeopt.growth.score import Score
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import CalibrationFile
from treeopt.records.contender import Contender
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, ProfileInfo, StepTiming

KINDS: dict[str, Any] = {
    "calibration": CalibrationFile,
    "profile": LatencyProfile,
    "plan": Plan,
    "bench": Benchmark,
    "arms": Arms,
    "score": Score,
}
NUMBER = {"type": "number"}
PARTS = {
    "type": "object",
    "properties": dict.fromkeys(("value", "stderr", "low", "high"), NUMBER),
    "required": ["value"],
}
ESTIMATE = {
    "description": "A number with its standard error and the ends of its 95 % interval, as far as they are known.",
    "anyOf": [PARTS, NUMBER],
}
DRAFT = {
    "rows": {"type": "integer", "minimum": 1, "description": "Rows verified per sequence and step, root included."},
    "depth": {"type": "integer", "minimum": 0, "description": "Guesses that a step accepts at most."},
    "medusa_choices": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "description": "A fixed tree: paths of ranks, without the root. Rows and depth follow from it.",
    },
    "levels": {"type": "integer", "description": "Levels of a dynamic tree."},
    "topk": {
        "type": "integer",
        "description": "Nodes that a dynamic tree expands on each level, and children of each.",
    },
    "width": {"type": "integer", "description": "Ranks of each depth that a tree over marginals tries."},
    "copies": {"type": "string", "description": "An engine's name of its drafter that copies text."},
    "settings": {"type": "object", "description": "Options of that drafter, but for the engine's defaults."},
}
FIELD = re.compile(r"^(\w[\w, ]*?) +: (.*(?:\n +\S.*)*)", re.MULTILINE)
UNSAID = ("title", "default", "maximum")  # by the parts of a schema
TYPES: dict[str, dict[str, Any]] = {"estimate": PARTS, "int": {"type": "integer"}, "float": NUMBER}


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a kind of document."""
    made = _named(adapter(KINDS[kind]).json_schema(schema_generator=Described))
    if made["properties"].pop("info", None):
        info = _named(adapter(ProfileInfo).json_schema(schema_generator=Described))
        made["properties"] |= info["properties"]
        made["$defs"] |= info["$defs"]
    if made["properties"].pop("given", None):
        figure = made["$defs"]["Figure"]
        made["properties"] = figure["properties"] | made["properties"]
        made["required"] = [*figure["required"], *(name for name in made["required"] if name != "given")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": made["description"],
        "type": "object",
        "properties": {"schema": {"const": schema(kind)}, **made["properties"]},
        "required": ["schema", *made["required"]],
        "$defs": {**made.get("$defs", {}), "Estimate": ESTIMATE},
    }


class Described(GenerateJsonSchema):
    """Puts the texts of fields into a schema, the keys of a draft in its place, and keys that follow from others."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return described(super().dataclass_schema(schema), schema["cls"])

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        made = super().typed_dict_schema(schema)
        return described(made, schema["cls"]) if "cls" in schema else made


def described(made: JsonSchemaValue, cls: Any) -> JsonSchemaValue:
    """A schema of a class with its texts, in the order of the file."""
    texts = texts_of(cls)
    properties: dict[str, Any] = {}
    for name in keys_of(cls) if is_dataclass(cls) else made["properties"]:
        if name == "draft":
            properties |= DRAFT
        elif name in made["properties"]:
            part = made["properties"][name]
            properties[name] = {**part, "description": texts[name]} if name in texts else part
        else:
            properties[name] = follows(getattr(cls, name))
    if cls is Contender:
        properties["speedup"] = {
            **PARTS,
            "description": "Follows. Over plain decoding, or its faster kind; null where nothing was timed.",
        }
    left_out = ("size", "depth") if cls is StepTiming else ("draft",)
    required = [name for name in made.get("required", []) if name not in left_out]
    return {"type": "object", "description": first_line(cls), "properties": properties, "required": required}


def follows(attribute: Any) -> JsonSchemaValue:
    """The schema of a key that a property gives."""
    function = getattr(attribute, "fget", None) or attribute.func
    kind = str(get_type_hints(function)["return"]).lower()
    known: dict[str, Any] = next(part for name, part in TYPES.items() if name in kind)
    return {**known, "description": f"Follows. {first_line(function).replace('None', 'Left out')}"}


def first_line(thing: Any) -> str:
    return cleandoc(thing.__doc__ or "").partition("\n")[0]


def texts_of(cls: Any) -> dict[str, str]:
    """Field to its text, by the lines ``name : text`` in the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    for base in getattr(cls, "__orig_bases__", cls.__bases__):
        texts |= texts_of(base) if hasattr(base, "__annotations__") else {}
    for names, text in FIELD.findall(cleandoc(cls.__doc__ or "")):
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()).replace("None", "null"))
    return texts


def _named(part: Any) -> Any:
    """The schema without titles, and with a reference wherever an estimate stands in full."""
    if isinstance(part, list):
        return [_named(item) for item in part]
    if not isinstance(part, dict):
        return part
    if [*part.get("properties", ())] == [*PARTS["properties"]]:
        return {"$ref": "#/$defs/Estimate", **{key: part[key] for key in part if key == "description"}}
    return {key: _named(value) for key, value in part.items() if key not in UNSAID or isinstance(value, dict)}
