"""What chat templates know beyond Jinja: transformers' functions, filters and tag."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.utils import Namespace


class TemplateRefusedError(ValueError):
    """The template called ``raise_exception``: it does not take such messages."""


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the answers for training: its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """The nodes between the tags, as if those were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter of the name escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> None:
    """The template takes no such messages.

    Raises:
        TemplateRefusedError: Always.
    """
    raise TemplateRefusedError(str(message))


def strftime_now(form: str) -> str:
    """Now, in local time."""
    return datetime.now().strftime(form)


class TemplateDict:
    """``dict`` without the type itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """``dict(...)``."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """``dict.fromkeys``."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """``namespace`` that takes no names beginning with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name like {name!r}")
