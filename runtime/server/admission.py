"""Who may wait: places in the queue, taken before tokenizing, given back at the first token."""

from __future__ import annotations

from collections import Counter

from runtime.server.errors import ApiError
from runtime.server.settings import ServerSettings


class Admission:
    """Counts answers without a first token and their prompt tokens.

    Attributes:
        queued: Answers that wait for their first token, those being tokenized included.
        queued_tokens: Prompt tokens of those.
        active: Requests under way, those that are already answering included.
        rejected: Reason -> requests refused.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.queued = 0
        self.queued_tokens = 0
        self.active = 0
        self.rejected: Counter[str] = Counter()

    def enter(self) -> Place:
        """A place for one request, before anything of it is tokenized.

        Raises:
            ApiError: 429, if the queue is full.
        """
        if self.queued + 1 > self._settings.max_queued_requests:
            raise self._full("requests", self.queued, self._settings.max_queued_requests)
        self.active += 1
        return Place(self)

    def grow(self, place: Place, sequences: int, tokens: int) -> None:
        """The place is for so many answers with so many prompt tokens in sum, it turns out.

        What is alone in the queue may have more tokens than the limit, or it could never be served.

        Raises:
            ApiError: 429, if that is too much for the queue now.
        """
        others = self.queued - place.waiting
        if others and others + sequences > self._settings.max_queued_requests:
            raise self._full("requests", others, self._settings.max_queued_requests)
        other_tokens = self.queued_tokens - place.waiting_tokens
        if other_tokens and other_tokens + tokens > self._settings.max_queued_tokens:
            raise self._full("tokens", other_tokens, self._settings.max_queued_tokens)
        place.give_back()
        place.take(sequences, tokens)

    def _full(self, what: str, queued: int, limit: int) -> ApiError:
        self.rejected[f"queued_{what}"] += 1
        return ApiError(
            429,
            f"The queue is full: {queued} {what} of at most {limit} are waiting.",
            code="queue_full",
            headers=self.retry_headers(),
        )

    def retry_headers(self) -> dict[str, str]:
        """Retry-After, where it is wanted."""
        if not self._settings.return_retry_after:
            return {}
        return {"Retry-After": str(self._settings.retry_after_s)}


class Place:
    """One request's part of the queue; giving back more than was taken is not possible."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._has_left = False
        self.waiting = 0
        self.waiting_tokens = 0
        self.take(1, 0)

    def take(self, sequences: int, tokens: int) -> None:
        """Wait with so many answers."""
        self.waiting += sequences
        self.waiting_tokens += tokens
        self._admission.queued += sequences
        self._admission.queued_tokens += tokens

    def started(self, tokens: int) -> None:
        """One answer with a prompt of so many tokens has its first token."""
        self._return(min(1, self.waiting), min(tokens, self.waiting_tokens))

    def give_back(self) -> None:
        """Nothing of it waits any more."""
        self._return(self.waiting, self.waiting_tokens)

    def leave(self) -> None:
        """The request has ended; a second call changes nothing."""
        self.give_back()
        if not self._has_left:
            self._has_left = True
            self._admission.active -= 1

    def _return(self, sequences: int, tokens: int) -> None:
        self.waiting -= sequences
        self.waiting_tokens -= tokens
        self._admission.queued -= sequences
        self._admission.queued_tokens -= tokens
