"""The name of an answer's schema changes nothing, so it may be any text."""

import pytest

from gateway.http.openai.structured import JsonSchema
from gateway.http.responses.create_request import JsonSchemaText


@pytest.mark.parametrize("name", ["Page[Item]", "a.b c", "Seite für Käufe", "x" * 100])
def test_a_schema_may_have_any_name(name: str) -> None:
    schema = {"type": "object"}
    assert JsonSchema.model_validate({"name": name, "schema": schema}).schema_ == schema
    text = JsonSchemaText.model_validate({"type": "json_schema", "name": name, "schema": schema})
    assert (text.name, text.schema_) == (name, schema)
