"""A model's specification from its Hugging Face ``config.json``, strictly.

Sizes come from ``models.hf_config``; what is added here are the numbers and rules that a
computation needs besides. A field that asks for something the decoder does not do is refused.

Source:
    The configuration and modeling classes of Hugging Face transformers 5.24.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from models.hf_config import HfConfigError, read_hf_config
from models.llm_shape import AttentionShape, LayerShape, LlmShape
from runtime.model.rotary import Rotary
from runtime.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormKind
from runtime.model.spec_fields import ModelConfigError, SpecFields
from runtime.model.spec_rotary import context_tokens, read_rotary

__all__ = ["FAMILIES", "ModelConfigError", "read_model_spec"]

FAMILIES = (
    "gemma4",
    "gemma4_text",
    "llama",
    "mistral",
    "mixtral",
    "olmoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_SAME_LAYERS = ("llama", "mistral", "mixtral", "olmoe", "qwen3_moe")  # layer_types is not read
_END_TOKENS = {"llama": 2, "mistral": 2, "mixtral": 2, "olmoe": 50279, "gemma4_text": 1}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_model_spec(source: str | Path | Mapping[str, Any]) -> ModelSpec:
    """The specification of a model.

    End tokens are those of the configuration and of a ``generation_config.json`` beside it.

    Args:
        source: A ``config.json``, a folder that holds one, or the parsed table.

    Raises:
        ModelConfigError: If a file cannot be read, or a field is missing, of the wrong type,
            contradicts another or asks for what the decoder does not do.
    """
    name, generation = CONFIG, None
    if isinstance(source, Mapping):
        table = source
    else:
        path = Path(source)
        path = path / CONFIG if path.is_dir() else path
        name, table = str(path), _read_json(path)
        beside = path.parent / GENERATION_CONFIG
        if beside.is_file():
            generation = SpecFields(_read_json(beside), str(beside))
    outer = SpecFields(table, name)
    outer.choice("model_type", FAMILIES)
    try:
        shape = read_hf_config(table, where=name)
    except HfConfigError as error:
        raise ModelConfigError(str(error)) from None
    fields = outer
    if outer.get("model_type") == "gemma4":
        fields = SpecFields(table["text_config"], f"{name}: text_config")
    return _Reader(outer, fields, shape).spec(generation)


class _Reader:
    """Reads one configuration."""

    def __init__(self, outer: SpecFields, fields: SpecFields, shape: LlmShape) -> None:
        self._outer, self._fields, self._shape = outer, fields, shape
        self._kind = "gemma4_text" if shape.model_type == "gemma4" else shape.model_type
        self._is_gemma = self._kind == "gemma4_text"
        self._windows = [layer.attention.window_tokens for layer in shape.layers]

    def spec(self, generation: SpecFields | None) -> ModelSpec:
        fields, shape = self._fields, self._shape
        self._refuse()
        inputs = shape.per_layer_inputs
        return ModelSpec(
            model_type=shape.model_type,
            hidden=shape.hidden_size,
            vocabulary=shape.vocab_size,
            layers=tuple(self._layer(i) for i in range(len(shape.layers))),
            activation=shape.activation,
            norm_epsilon=fields.number(
                "rms_norm_eps", 1e-5 if self._kind in ("mixtral", "olmoe") else 1e-6
            ),
            is_tied=shape.is_tied,
            embedding_scale=shape.hidden_size**0.5 if self._is_gemma else 1.0,
            sandwich_norms=self._is_gemma,
            final_softcap=fields.optional_number("final_logit_softcapping")
            if self._is_gemma
            else None,
            layer_input_width=0 if inputs is None else inputs.width,
            layer_input_vocabulary=0 if inputs is None else inputs.vocab_size,
            context_tokens=context_tokens(fields, shape.max_context_tokens),
            end_tokens=self._end_tokens(generation),
        )

    def _refuse(self) -> None:
        fields = self._fields
        if fields.get("quantization_config") is not None:
            fields.refuse("quantization_config", "weights must be bfloat16, float16 or float32")
        if fields.get("use_bidirectional_attention") == "all":
            fields.refuse("use_bidirectional_attention", "only causal attention is built")
        inputs = self._shape.per_layer_inputs
        if inputs is not None and inputs.vocab_size < self._shape.vocab_size:
            rule = f"must be >= vocab_size = {self._shape.vocab_size}"
            fields.refuse("vocab_size_per_layer_input", rule, inputs.vocab_size)
        kinds = fields.get("layer_types")
        if kinds is None or self._is_gemma:
            return
        if self._kind in _SAME_LAYERS:
            windowed = fields.get("sliding_window") and self._kind not in ("llama", "olmoe")
            if self._kind == "qwen3_moe" and not fields.get("use_sliding_window"):
                windowed = False
            wanted = _SLIDING if windowed else _FULL
            if any(kind != wanted for kind in kinds):
                fields.refuse(
                    "layer_types", f"all layers of this {self._kind} have {wanted!r}", kinds
                )
        elif _SLIDING in kinds and not fields.get("use_sliding_window"):
            fields.refuse("use_sliding_window", f"must be true where layer_types has {_SLIDING!r}")

    def _layer(self, number: int) -> LayerSpec:
        layer = self._shape.layers[number]
        mlp = layer.mlp
        return LayerSpec(
            attention=self._attention(number, layer),
            mlp=None
            if mlp is None
            else MlpSpec(width=mlp.intermediate_size, has_bias=mlp.has_bias),
            moe=self._moe(layer),
        )

    def _attention(self, number: int, layer: LayerShape) -> AttentionSpec:
        shape = layer.attention
        assert isinstance(shape, AttentionShape)  # no family here has another
        if shape.head_dim % 2:
            self._fields.refuse("head_dim", "rotary positions need an even number", shape.head_dim)
        norm: NormKind = "none"
        if shape.query_norm_width:
            norm = "head" if shape.query_norm_width == shape.head_dim else "row"
        if self._kind == "olmoe":
            norm = "row"
        return AttentionSpec(
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window_tokens=shape.window_tokens,
            norm=norm,
            norms_values=self._is_gemma,
            qkv_bias=shape.has_qkv_bias,
            output_bias=shape.has_output_bias,
            keys_are_values=not shape.has_value_projection,
            reuses_kv=self._reused(number) if shape.reuses_kv else None,
            clip=self._fields.optional_number("clip_qkv") if self._kind == "olmoe" else None,
            scale=1.0 if self._is_gemma else shape.head_dim**-0.5,
            rotary=self._rotary(shape),
        )

    def _reused(self, number: int) -> int:
        """The last layer of the same kind that has keys and values of its own."""
        window = self._windows[number]
        return max(
            i
            for i, layer in enumerate(self._shape.layers)
            if isinstance(layer.attention, AttentionShape)
            and not layer.attention.reuses_kv
            and (self._windows[i] is None) == (window is None)
        )

    def _rotary(self, shape: AttentionShape) -> Rotary:
        kind = None
        if self._is_gemma:
            kind = _FULL if shape.window_tokens is None else _SLIDING
        return read_rotary(
            self._fields,
            head_dim=shape.head_dim,
            max_tokens=self._shape.max_context_tokens,
            default_base=1e6 if self._kind == "mixtral" else 1e4,
            layer_kind=kind,
        )

    def _moe(self, layer: LayerShape) -> MoeSpec | None:
        moe = layer.moe
        if moe is None:
            return None
        always = self._kind in ("mixtral", "gemma4_text")
        return MoeSpec(
            experts=moe.num_experts,
            experts_per_token=moe.experts_per_token,
            width=moe.intermediate_size,
            renormalises=always or self._fields.flag("norm_topk_prob", False),
            norms_router_input=moe.has_router_scale,
            shared_width=moe.shared_intermediate_size,
        )

    def _end_tokens(self, generation: SpecFields | None) -> tuple[int, ...]:
        found: set[int] = set()
        if self._fields.has("eos_token_id"):
            found.update(self._fields.tokens("eos_token_id"))
        elif not self._outer.has("eos_token_id") and self._kind in _END_TOKENS:
            found.add(_END_TOKENS[self._kind])
        if self._outer is not self._fields:
            found.update(self._outer.tokens("eos_token_id"))
        if generation is not None:
            found.update(generation.tokens("eos_token_id"))
        return tuple(sorted(token for token in found if token < self._shape.vocab_size))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        _fail(path, f"cannot be read: {error.strerror or error}")
    except RecursionError:
        _fail(path, "is nested too deeply")
    except ValueError as error:
        _fail(path, f"is no JSON: {error}")
    if not isinstance(table, dict):
        _fail(path, f"must hold a JSON object, found {type(table).__name__}")
    return table


def _fail(path: Path, what: str) -> NoReturn:
    raise ModelConfigError(f"{path}: {what}") from None
