"""Messages of a chat to the prompt, by the checkpoint's own template, as transformers 5 does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2

from runtime.text.template_language import TemplateRefusedError
from runtime.text.template_sandbox import (
    ChatTemplateEnvironment,
    TemplateLimitError,
    TemplateLimits,
)
from runtime.text.tokenizer_files import CONFIG_FILE, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
LEGACY_TEMPLATE_FILE = "chat_template.json"
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE = "probe of content"

ContentForm = Literal["text", "parts", "both"]


class ChatTemplateError(ValueError):
    """A template cannot be used, or does not take these messages."""


class ChatTemplate:
    """Renders chats. One object serves many threads at once.

    Args:
        templates: Name -> Jinja source; ``default`` is used, ``tool_use`` where tools are given.
        named_tokens: ``bos_token`` and the like, variables of the template.
        limits: What one rendering may cost.
        source: File or folder, for error messages.

    Attributes:
        content: Whether a message's content must be a text, a list of parts, or may be both;
            found by rendering one message of each form. ``render`` converts where it must.

    Raises:
        ChatTemplateError: If a template is no valid Jinja, or none is the default.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        named_tokens: Mapping[str, str],
        *,
        limits: TemplateLimits | None = None,
        source: str = "chat template",
    ) -> None:
        if "default" not in templates:
            raise ChatTemplateError(
                f"{source}: templates {sorted(templates)} and none named 'default';"
                " choose one with --chat-template FILE"
            )
        self._limits = limits or TemplateLimits()
        self._environment = ChatTemplateEnvironment(self._limits)
        self._named_tokens = dict(named_tokens)
        self._source = source
        self._templates: dict[str, jinja2.Template] = {}
        for name, text in templates.items():
            try:
                self._templates[name] = self._environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"{source}: template {name!r} line {error.lineno}: {error.message}"
                ) from error
            except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
                raise ChatTemplateError(f"{source}: template {name!r}: {error}") from error
        self.content: ContentForm = self._find_content_form()

    @classmethod
    def open(
        cls,
        folder: Path,
        named_tokens: Mapping[str, str],
        *,
        file: Path | None = None,
        limits: TemplateLimits | None = None,
    ) -> ChatTemplate | None:
        """The folder's template, or the one of ``file`` (``--chat-template FILE``).

        In a folder ``chat_template.jinja`` (and ``additional_chat_templates/*.jinja``) come before
        ``chat_template`` in ``tokenizer_config.json``, a text or a list of names and texts, and
        that before ``chat_template.json``. None where there is none of them: chats are refused
        with ``NO_TEMPLATE``.

        Raises:
            ChatTemplateError: If a template is unreadable or no valid Jinja.
        """
        if file is not None:
            return cls({"default": _read(file)}, named_tokens, limits=limits, source=str(file))
        templates: dict[str, str] = {}
        source = folder / TEMPLATE_FILE
        if source.exists():
            templates["default"] = _read(source)
        for path in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja")):
            templates[path.stem] = _read(path)
        for name in (CONFIG_FILE, LEGACY_TEMPLATE_FILE):
            if not templates:
                source = folder / name
                entry = read_json_object(source).get("chat_template")
                templates = {} if entry is None else _named_templates(entry, source)
        if not templates:
            return None
        return cls(templates, named_tokens, limits=limits, source=str(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens written out: encode it without adding any.

        Args:
            messages: With ``role`` and mostly ``content``, a text or a list of
                ``{"type": "text", "text": ...}``; texts of several parts are joined by line ends
                where the template takes texts only.
            add_generation_prompt: Open the assistant's message.
            tools: Functions the model may call, as JSON schemas.
            documents: Passages to answer from, for templates that know them.
            template_kwargs: Further variables (``enable_thinking``); they come before
                ``bos_token`` and the like.

        Raises:
            ChatTemplateError: If there are no messages, the template refuses these, fails on them
                or does more than the limits allow.
        """
        if not messages:
            raise ChatTemplateError("messages: must not be empty")
        variables = {**self._named_tokens, **_plain(template_kwargs or {})}
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in (template_kwargs or {}):
                raise ChatTemplateError(f"chat_template_kwargs: {name!r} is a field of its own")
        return self._render(
            "tool_use" if tools is not None and "tool_use" in self._templates else "default",
            messages=[self._message(message) for message in messages],
            tools=None if tools is None else _plain(tools),
            documents=None if documents is None else _plain(documents),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def _render(self, name: str, /, **variables: Any) -> str:
        parts: list[str] = []
        size = 0
        try:
            with self._environment.metered():
                for part in self._templates[name].generate(**variables):
                    size += len(part)
                    self._environment.check_size(size)
                    parts.append(part)
        except TemplateRefusedError as error:
            raise ChatTemplateError(f"messages: the model's chat template says: {error}") from error
        except TemplateLimitError as error:
            raise ChatTemplateError(f"{self._source}: stopped: {error}") from error
        except RecursionError as error:
            raise ChatTemplateError(f"{self._source}: macros call each other too deep") from error
        except Exception as error:  # a stranger's program: anything can go wrong in it
            raise ChatTemplateError(
                f"messages: the model's chat template fails on them:"
                f" {type(error).__name__}: {error}"
            ) from error
        return "".join(parts)

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value for key, value in _plain(message).items() if value is not None}
        if "content" in plain:
            plain["content"] = self._content(plain["content"])
        reasoning = [plain[name] for name in _REASONING_NAMES if name in plain]
        if reasoning:
            plain = {"thinking": reasoning[0], **plain, "reasoning_content": reasoning[0]}
        return plain

    def _content(self, content: Any) -> Any:
        if self.content == "text" and isinstance(content, list):
            texts = []
            for part in content:
                text = part.get("text") if isinstance(part, dict) else part
                if not isinstance(text, str):
                    raise ChatTemplateError(
                        "messages: a part of content must be {'type': 'text', 'text': ...},"
                        f" found {json.dumps(part)[:200]}"
                    )
                texts.append(text)
            return "\n".join(texts)
        if self.content == "parts" and isinstance(content, str):
            return [{"type": "text", "text": content}]
        return content

    def _find_content_form(self) -> ContentForm:
        takes_text = self._shows_probe(_PROBE)
        takes_parts = self._shows_probe([{"type": "text", "text": _PROBE}])
        if takes_parts:
            return "both" if takes_text else "parts"
        return "text"

    def _shows_probe(self, content: Any) -> bool:
        """Whether the text is in the prompt and a part's other letters (its repr) are not."""
        try:
            prompt = self._render(
                "default",
                messages=[{"role": "user", "content": content}],
                tools=None,
                documents=None,
                add_generation_prompt=False,
                **self._named_tokens,
            )
        except ChatTemplateError:
            return False
        return _PROBE in prompt and f"'{_PROBE}'" not in prompt and f'"{_PROBE}"' not in prompt


NO_TEMPLATE = (
    "the model has no chat template; send /v1/completions a finished prompt, or start the server"
    " with --chat-template FILE (a Jinja template)"
)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{path}: chat template is not readable: {error}") from error


def _named_templates(entry: Any, source: Path) -> dict[str, str]:
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        entry = {
            item.get("name"): item.get("template") if isinstance(item, dict) else None
            for item in entry
            if isinstance(item, dict)
        }
    if (
        not isinstance(entry, dict)
        or not entry
        or not all(isinstance(text, str) for pair in entry.items() for text in pair)
    ):
        raise ChatTemplateError(
            f"{source}: chat_template must be a text or a list of objects with name and template"
        )
    return entry


def _plain(value: Any) -> Any:
    """A copy of JSON types only: nothing a template is given has methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise ChatTemplateError(
        f"messages, tools and chat_template_kwargs must be JSON, found a {type(value).__name__}"
    )
