"""The forms a prompt may have, all as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.server.bodies import Message
from runtime.server.errors import ApiError, invalid
from runtime.server.limits import TokenLimit
from runtime.text.chat_template import NO_TEMPLATE, ChatTemplate, ChatTemplateError
from runtime.text.tokenizer import TextTokenizer, TokenizerError

PromptForm = str | list[int]


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Turns prompts into token ids; blocking, so large prompts belong in a thread.

    Attributes:
        tokenizer: None: only token ids can be prompts.
        template: None: chats are refused.
        vocabulary: Size.
        limit: Longer prompts are refused, by their bytes before they are tokenized.
    """

    tokenizer: TextTokenizer | None
    template: ChatTemplate | None
    vocabulary: int
    limit: TokenLimit

    def encode(self, text: str, *, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        """Token ids of a text.

        Raises:
            ApiError: 400.
        """
        if self.tokenizer is None:
            raise invalid("The model has no tokenizer; send token ids.", param)
        self._refuse_long(text, param)
        try:
            tokens = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise invalid(f"{param}: {error}.", param) from None
        if (largest := max(tokens, default=0)) >= self.vocabulary:
            text = self.tokenizer.token_text(largest)
            raise invalid(
                f"{param}: the tokenizer's token {text!r:.60} (id {largest}) is not in the "
                f"model's vocabulary 0..{self.vocabulary - 1}.",
                param,
                "unknown_token",
            )
        return self.check_tokens(tokens, param)

    def check_tokens(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """Token ids as they are.

        Raises:
            ApiError: 400, if there are none or one is not in the vocabulary.
        """
        if not tokens:
            raise invalid(f"{param}: must not be empty.", param)
        for token in (min(tokens), max(tokens)):
            check_token(token, self.vocabulary, param)
        return tuple(tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        template_kwargs: dict[str, Any] | None,
    ) -> str:
        """A chat's prompt.

        Raises:
            ApiError: 400, if there is no template or it does not take the messages.
        """
        if self.template is None:
            raise invalid(NO_TEMPLATE[0].upper() + NO_TEMPLATE[1:] + ".", "messages")
        try:
            return self.template.render(
                [plain_message(message, place) for place, message in enumerate(messages)],
                add_generation_prompt=add_generation_prompt,
                template_kwargs=template_kwargs,
            )
        except ChatTemplateError as error:
            raise invalid(str(error)[:1000], "messages", "invalid_messages") from None

    def _refuse_long(self, text: str, param: str) -> None:
        """Before any time is spent on a text that has too many tokens however it is cut."""
        if self.tokenizer is None or len(text) < self.limit.tokens:
            return
        size = len(text.encode("utf-8", "replace"))
        least = size // max(self.tokenizer.longest_token_bytes, 1)
        if least >= self.limit.tokens:
            raise self.limit.too_long(f"{size} bytes, which are at least {least} tokens", param)


def check_token(token: int, vocabulary: int, param: str) -> None:
    """A token id.

    Raises:
        ApiError: 400, if it is not in the vocabulary.
    """
    if not 0 <= token < vocabulary:
        raise invalid(
            f"{param}: token id {_shown(token)} is not in the vocabulary 0..{vocabulary - 1}.",
            param,
            "unknown_token",
        )


def _shown(token: int) -> str:
    return str(token) if abs(token) < 10**20 else f"{'-' if token < 0 else ''}10**20 and more"


def plain_message(message: Message, place: int) -> dict[str, Any]:
    """A message for the template.

    Raises:
        ApiError: 400, if it has parts other than text, or nothing.
    """
    param = f"messages[{place}].content"
    if message.content is None and not message.tool_calls and message.role != "assistant":
        raise invalid(f"{param}: required.", param, "missing_field")
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message.content, list):
        if not message.content:
            raise invalid(f"{param}: must not be empty.", param)
        for index, part in enumerate(message.content):
            if part.type not in ("text", "input_text") or part.text is None:
                where = f"{param}[{index}]"
                kind = part.type[:40]
                raise invalid(f"{where}: only text is served, found {kind!r}.", where)
        plain["content"] = [{"type": "text", "text": part.text} for part in message.content]
    for name in ("name", "tool_call_id", "tool_calls", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def prompt_forms(prompt: str | list[Any]) -> list[PromptForm]:
    """The prompts of a completion, each a text or token ids; a list of texts stays a list.

    Raises:
        ApiError: 400, if it is empty or of mixed kinds.
    """
    if isinstance(prompt, str):
        return [_not_empty(prompt, "prompt")]
    if not prompt:
        raise invalid("prompt: must not be empty.", "prompt")
    kinds = {type(each) for each in prompt}
    if len(kinds) > 1:
        raise _mixed()
    if kinds == {int}:
        return [prompt]
    return [_not_empty(each, f"prompt[{index}]") for index, each in enumerate(prompt)]


def _not_empty(prompt: PromptForm, param: str) -> PromptForm:
    if not prompt:
        raise invalid(f"{param}: must not be empty.", "prompt")
    return prompt


def _mixed() -> ApiError:
    return invalid(
        "prompt: a text, a list of texts, a list of token ids or a list of such lists; not mixed.",
        "prompt",
        "invalid_type",
    )
