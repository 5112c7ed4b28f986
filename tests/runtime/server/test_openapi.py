"""The OpenAPI document describes what the server does: schemathesis asks a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from runtime.server.bodies import ChatBody, CompletionBody
from runtime.server.openapi import document
from runtime.server.settings import ServerSettings
from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.conftest import TEMPLATE
from tests.runtime.server.live import live_server
from tests.runtime.server.scripted import ScriptedEngine

PATHS = sorted(document(ServerSettings(admin_key="root"), "1")["paths"])
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
ASK = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def url(text: TextTokenizer) -> Iterator[str]:
    template = ChatTemplate({"default": TEMPLATE}, {})
    with live_server(
        lambda: ScriptedEngine(lambda _: [97, 98, 99]), text, template, admin_key="root"
    ) as live:
        yield live.url


@pytest.mark.parametrize("path", PATHS)
def test_whatever_is_sent_the_answer_is_as_described(url: str, path: str) -> None:
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    (operation,) = [found.ok() for found in schema.include(path=path).get_all_operations()]
    statuses = set()
    headers = {"authorization": "Bearer root"} if path.startswith("/admin/") else {}

    @ASK
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        response = case.call(headers=headers)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    assert statuses & {200, 400, 404}


def test_every_field_of_a_body_is_in_the_document_with_its_range() -> None:
    schemas = document(ServerSettings(), "1")["components"]["schemas"]
    for body in (CompletionBody, ChatBody):
        assert set(schemas[body.__name__]["properties"]) == set(body.__struct_fields__)
    temperature = schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert schemas["ChatBody"]["required"] == ["messages"]


def test_admin_routes_and_keys_are_described_only_where_they_are() -> None:
    plain = document(ServerSettings(), "1")
    assert "security" not in plain and not any("admin" in path for path in plain["paths"])
    guarded = document(ServerSettings(api_keys=("a",), admin_key="b"), "1")
    assert guarded["security"] == [{"key": []}]
    assert guarded["paths"]["/health"]["get"]["security"] == []
    assert guarded["paths"]["/admin/write_decisions"]["post"]["security"] == [{"adminKey": []}]
