"""The published description of events, for tests to hold what is written against it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fastjsonschema

import deadpool_megatron

SCHEMA: dict[str, Any] = json.loads(
    (Path(deadpool_megatron.__file__).parent / "events.schema.json").read_text()
)
_check = fastjsonschema.compile(SCHEMA)


def check_event(values: Mapping[str, Any]) -> None:
    """Fail for an event, as it stands in a file, that the schema does not know like this."""
    try:
        _check(values)
    except fastjsonschema.JsonSchemaValueException as error:
        raise AssertionError(f"{error.message}: {values}") from error
