"""The tokenizer of the demo model, from the tokens and merges of its GGUF file.

Written: ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``, as transformers
and the server read them.
"""

from __future__ import annotations

import json
from pathlib import Path

from runtime.demo_model_gguf import DenseConfig, GgufError, Vocabulary
from traces.whole_file import write_whole

PRE_TOKENIZERS = ("smollm", "gpt-2", "gpt2", "default")


def write_tokenizer(folder: Path, vocabulary: Vocabulary, config: DenseConfig) -> None:
    """Write the tokenizer's files.

    Raises:
        GgufError: If the text is cut in a way that is not known here.
        OSError: If the disk refuses.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if vocabulary.pre_tokenizer not in PRE_TOKENIZERS:
        raise GgufError(
            f"tokenizer.ggml.pre is {vocabulary.pre_tokenizer!r}, must be one of"
            f" {', '.join(PRE_TOKENIZERS)}"
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(vocabulary.tokens)},
            merges=list(vocabulary.merges),
        )
    )
    if vocabulary.pre_tokenizer == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(vocabulary.tokens[number], normalized=False, special=True)
            for number in vocabulary.special
        ]
    )
    write_whole(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    names = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_id,
        "pad_token": config.pad_token_id,
        "unk_token": vocabulary.unk_token_id,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    settings |= {name: vocabulary.tokens[i] for name, i in names.items() if i is not None}
    if vocabulary.chat_template:
        settings["chat_template"] = vocabulary.chat_template
        write_whole(folder / "chat_template.jinja", vocabulary.chat_template.encode())
    write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode())
