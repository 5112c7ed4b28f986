"""Where chat templates run: transformers' Jinja dialect, with bounds on steps, time and text.

A template comes with a checkpoint and is a program of strangers. Jinja's immutable sandbox keeps it
from Python's internals and from changing what it is given; there is no loader, so it reads no file.
Here it also cannot run for ever or fill the memory: every turn of a loop and every call of a macro
is counted, and texts and lists that grow are measured where they grow.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_PADDING_FILTERS = frozenset({"center", "indent", "slice", "batch", "wordwrap", "truncate"})
_LARGE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +]*[0-9]*\.?(\*|[0-9]{6})")
_LARGE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\{|[0-9]{6})")


class TemplateRefusedError(ValueError):
    """The template called ``raise_exception``: it does not take such messages."""


class TemplateLimitError(ValueError):
    """The template did more than it may."""


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may cost.

    Attributes:
        characters: Of the prompt, and of any text or list on the way to it.
        steps: Turns of loops and calls of macros.
        seconds: Looked at with every step.
    """

    characters: int = 16 * 2**20
    steps: int = 1_000_000
    seconds: float = 10.0


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the answers for training: its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metered(NodeTransformer):
    """Counts loops' turns and macros' calls; measures what ``~`` joins.

    Jinja's visitor finds these methods by the names of its nodes.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined", lineno=node.lineno)
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.EnvironmentAttribute("step", lineno=node.lineno)
        call = nodes.Call(step, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Renderings in several threads have counts of their own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self._limits = limits
        self._spent = threading.local()
        self.filters["tojson"] = _tojson
        self.filters = {
            name: self._measured(name, function) for name, function in self.filters.items()
        }
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace
        del self.globals["lipsum"]

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Counts anew for the rendering in this thread."""
        self._spent.steps = 0
        self._spent.end_s = time.monotonic() + self._limits.seconds
        yield

    def step(self) -> None:
        """One turn of a loop or call of a macro."""
        self._spent.steps += 1
        if self._spent.steps > self._limits.steps:
            raise TemplateLimitError(f"more than {self._limits.steps} turns of loops")
        if time.monotonic() > self._spent.end_s:
            raise TemplateLimitError(f"more than {self._limits.seconds:g} s of work")

    def joined(self, *parts: Any) -> str:
        """``~``."""
        texts = [str(part) for part in parts]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)

    def check_size(self, size: int) -> None:
        """Refuse texts and lists that are too long."""
        if size > self._limits.characters:
            raise TemplateLimitError(f"more than {self._limits.characters} characters of text")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """``+``, ``*``, ``**`` and ``%``, where the result is not too large."""
        if operator == "+" and _has_size(left) and _has_size(right):
            self.check_size(len(left) + len(right))
        if operator == "*":
            for whole, count in ((left, right), (right, left)):
                if _has_size(whole) and isinstance(count, int):
                    self.check_size(len(whole) * count)
            if isinstance(left, int) and isinstance(right, int):
                self.check_size(left.bit_length() + right.bit_length())
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.check_size(left.bit_length() * abs(right))
        if operator == "%" and isinstance(left, str):
            _check_width(_LARGE_PERCENT, left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A function or method, where the result is not too large."""
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING_METHODS:
                self._check_numbers(args, kwargs, len(owner) if name == "expandtabs" else 1)
            if name == "replace":
                self._check_replace(owner, args, kwargs)
            if name == "join" and args:
                args = (self._listed_for_join(args[0], owner), *args[1:])
            if name in ("format", "format_map"):
                _check_width(_LARGE_BRACES, owner)
        result = super().call(context, function, *args, **kwargs)
        if _has_size(result):
            self.check_size(len(result))
        return result

    def _generate(
        self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False
    ) -> str:
        return super()._generate(_Metered().visit(source), name, filename, defer_init)

    def _measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # wraps() copies jinja_pass_arg, by which Jinja knows what to pass first.
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if name in _PADDING_FILTERS:
                self._check_numbers(args[1:], kwargs, 1)
            if name == "replace":
                self._check_replace(args[1], args[2:], kwargs)
            if name == "format":
                _check_width(_LARGE_PERCENT, str(args[0]))
            if name == "join":
                values = list(args[1])
                separator = args[2] if len(args) > 2 else kwargs.get("d", "")
                self._listed_for_join(values, str(separator))
                args = (args[0], values, *args[2:])
            result = function(*args, **kwargs)
            if _has_size(result):
                self.check_size(len(result))
            return result

        return measured

    def _check_numbers(self, args: Any, kwargs: Any, times: int) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):
                self.check_size(value * times)

    def _check_replace(self, text: Any, args: Any, kwargs: Any) -> None:
        values = [*args, *kwargs.values()]
        if len(values) >= 2:
            old, new = str(values[0]), str(values[1])
            text = str(text)
            self.check_size(len(text) + text.count(old) * len(new))

    def _listed_for_join(self, values: Iterable[Any], separator: str) -> list[Any]:
        listed = list(values)
        lengths = (len(value) for value in listed if isinstance(value, str))
        self.check_size(sum(lengths) + len(separator) * max(len(listed) - 1, 0))
        return listed


def _check_width(large: re.Pattern[str], form: str) -> None:
    if large.search(form):
        raise TemplateLimitError("a format with a very large or variable width")


def _has_size(value: Any) -> bool:
    return isinstance(value, (str, list, tuple, bytes))


def _tojson(
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


def _raise_exception(message: Any) -> None:
    raise TemplateRefusedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _TemplateDict:
    """``dict`` without the type itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """``dict.fromkeys``."""
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
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
