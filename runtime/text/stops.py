"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """A set of stop strings as an automaton (Aho and Corasick 1975, CACM 18(6)), for many finders.

    Args:
        stops: Duplicates count once; none: nothing ever stops.

    Raises:
        ValueError: If a stop string is empty.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        if "" in self.stops:
            raise ValueError("a stop string must not be empty")
        # One node per prefix of a stop string, 0: nothing matched.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in self.stops:
            node = 0
            for character in stop:
                if character not in self._next[node]:
                    self._next[node][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._match.append(None)
                node = self._next[node][character]
            self._match[node] = stop
        # Node -> the longest other prefix that the text also ends with; nodes by depth.
        self._fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for node in queue:
            for character, child in self._next[node].items():
                self._fail[child] = self.advance(self._fail[node], character)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)

    def advance(self, node: int, character: str) -> int:
        """Node of the longest prefix of a stop string that the text ends with, one later."""
        while character not in self._next[node]:
            if node == 0:
                return 0
            node = self._fail[node]
        return self._next[node][character]

    def depth(self, node: int) -> int:
        """Characters of the node's prefix."""
        return self._depth[node]

    def match(self, node: int) -> str | None:
        """The longest stop string that ends here."""
        return self._match[node]


class StopFinder:
    """Looks for stop strings in one answer.

    The stop string that is complete first ends the answer, as it must when nothing beyond it is to
    be generated; of several complete at the same character, the longest. So what comes out does
    not depend on how the text was cut. Text that may be the beginning of a stop string is held
    back, nothing else.

    Args:
        stops: Stop strings, or an automaton made of them before.
        include_stop: The stop string is part of the answer.

    Raises:
        ValueError: If a stop string is empty.
    """

    def __init__(self, stops: Iterable[str] | StopStrings = (), include_stop: bool = False) -> None:
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._include_stop = include_stop
        self._node = 0
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Look on in more text.

        Returns:
            Text to give out now, and the stop string once it was found; what comes after it is
            dropped, in this push and later ones.
        """
        if self.found is not None:
            return "", self.found
        if not self._stops.stops:
            return text, None
        node, end, found = self._walk(text)
        if found is not None:
            self.found = found
            seen = self._held + text[:end]
            self._node, self._held = 0, ""
            return (seen if self._include_stop else seen[: len(seen) - len(found)]), found
        seen = self._held + text
        cut = len(seen) - self._stops.depth(node)
        self._node, self._held = node, seen[cut:]
        return seen[:cut], None

    def would_stop(self, text: str) -> bool:
        """Whether ``push`` of the text would find a stop string; nothing changes."""
        return self.found is None and self._walk(text)[2] is not None

    def pass_over(self, text: str) -> str:
        """Text in which no stop counts (an answer's required minimum); given out at once.

        A stop string that begins before its end does not count either.
        """
        seen = self._held + text
        self._node, self._held = 0, ""
        return seen

    def finish(self) -> str:
        """What was held back: the answer has ended without a stop string."""
        return self.pass_over("")

    def _walk(self, text: str) -> tuple[int, int, str | None]:
        """Node after the text, or characters up to the first end of a stop string and that."""
        stops, node = self._stops, self._node
        for index, character in enumerate(text):
            node = stops.advance(node, character)
            if (found := stops.match(node)) is not None:
                return node, index + 1, found
        return node, len(text), None
