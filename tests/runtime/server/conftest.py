"""A scripted engine, a byte-level tokenizer and clients for the front end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.server.app import App, make_app
from runtime.server.settings import ServerSettings
from runtime.text.chat_template import ChatTemplate
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import ScriptedEngine, client_of, saying

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if messages[0].content == 'refuse me' %}{{ raise_exception('no such chats') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No log lines on the screen; tests that read them set their own up."""
    structlog.configure(processors=[structlog.processors.JSONRenderer()], logger_factory=Silence)
    yield
    structlog.reset_defaults()


class Silence:
    """A logger that says nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def msg(self, _: str) -> None:
        pass

    log = debug = info = warning = error = msg


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Every byte is a token, so characters of several bytes are always split."""
    folder = tmp_path_factory.mktemp("tokenizer")
    stand_ins = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(stand_ins)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    found = TextTokenizer.open(Path(folder))
    assert found is not None
    return found


@pytest.fixture
def engine(text: TextTokenizer) -> ScriptedEngine:
    return ScriptedEngine(saying(text, "hello world, this is a scripted answer"))


@pytest.fixture
def build(engine: ScriptedEngine, text: TextTokenizer) -> Callable[..., App]:
    """``build(max_queued_requests=...)``: an application before the scripted engine."""
    template = ChatTemplate({"default": TEMPLATE}, {})

    def make(**settings: Any) -> App:
        settings.setdefault("model_names", ("tiny", "other/name"))
        return make_app(ServerSettings(**settings), engine, text, template)

    return make


@pytest.fixture
def call(build: Callable[..., App]) -> Callable[..., Any]:
    """``await call(body)``: one completion, with the answer's JSON."""

    async def ask(body: dict[str, Any], path: str = "/v1/completions", **settings: Any) -> Any:
        async with client_of(build(**settings)) as client:
            return await client.post(path, json=body)

    return ask
