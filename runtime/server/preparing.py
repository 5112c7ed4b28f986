"""From a request's body to a job: decoding, checking, rendering, tokenizing; all of it blocking."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from runtime.server.bodies import ChatBody, CompletionBody, GenerationBody
from runtime.server.body_reading import decode_body
from runtime.server.chat_writer import ChatWriter
from runtime.server.completion_writer import CompletionWriter
from runtime.server.errors import ApiError, invalid
from runtime.server.grammar_fields import check_grammar, grammar_of
from runtime.server.job import Job, Prompt
from runtime.server.prompts import PromptForm, Tokenizing, prompt_forms
from runtime.server.sampling_fields import sampling_of, stops_of
from runtime.server.settings import ServerSettings
from runtime.server.writer import Writer

_COMPLETION = msgspec.json.Decoder(CompletionBody)
_CHAT = msgspec.json.Decoder(ChatBody)


def prepare_completion(
    raw: bytes, request_id: str, settings: ServerSettings, tokenizing: Tokenizing
) -> tuple[Job, Writer]:
    """Of ``POST /v1/completions``.

    Raises:
        ApiError: 400, 404.
    """
    body = decode_body(raw, _COMPLETION)
    model = model_of(body.model, settings)
    _refuse_completion_fields(body)
    asked = body.max_tokens if body.max_tokens is not None else settings.default_max_tokens
    is_scored_only = asked == 0
    if is_scored_only and not body.echo:
        raise invalid("max_tokens: 0 needs echo; else at least 1.", "max_tokens")
    wanted = max(asked, 1)
    forms = prompt_forms(body.prompt)
    n = body.n or 1
    _refuse_crowd(len(forms), n, settings)
    echoes_logprobs = bool(body.echo) and body.logprobs is not None
    job = _job(
        body,
        f"cmpl-{request_id}",
        request_id,
        model,
        tokenizing,
        max_tokens=wanted,
        logprobs=body.logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if echoes_logprobs else None),
    )
    job.echo = bool(body.echo)
    job.is_scored_only = is_scored_only
    for form in forms:
        job.prompts.append(_completion_prompt(form, body, job, tokenizing, wanted))
    return job, CompletionWriter(job, tokenizing.tokenizer)


def prepare_chat(
    raw: bytes, request_id: str, settings: ServerSettings, tokenizing: Tokenizing
) -> tuple[Job, Writer]:
    """Of ``POST /v1/chat/completions``.

    Raises:
        ApiError: 400, 404.
    """
    body = decode_body(raw, _CHAT)
    model = model_of(body.model, settings)
    _refuse_chat_fields(body)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise invalid(f"{param}: at least 1, found 0.", param)
    _refuse_crowd(1, body.n or 1, settings)
    top = body.top_logprobs or 0
    job = _job(
        body,
        f"chatcmpl-{request_id}",
        request_id,
        model,
        tokenizing,
        max_tokens=asked,
        logprobs=top if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    text = tokenizing.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs,
    )
    tokens = tokenizing.encode(
        text, add_special_tokens=bool(body.add_special_tokens), param="messages"
    )
    room = tokenizing.limit.answer_tokens(len(tokens), asked, "messages")
    job.prompts.append(Prompt(tokens, room))
    return job, ChatWriter(job, tokenizing.tokenizer, top)


def model_of(model: str | None, settings: ServerSettings) -> str:
    """Name of the model that is asked for; nothing means the one that is served.

    Raises:
        ApiError: 404, if it is another one.
    """
    if model is None or model == "":
        return settings.model_names[0]
    if model not in settings.model_names:
        raise ApiError(
            404,
            f"The model {model[:100]!r} does not exist; served is {settings.model_names[0]!r}.",
            param="model",
            code="model_not_found",
        )
    return model


def _job(
    body: GenerationBody,
    answer_id: str,
    request_id: str,
    model: str,
    tokenizing: Tokenizing,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Job:
    """All but the prompts."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs: not in a stream.", "prompt_logprobs")
    options = body.stream_options
    form, grammar = grammar_of(body) or ("", None)
    if grammar is not None:
        check_grammar(grammar, form)
    stops = stops_of(body)
    if tokenizing.tokenizer is None and (stops or grammar is not None):
        raise invalid("The model has no tokenizer, so there is no text to look at.", form or "stop")
    return Job(
        request_id=request_id,
        answer_id=answer_id,
        model=model,
        created_s=int(datetime.now(UTC).timestamp()),
        prompts=[],
        sampling=sampling_of(
            body,
            vocabulary=tokenizing.vocabulary,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        ),
        n=body.n or 1,
        form_field=form,
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        salt=body.cache_salt or "",
        session=body.prompt_cache_key or body.user or "",
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None
        and bool(options.include_usage and options.continuous_usage_stats),
        shows_logprobs=logprobs is not None,
        shown_prompt_logprobs=body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids) or tokenizing.tokenizer is None,
    )


def _completion_prompt(
    form: PromptForm, body: CompletionBody, job: Job, tokenizing: Tokenizing, wanted: int
) -> Prompt:
    if isinstance(form, str):
        tokens = tokenizing.encode(
            form, add_special_tokens=body.add_special_tokens is not False, param="prompt"
        )
    else:
        tokens = tokenizing.check_tokens(form, "prompt")
    prompt = Prompt(tokens, tokenizing.limit.answer_tokens(len(tokens), wanted, "prompt"))
    if job.echo and isinstance(form, str):
        prompt.text = form
    elif job.echo and tokenizing.tokenizer is not None:
        prompt.text = tokenizing.tokenizer.decode(tokens, job.skip_special_tokens)
    return prompt


def _refuse_completion_fields(body: CompletionBody) -> None:
    if body.suffix:
        raise invalid("suffix: is not supported.", "suffix", "unsupported_field")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(f"best_of: only as many as n, {body.n or 1}.", "best_of", "unsupported_field")


def _refuse_chat_fields(body: ChatBody) -> None:
    if body.tools and body.tool_choice != "none":
        raise invalid("tools: are not supported.", "tools", "unsupported_field")
    if body.continue_final_message:
        raise invalid(
            "continue_final_message: is not supported.",
            "continue_final_message",
            "unsupported_field",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs: only with logprobs.", "top_logprobs")


def _refuse_crowd(prompts: int, n: int, settings: ServerSettings) -> None:
    most = settings.max_sequences_per_request
    if prompts * n > most:
        param = "prompt" if prompts > most or n == 1 else "n"
        raise invalid(f"{param}: {prompts * n} answers (prompts times n); at most {most}.", param)


def _most(first: int | None, second: int | None) -> int | None:
    found = [number for number in (first, second) if number is not None]
    return max(found) if found else None
