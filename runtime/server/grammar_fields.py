"""The fields that ask for an answer of a certain form, all as one ``Grammar``."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from runtime.engine.frames import Grammar
from runtime.server.bodies import GenerationBody, ResponseFormat, StructuredOutputs
from runtime.server.errors import invalid

MAX_GRAMMAR_BYTES = 64 * 1024
"""As the engine has it; told here, so that nothing larger is compiled or sent."""


def grammar_of(body: GenerationBody) -> tuple[str, Grammar] | None:
    """What the answer must look like, after the field that says so; None: anything.

    Raises:
        ApiError: 400, if two fields ask for it, or a schema is none.
    """
    found: list[tuple[str, Grammar]] = []
    if body.response_format is not None:
        found += _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        found += _of_structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        found.append(("guided_json", _schema(body.guided_json, "guided_json")))
    if body.guided_regex is not None:
        found.append(("guided_regex", Grammar("regex", body.guided_regex)))
    if body.guided_choice is not None:
        found.append(("guided_choice", _choice(body.guided_choice, "guided_choice")))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise invalid(f"Only one form can be asked for, found {names}.", found[1][0])
    if not found:
        return None
    name, grammar = found[0]
    num_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise invalid(f"{name}: {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES}.", name)
    return name, grammar


def _of_response_format(form: ResponseFormat) -> list[tuple[str, Grammar]]:
    if form.type == "text":
        return []
    if form.type == "json_object":
        return [("response_format", Grammar("json_object"))]
    if form.json_schema is None or form.json_schema.schema is None:
        path = "response_format.json_schema.schema"
        raise invalid(f"{path}: required for type json_schema.", path, "missing_field")
    return [("response_format", _schema(form.json_schema.schema, "response_format"))]


def _of_structured_outputs(outputs: StructuredOutputs) -> list[tuple[str, Grammar]]:
    found: list[tuple[str, Grammar]] = []
    if outputs.json is not None:
        found.append(("structured_outputs.json", _schema(outputs.json, "structured_outputs.json")))
    if outputs.json_object:
        found.append(("structured_outputs.json_object", Grammar("json_object")))
    if outputs.regex is not None:
        found.append(("structured_outputs.regex", Grammar("regex", outputs.regex)))
    if outputs.choice is not None:
        param = "structured_outputs.choice"
        found.append((param, _choice(outputs.choice, param)))
    if outputs.grammar is not None:
        found.append(("structured_outputs.grammar", Grammar("lark", outputs.grammar)))
    return found


def _choice(choices: list[str], param: str) -> Grammar:
    if not choices or not all(choices):
        raise invalid(f"{param}: at least one text, none of them empty.", param, "invalid_grammar")
    return Grammar("choice", json.dumps(choices))


def _schema(schema: dict[str, Any] | str, param: str) -> Grammar:
    if isinstance(schema, str):
        try:
            parsed = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{param}: not JSON: {error}.", param) from None
        if not isinstance(parsed, dict):
            raise invalid(f"{param}: a JSON schema is an object.", param)
        return Grammar("json_schema", schema)
    return Grammar("json_schema", json.dumps(schema))


def check_grammar(grammar: Grammar, param: str) -> None:
    """Whether the grammar can be used at all; may take a while, so not on the event loop.

    Args:
        grammar: Of the answer.
        param: The field that it came in.

    Raises:
        ApiError: 400, in the words of the grammar's compiler.
    """
    try:
        import llguidance
    except ImportError:
        return
    matcher = llguidance.LLMatcher
    try:
        match grammar.kind:
            case "json_object":
                return
            case "json_schema":
                compiled = matcher.grammar_from_json_schema(grammar.text)
            case "regex":
                compiled = matcher.grammar_from_regex(grammar.text)
            case "choice":
                return
            case "lark":
                compiled = matcher.grammar_from_lark(grammar.text)
        problem = matcher.validate_grammar(compiled)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise invalid(
            f"{param}: this form of the answer cannot be compiled: {problem[:500]}",
            param,
            "invalid_grammar",
        )
