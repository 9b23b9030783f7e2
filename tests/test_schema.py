"""The JSON Schemas in docs/schema: current, and true of the files that are written."""

from __future__ import annotations

import importlib.util
import json

import jsonschema
import pytest

from helpers_cli import ROOT

FOLDER = ROOT / "docs" / "schema"
FIXTURES = ROOT / "tests" / "fixtures" / "results"
SCHEMAS = {path.stem: json.loads(path.read_text("utf-8")) for path in FOLDER.glob("*.json")}
#: That each schema is one is a test of its own.
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
DOCUMENTS = {
    path.stem: document
    for path in sorted(FIXTURES.glob("*.json"))
    if (schema := SCHEMAS.get((document := json.loads(path.read_text("utf-8")))["format"]))
    and schema["properties"]["version"]["const"] == document["version"]
}


def test_the_published_schemas_are_those_of_the_types() -> None:
    spec = importlib.util.spec_from_file_location("make_schemas", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = json.loads(json.dumps(dict(module.schemas())))
    assert made == SCHEMAS, "run: python docs/schema/make.py"
    with pytest.raises(LookupError, match="no unit of 'furlongs'"):
        module.unit("furlongs")


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_is_a_schema_and_numbers_have_units(name: str) -> None:
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in (schema, *schema["$defs"].values()):
        for key, value in part.get("properties", {}).items():
            assert value.get("type") not in ("number", "integer") or value["unit"], key


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_result_file_is_what_its_schema_says(name: str) -> None:
    of_its_format = VALIDATORS[DOCUMENTS[name]["format"]]
    of_its_format.validate(DOCUMENTS[name])
    with pytest.raises(jsonschema.ValidationError, match="required"):
        of_its_format.validate({"format": DOCUMENTS[name]["format"]})


def test_each_kind_of_result_was_compared() -> None:
    """But for one that only a machine with a GPU writes, and has no fixture."""
    seen = {document["format"] for document in DOCUMENTS.values()}
    assert set(SCHEMAS) - seen == {"trainfit-verification"}
