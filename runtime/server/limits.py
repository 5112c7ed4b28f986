"""How long prompts and answers may be."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engine.frames import EngineInfo
from runtime.server.errors import ApiError, invalid
from runtime.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Most tokens of one prompt and its answer together.

    Attributes:
        tokens: So many.
        is_memory: The KV memory sets it, not the model's context.
    """

    tokens: int
    is_memory: bool

    @classmethod
    def of(cls, info: EngineInfo, settings: ServerSettings) -> TokenLimit:
        """The tightest of the model's, the operator's and the memory's."""
        context = min(info.context_tokens, settings.context_tokens or info.context_tokens)
        memory = info.kv_capacity_tokens
        return cls(min(context, memory), memory < context)

    def answer_tokens(self, prompt_tokens: int, wanted: int | None, param: str) -> int:
        """Most tokens of the answer: what was wanted, cut to the room behind the prompt.

        Args:
            prompt_tokens: Length of the prompt.
            wanted: None: all the room.
            param: Field that holds the prompt.

        Raises:
            ApiError: 400, if there is no room for even one.
        """
        room = self.tokens - prompt_tokens
        if room < 1:
            raise self.too_long(f"{prompt_tokens} tokens", param)
        return room if wanted is None else min(wanted, room)

    def too_long(self, found: str, param: str) -> ApiError:
        """400 for a prompt that leaves no room for one token.

        Clients have no field to tell it from other errors, so LiteLLM looks for OpenAI's "this
        model's maximum context length is" and LangChain for "prompt is too long".
        """
        why = " with the memory there is for keys and values" if self.is_memory else ""
        return invalid(
            f"This model's maximum context length is {self.tokens} tokens of prompt and answer"
            f" together{why}; the prompt is too long: it has {found}, at most {self.tokens - 1} are"
            " possible.",
            param,
            "context_length_exceeded",
        )
