"""Where chat templates run: transformers' Jinja dialect, with bounds on steps, time and text.

A template comes with a checkpoint and is a program of strangers. Jinja's immutable sandbox keeps it
from Python's internals and from changing what it is given; there is no loader, so it reads no file.
Here it also cannot run for ever or fill the memory: every turn of a loop and every call of a macro
is counted, and texts and lists that grow are measured where they grow.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from runtime.text.template_language import (
    GenerationTag,
    TemplateDict,
    TemplateNamespace,
    raise_exception,
    strftime_now,
    tojson,
)
from runtime.text.template_sizes import (
    braces_size,
    has_large_width,
    percent_size,
    replaced_size,
    text_size,
)

_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_PADDING_FILTERS = frozenset({"center", "indent", "slice", "batch", "wordwrap", "truncate"})
# They hand on or count what they get; the others make a text of it.
_STRUCTURAL_FILTERS = frozenset(
    {"attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last"}
    | {"length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse"}
    | {"select", "selectattr", "slice", "sort", "sum", "unique"}
)


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
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
            finalize=self._finalize,
        )
        self._limits = limits
        self._spent = threading.local()
        self.filters["tojson"] = tojson
        self.filters = {
            name: self._measured(name, function) for name, function in self.filters.items()
        }
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace
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
        self.check_size(text_size(parts, self._limits.characters))
        return "".join(map(str, parts))

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
            self._check_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A function or method, where the result is not too large."""
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            args = self._check_method(owner, name, args, kwargs)
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
            if name not in _STRUCTURAL_FILTERS:
                for value in args:
                    self._finalize(value)
            if name in _PADDING_FILTERS:
                self._check_numbers(args[1:], kwargs, 1)
            elif name == "replace":
                self._check_replace(str(args[1]), args[2:], kwargs)
            elif name == "format":
                self._check_percent(str(args[0]), kwargs or args[1:])
            elif name == "join":
                separator = args[2] if len(args) > 2 else kwargs.get("d", "")
                args = (args[0], self._join_list(args[1], str(separator)), *args[2:])
            result = function(*args, **kwargs)
            if _has_size(result):
                self.check_size(len(result))
            return result

        return measured

    def _finalize(self, value: Any) -> Any:
        """What ``{{ }}`` puts out."""
        if isinstance(value, (list, tuple, dict)):
            self.check_size(text_size(value, self._limits.characters))
        return value

    def _check_method(self, owner: str, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        if name in _PADDING_METHODS:
            self._check_numbers(args, kwargs, len(owner) if name == "expandtabs" else 1)
        elif name == "replace":
            self._check_replace(owner, args, kwargs)
        elif name == "join" and args:
            return (self._join_list(args[0], owner), *args[1:])
        elif name in ("format", "format_map"):
            if has_large_width(owner, braces=True):
                raise TemplateLimitError("a format with a very large or variable width")
            values = (*args, *kwargs.values())
            self.check_size(braces_size(owner, values, self._limits.characters))
        return args

    def _check_numbers(self, args: Any, kwargs: Any, times: int) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):
                self.check_size(value * times)

    def _check_replace(self, text: str, args: Any, kwargs: Any) -> None:
        values = [str(value) for value in (*args, *kwargs.values())]
        if len(values) >= 2:
            self.check_size(replaced_size(text, values[0], values[1]))

    def _check_percent(self, form: str, values: Any) -> None:
        if has_large_width(form, braces=False):
            raise TemplateLimitError("a format with a very large or variable width")
        self.check_size(percent_size(form, values, self._limits.characters))

    def _join_list(self, values: Iterable[Any], separator: str) -> list[Any]:
        listed = list(values)
        size = text_size(listed, self._limits.characters)
        self.check_size(size + len(separator) * len(listed))
        return listed


def _has_size(value: Any) -> bool:
    return isinstance(value, (str, list, tuple, bytes))
