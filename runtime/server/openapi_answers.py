"""OpenAPI schemas of what the server answers; those of requests are made from their records."""

from __future__ import annotations

from typing import Any

INTEGER: dict[str, Any] = {"type": "integer"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
STRING: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "number"}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: dict[str, Any]) -> dict[str, Any]:
    """A list of them."""
    return {"type": "array", "items": items}


def ref(name: str) -> dict[str, Any]:
    """A named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
    }


_FINISH_REASON = nullable({"enum": ["stop", "length"]})
_STOP_REASON = {"anyOf": [STRING, INTEGER, {"type": "null"}]}
_TOKEN_LOGPROB = {"token": STRING, "logprob": NUMBER, "bytes": nullable(array(INTEGER))}
_ANSWER = {"id": STRING, "created": INTEGER, "model": STRING}

SCHEMAS: dict[str, Any] = {
    "Error": record(
        {
            "error": record(
                {
                    "message": STRING,
                    "type": STRING,
                    "param": nullable(STRING),
                    "code": nullable(STRING),
                }
            )
        }
    ),
    "Usage": record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
        }
    ),
    "PromptLogprobs": array(
        nullable(
            {
                "type": "object",
                "additionalProperties": record(
                    {"logprob": NUMBER, "rank": INTEGER, "decoded_token": STRING}
                ),
            }
        )
    ),
    "CompletionLogprobs": record(
        {
            "tokens": array(STRING),
            "token_logprobs": array(nullable(NUMBER)),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": NUMBER})),
            "text_offset": array(COUNT),
        }
    ),
    "CompletionChoice": record(
        {
            "index": COUNT,
            "text": STRING,
            "logprobs": nullable(ref("CompletionLogprobs")),
            "finish_reason": _FINISH_REASON,
        },
        {
            "stop_reason": _STOP_REASON,
            "prompt_logprobs": ref("PromptLogprobs"),
            "token_ids": array(INTEGER),
            "prompt_token_ids": array(INTEGER),
        },
    ),
    "Completion": record(
        {
            **_ANSWER,
            "object": {"const": "text_completion"},
            "choices": array(ref("CompletionChoice")),
            "usage": ref("Usage"),
        }
    ),
    "ChatLogprobs": record(
        {
            "content": array(
                record({**_TOKEN_LOGPROB, "top_logprobs": array(record(_TOKEN_LOGPROB))})
            )
        }
    ),
    "ChatChoice": record(
        {
            "index": COUNT,
            "message": record({"role": {"const": "assistant"}, "content": STRING}),
            "logprobs": nullable(ref("ChatLogprobs")),
            "finish_reason": _FINISH_REASON,
        },
        {"stop_reason": _STOP_REASON, "token_ids": array(INTEGER)},
    ),
    "ChatCompletion": record(
        {
            **_ANSWER,
            "object": {"const": "chat.completion"},
            "choices": array(ref("ChatChoice")),
            "usage": ref("Usage"),
        },
        {"prompt_logprobs": ref("PromptLogprobs"), "prompt_token_ids": array(INTEGER)},
    ),
    "Model": record(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": {"type": "null"},
            "max_model_len": nullable(COUNT),
            "vocab_size": nullable(COUNT),
        }
    ),
    "ModelList": record({"object": {"const": "list"}, "data": array(ref("Model"))}),
    "Tokens": record(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": array(INTEGER),
            "token_strs": nullable(array(STRING)),
        }
    ),
    "Text": record({"prompt": STRING}),
    "Status": record({"status": STRING}),
    "Version": record({"version": STRING}),
}
