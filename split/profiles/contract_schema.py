"""JSON Schema (2020-12) of `contract.yaml`, for editors and for those who check contracts without this program.

It is made of the structs that read a contract: their types, bounds and defaults, and what their docstrings say; the
rules that the structs check when they are built stand here once more. What the language cannot say is left to the
loader: names listed twice, a crop larger than its resize, pictures that do not fit their input's shape.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from split.profiles.contract import ACCELERATOR, Contract
from split.profiles.image_spec import SIDE_MAX
from split.tensor import NUMPY_DTYPES

SCHEMA_ID: Final = "urn:isthmus:contract"

Schema = dict[str, Any]


def _given(key: str, rule: Schema) -> Schema:
    """`key` is there and is so."""
    return {"required": [key], "properties": {key: rule}}


def _where_given(**rules: Schema) -> Schema:
    """Each of these is so, or is not there."""
    return {"properties": rules}


_ABOVE_0: Final[Schema] = {"exclusiveMinimum": 0}
_ONE: Final[Schema] = {"minItems": 1, "maxItems": 1}
_THREE: Final[Schema] = {"minItems": 3, "maxItems": 3}
_SIDE: Final[Schema] = {"minimum": 1, "maximum": SIDE_MAX}
_NAMED: Final[Schema] = {"minLength": 1, "prefixItems": [{"minLength": 1}]}
_RANK_4: Final[Schema] = {"minItems": 4, "maxItems": 4}

_RULES: Final[dict[str, Schema]] = {
    "Resource": _where_given(accelerators={"minItems": 1, "items": {"pattern": f"^{ACCELERATOR.pattern}$"}}),
    "Weights": {
        "anyOf": [_where_given(latency=_ABOVE_0), *(_given(key, _ABOVE_0) for key in ("throughput", "energy", "cost"))]
    },
    "Fallback": {"if": _given("strategy", {"const": "shadow"}), "then": _where_given(agreement_min=_ABOVE_0)},
    "InputContract": {
        **_where_given(dtype={"enum": [*NUMPY_DTYPES, None]}, shape={"items": {"not": {"const": 0}}}),
        "if": _given("encoded", {"type": "object"}),
        "then": _where_given(dtype={"enum": ["FP32", None]}, shape=_RANK_4),
    },
    "Data": _where_given(codecs={"minItems": 1, "uniqueItems": True}),
    "Fidelity": {
        "if": _given("measure", {"const": "boxes"}),
        "then": _given("boxes", {"type": "object"}),
        "else": _where_given(boxes={"type": "null"}),
    },
    "Head": _where_given(box=_NAMED, score=_NAMED, objectness=_NAMED, label=_NAMED),
    "Boxes": _where_given(heads={"minItems": 1}),
    "ImageSpec": {
        **_where_given(resize=_SIDE, crop=_SIDE, std={"items": _ABOVE_0}),
        "anyOf": [
            _where_given(mean=_THREE, std=_THREE),
            {"required": ["mean", "std"], **_where_given(mean=_ONE, std=_ONE)},
        ],
    },
}
"""By struct; each holds beside what its fields' types say."""


def contract_schema() -> Schema:
    """The schema as data: every key with its meaning, its default, its bounds; no other keys."""
    made: Schema = msgspec.json.schema(Contract)
    definitions: dict[str, Schema] = made["$defs"]
    for struct in _structs(msgspec.inspect.type_info(Contract)):
        definition = definitions[struct.__name__]
        for key, text in field_docs(struct).items():
            definition["properties"][key]["description"] = text
        if rules := _RULES.get(struct.__name__):
            definition["allOf"] = [rules]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "contract.yaml",
        "description": "What a model promises and demands.",
        **made,
    }


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field, as YAML has it → the docstring below it in the source, on one line."""
    written = {field.name: field.encode_name for field in msgspec.structs.fields(struct)}
    (found,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(found, ast.ClassDef), found
    docs: dict[str, str] = {}
    for statement, below in zip(found.body, found.body[1:], strict=False):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[written[name]] = " ".join(text.split())
    return docs


def _structs(info: msgspec.inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """This one and every one below it."""
    match info:
        case msgspec.inspect.StructType():
            yield info.cls
            for field in info.fields:
                yield from _structs(field.type)
        case msgspec.inspect.UnionType():
            for member in info.types:
                yield from _structs(member)
        case msgspec.inspect.VarTupleType():
            yield from _structs(info.item_type)
