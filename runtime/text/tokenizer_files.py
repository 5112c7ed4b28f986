"""The tokenizer's files of a checkpoint folder, read as transformers 5 reads them.

``tokenizer.json`` is the tokenizer. ``tokenizer_config.json`` names the special tokens and may add
tokens; ``special_tokens_map.json`` and ``added_tokens.json`` are read only where the configuration
has no ``added_tokens_decoder``. ``add_bos_token`` and ``add_eos_token`` of the configuration do not
count beside a ``tokenizer.json``: its post-processor says what goes around a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(ValueError):
    """A tokenizer's file, a text or a token id is not usable; names which."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files of a folder say.

    Attributes:
        tokenizer: With all added tokens, without truncation and padding.
        named_tokens: ``bos_token`` and the like -> its text, also model-specific ones such as
            ``image_token``; what chat templates get as variables.
        config: ``tokenizer_config.json``, empty where there is none.
    """

    tokenizer: Tokenizer
    named_tokens: dict[str, str]
    config: dict[str, Any]


def read_tokenizer_files(folder: Path) -> TokenizerFiles | None:
    """Read them; None where the folder has no ``tokenizer.json``.

    Raises:
        TokenizerError: If a file cannot be read or has not the form it must have.
    """
    path = folder / TOKENIZER_FILE
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except BaseException as error:  # the library raises bare Exception, and panics
        if not is_of_library(error):
            raise
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json_object(folder / CONFIG_FILE)
    source = folder / CONFIG_FILE
    merged = dict(config)
    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in config:
        added = _added_tokens(config["added_tokens_decoder"], source)
    else:
        merged.update(read_json_object(folder / SPECIAL_TOKENS_FILE))
        special = {str(_token_text(merged[name])) for name in NAMED_TOKENS if merged.get(name)}
        for text, token in read_json_object(folder / ADDED_TOKENS_FILE).items():
            is_special = text in special
            added[_token_id(token, folder / ADDED_TOKENS_FILE)] = AddedToken(
                text, normalized=not is_special, special=is_special
            )
    by_text = {token.content: token for token in added.values()}
    named: dict[str, AddedToken | str] = {}
    for name, value in _named(merged).items():
        token = _as_token(value, f"{source}: {name}")
        named[name] = by_text.get(_text_of(token), token)
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        for name, value in extra.items():
            named[name] = _as_token(value, f"{source}: {name}")
        extra = []
    extras = [_as_token(value, f"{source}: extra_special_tokens") for value in extra]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    wanted: list[AddedToken] = [added[index] for index in sorted(added)]
    seen = known | set(by_text)
    for token in (*named.values(), *extras):
        text = _text_of(token)
        if text not in seen:
            seen.add(text)
            wanted.append(_as_special(token))
    if wanted:
        tokenizer.add_tokens(wanted)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TokenizerFiles(
        tokenizer=tokenizer,
        named_tokens={name: _text_of(token) for name, token in named.items()},
        config=config,
    )


def is_of_library(error: BaseException) -> bool:
    """Whether to report it: a panic of the Rust library is no ``Exception``, but no exit either."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def read_json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty where there is no such file.

    Raises:
        TokenizerError: If it is there but is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must be a JSON object, found {type(value).__name__}")
    return value


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """Entries that name a token, the standard ones first as the chat templates' variables."""
    names = [name for name in NAMED_TOKENS if config.get(name) is not None]
    names += [
        name
        for name, value in config.items()
        if name.endswith("_token") and name not in NAMED_TOKENS and isinstance(value, (str, dict))
    ]
    return {name: config[name] for name in names}


def _added_tokens(decoder: Any, source: Path) -> dict[int, AddedToken]:
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{source}: added_tokens_decoder must be an object of id -> token")
    tokens = {}
    for index, value in decoder.items():
        token = _as_token(value, f"{source}: added_tokens_decoder[{index!r}]")
        tokens[_token_id(index, source)] = token if isinstance(token, AddedToken) else _plain(token)
    return tokens


def _token_id(value: Any, source: Path) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise TokenizerError(f"{source}: a token id must be an integer, found {value!r}") from None


def _as_token(value: Any, where: str) -> AddedToken | str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        return AddedToken(value["content"], **{k: bool(value[k]) for k in flags if k in value})
    raise TokenizerError(f"{where}: must be a text or an object with 'content', found {value!r}")


def _plain(text: str) -> AddedToken:
    return AddedToken(text)


def _as_special(token: AddedToken | str) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    token.special = True
    return token


def _text_of(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else str(token.content)


def _token_text(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value
