"""The OpenAPI 3.1 document of ``/openapi.json``."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from runtime.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from runtime.server.openapi_answers import SCHEMAS, ref
from runtime.server.settings import ServerSettings

BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_TEMPLATE = "#/components/schemas/{name}"
_GENERATE_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
_READ_ERRORS = (400, 401, 404, 500)
_HEALTH_ERRORS = (400, 503)
_REASONS = {
    400: "The request asks for what is not allowed.",
    401: "The key is missing or wrong.",
    404: "There is no such model or route.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8.",
    429: "The queue is full; see Retry-After.",
    500: "The server failed.",
    503: "Loading, shutting down, or the engine is not there; see Retry-After.",
    504: "The answer was not done in time.",
}


def document(settings: ServerSettings, version: str) -> dict[str, Any]:
    """What the server takes and answers.

    Args:
        settings: Decide whether keys are asked for and whether there are admin routes.
        version: Of the program.
    """
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Serving Twin",
            "version": version,
            "description": "OpenAI-compatible serving of one model. Every answer that is not a"
            " success is an Error object; every answer carries X-Request-Id.",
        },
        "servers": [{"url": settings.root_path or "/"}],
        "paths": _paths(bool(settings.admin_key)),
        "components": {
            "schemas": SCHEMAS | _request_schemas(),
            "responses": {str(status): _error(text) for status, text in _REASONS.items()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "adminKey": {"type": "http", "scheme": "bearer"},
            },
        },
    }
    if settings.api_keys:
        found["security"] = [{"key": []}]
    return found


@functools.cache
def _request_schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(BODIES, ref_template=_TEMPLATE)
    bias = schemas["CompletionBody"]["properties"]["logit_bias"]["anyOf"][0]
    for name in ("CompletionBody", "ChatBody"):
        schemas[name]["properties"]["logit_bias"] = {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": bias["additionalProperties"],
                },
                {"type": "null"},
            ]
        }
    return schemas


def _paths(has_admin: bool) -> dict[str, Any]:
    paths = {
        "/v1/completions": _post("Continue prompts", "CompletionBody", "Completion", stream=True),
        "/v1/chat/completions": _post("Answer a chat", "ChatBody", "ChatCompletion", stream=True),
        "/tokenize": _post("Token ids of a prompt or a chat", "TokenizeBody", "Tokens"),
        "/detokenize": _post("Text of token ids", "DetokenizeBody", "Text"),
        "/v1/models": _get("Names of the model", "ModelList"),
        "/v1/models/{model}": _get("One name of the model", "Model")
        | {
            "parameters": [
                {
                    "name": "model",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "minLength": 1},
                }
            ]
        },
        "/version": _get("Version of the program", "Version"),
        "/health": _get("Alive", "Status", _HEALTH_ERRORS, is_public=True),
        "/ping": _get("Alive", "Status", _HEALTH_ERRORS, is_public=True),
        "/ready": _get("Requests may be sent", "Status", _HEALTH_ERRORS, is_public=True),
        "/metrics": {
            "get": {
                "summary": "Prometheus metrics",
                "responses": {
                    "200": {
                        "description": "Text form",
                        "content": {"text/plain": {"schema": {"type": "string"}}},
                    }
                }
                | _errors(_READ_ERRORS),
            }
        },
        "/openapi.json": {
            "get": {
                "summary": "This document",
                "responses": {"200": _json("OpenAPI 3.1", {"type": "object"})}
                | _errors(_READ_ERRORS),
            }
        },
    }
    if has_admin:
        for command in ("reset_prefix_cache", "write_decisions"):
            paths[f"/admin/{command}"] = {
                "post": {
                    "summary": command.replace("_", " ").capitalize(),
                    "security": [{"adminKey": []}],
                    "responses": {"200": _json("Done", ref("Status"))}
                    | _errors((400, 401, 500, 503, 504)),
                }
            }
    return paths


def _post(summary: str, body: str, answer: str, *, stream: bool = False) -> dict[str, Any]:
    success = _json("The answer", ref(answer))
    if stream:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "post": {
            "summary": summary,
            "description": "The header X-Request-Timeout holds the seconds until the answer must be"
            " done, above 0; else 504.",
            "parameters": [
                {"name": "X-Request-Id", "in": "header", "schema": _REQUEST_ID},
            ],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": ref(body)}},
            },
            "responses": {"200": success} | _errors(_GENERATE_ERRORS),
        }
    }


_REQUEST_ID = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"}


def _get(
    summary: str, answer: str, errors: tuple[int, ...] = _READ_ERRORS, *, is_public: bool = False
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": _json(summary, ref(answer))} | _errors(errors),
    }
    if is_public:
        operation["security"] = []
    return {"get": operation}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _error(description: str) -> dict[str, Any]:
    return _json(description, ref("Error"))


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
