"""Numbers an engine keeps about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Sums since the start; see ``runtime.engine.frames.EngineStats`` for their meaning."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    refused: int = 0
    aborted: int = 0
    finished: int = 0
    failed_steps: int = 0
    held_back: int = 0
    step_tokens: list[int] = field(default_factory=list)

    def step(self, tokens: int) -> None:
        """A step that computed so many tokens."""
        self.steps += 1
        self.computed_tokens += tokens
        if tokens and len(self.step_tokens) < 4096:
            self.step_tokens.append(tokens)

    def take_step_tokens(self) -> tuple[int, ...]:
        """Tokens of the steps since the last call."""
        taken, self.step_tokens = tuple(self.step_tokens), []
        return taken
