"""Tokenizers made here, in the forms that checkpoints have."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

os.environ["HF_HUB_OFFLINE"] = "1"

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "Grüße aus München, où est le café? ¿Dónde está la niña? Привет, мир!",
    "人工智能正在改变世界。日本語のテキストも少しあります。한국어 문장도 있습니다.",
    "שלום עולם, مرحبا بالعالم",
    "Numbers 1 22 333 4444, code: def f(x):\n    return x + 1\n\n\t# tabs  and   spaces",
] * 3

TEXTS = [
    "",
    " ",
    "  two leading spaces and two trailing  ",
    "\n",
    "Hello world",
    " Hello, world!  It doesn't matter .",
    "😀 emoji 👍🏽 with skin tone, 👨‍👩‍👧‍👦 a family by ZWJ, 🏳️‍🌈 flag, 🇩🇪 region",
    "人工智能 and 日本語 and 한국어, rare: 𠮷𡈽 𓀀 \U0001f9ff",
    "e\u0301 combining, Z\u0351\u0343\u0300algo, n\u0303",
    "שלום \u200fRTL\u200e مرحبا ١٢٣",
    "zero \u200b width \ufeff and nul \x00 and bell \x07",
    "\ufffd genuine replacement character \ufffd",
    "▁ a real lower block ▁▁ and Ġ and <0x41> written out",
    "tabs\tand\r\nline ends\n\n\nthree",
    "<|im_start|>user\nhi<|im_end|>\n<s>[INST] hi [/INST]</s>",
    "ā\u0101 ǅ ß ﬁ ½ Ⅷ",
]

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

Maker = Callable[[], Tokenizer]


def byte_level() -> Tokenizer:
    """GPT-2's form, with bytes of no training text too, and added tokens of all kinds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<plain added>"), AddedToken("naïve é 字")])
    return tokenizer


def _pieces_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIALS,
        initial_alphabet=["▁"],
        limit_alphabet=80,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*SPECIALS[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in set(tokens)]
    return {token: i for i, token in enumerate(tokens)}, [tuple(pair) for pair in model["merges"]]


def llama() -> Tokenizer:
    """Llama 2's and Mixtral's form: pieces with byte fallback, a space put before the text."""
    vocabulary, merges = _pieces_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """Gemma's form: no space put before, none taken off; begin and end around a text."""
    vocabulary, merges = _pieces_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """The Metaspace decoder alone, which changes the first token."""
    vocabulary, merges = _pieces_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def word_pieces() -> Tokenizer:
    """A decoder that is not taken apart: text depends on the token before."""
    words = [*SPECIALS, "the", "fox", "##es", "##y", "dog", ",", ".", "人", "##工"]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


MAKERS: dict[str, Maker] = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "metaspace": metaspace,
    "word_pieces": word_pieces,
}

CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
}


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of the form -> a checkpoint's folder with such a tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: write_folder(root / name, make(), CONFIG) for name, make in MAKERS.items()}
