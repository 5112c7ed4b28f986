"""From a checked request to its answer: outputs of the engine in, bytes to the client out."""

from __future__ import annotations

import time

from starlette.types import Receive, Send

from runtime.engine.frames import SequenceOutput
from runtime.server.admission import Place
from runtime.server.body_reading import ClientGoneError
from runtime.server.call import Call
from runtime.server.choice import Choice, Piece, joined
from runtime.server.engine_client import EngineGoneError
from runtime.server.errors import ApiError, invalid
from runtime.server.flow import Flow, Halt
from runtime.server.front_end import FrontEnd
from runtime.server.job import Job
from runtime.server.logs import log
from runtime.server.request_metrics import SequenceClock
from runtime.server.responses import send_bytes
from runtime.server.usage import usage_of
from runtime.server.writer import DONE, Writer, error_event
from runtime.text.stops import StopStrings

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_GRAMMAR = "grammar"
_NO_MEMORY = "the memory for keys and values"


class Answering:
    """One request's way through the engine.

    Args:
        front: The front end.
        call: The HTTP request.
        job: What is asked.
        writer: How it is answered.
        place: In the queue; every first token gives back a part of it.
    """

    def __init__(self, front: FrontEnd, call: Call, job: Job, writer: Writer, place: Place) -> None:
        self._front = front
        self._call = call
        self._job = job
        self._writer = writer
        self._place = place
        stops = StopStrings(job.stops)
        count = len(job.prompts) * job.n
        self._choices = [
            Choice(index, job, stops, front.tokenizing.tokenizer) for index in range(count)
        ]
        self._clocks = [
            SequenceClock(
                front.metrics,
                call.arrived_s,
                len(job.prompt_of(index).tokens),
                counts_prompt=index % job.n == 0,
            )
            for index in range(count)
        ]
        self._unfinished = count
        self._has_begun = False
        self._answer_text = [""] * count

    async def run(self, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            ApiError: If nothing has been sent yet.
            ClientGoneError: If nobody is there to be answered.
        """
        engine = self._front.require_open()
        prefix = f"{self._call.request_id}-{self._front.next_number()}"
        flow = Flow(engine, self._job.make_sequences(prefix), receive)
        with self._front.under_way(flow):
            try:
                flow.start(self._call.left_s())
                await (self._stream if self._job.stream else self._whole)(flow, send)
            except ClientGoneError:
                self._count_unfinished("abort", time.monotonic())
                raise
            except ApiError as error:
                self._count_unfinished("abort" if flow.halted else "error", time.monotonic())
                self._call.notes["error"] = error.code or error.message[:200]
                raise
            finally:
                self._note()
                await flow.close()

    async def _whole(self, flow: Flow, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        while self._unfinished:
            for index, event in await self._next(flow):
                if (piece := self._apply(flow, index, event)) is not None:
                    pieces[index].append(piece)
        ordered = [joined(each) for each in pieces]
        usage = usage_of(self._job, self._choices)
        if self._front.settings.log_prompts:
            self._answer_text = [piece.text for piece in ordered]
        await send_bytes(send, 200, self._writer.whole(ordered, self._choices, usage))

    async def _stream(self, flow: Flow, send: Send) -> None:
        """Status and headers wait for the first output, so that a refusal has its own status."""
        failure: ApiError | None = None
        while self._unfinished and failure is None:
            data, failure = await self._next_bytes(flow)
            if failure is not None and not self._has_begun and not data:
                raise failure
            if data:
                await self._begin(send)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if failure is not None:
            # As vLLM ends such a stream: an event with the error object, then [DONE].
            await send({"type": "http.response.body", "body": error_event(failure) + DONE})
            self._count_unfinished("abort" if flow.halted else "error", time.monotonic())
            self._call.notes["error"] = failure.code or failure.message[:200]
            return
        end = DONE
        if self._job.include_usage:
            end = self._writer.usage(usage_of(self._job, self._choices)) + DONE
        await send({"type": "http.response.body", "body": end})

    async def _begin(self, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send(
                {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
            )

    async def _next_bytes(self, flow: Flow) -> tuple[bytes, ApiError | None]:
        """Chunks of all that has come, and what ends the stream after them."""
        chunks: list[bytes] = []
        pieces: dict[int, list[Piece]] = {}
        failure: ApiError | None
        try:
            for index, event in await self._next(flow):
                choice = self._choices[index]
                is_first = not choice.state.has_begun
                piece = self._apply(flow, index, event)
                if is_first:
                    chunks.append(self._writer.begin(choice))
                if piece is not None:
                    pieces.setdefault(index, []).append(piece)
            failure = None
        except ApiError as error:
            failure = error
        except ClientGoneError:
            raise
        except Exception as error:
            failure = self._lost(error)
        for index, found in pieces.items():
            piece = joined(found)
            if self._front.settings.log_prompts:
                self._answer_text[index] += piece.text
            chunks.append(self._writer.chunk(piece, self._choices[index]))
        return b"".join(chunks), failure

    async def _next(self, flow: Flow) -> list[tuple[int, SequenceOutput | Exception]]:
        events = await flow.next_events()
        match flow.halted:
            case None:
                return list(events)
            case Halt.CLIENT_GONE:
                raise ClientGoneError
            case Halt.TIMEOUT:
                raise ApiError(
                    504,
                    f"The answer was not done within {self._call.timeout_s:g} s.",
                    code="request_timeout",
                )
            case Halt.SHUTDOWN:
                raise self._front.unavailable(
                    "server_shutdown", "The server shut down before the answer was done."
                )

    def _apply(self, flow: Flow, index: int, event: SequenceOutput | Exception) -> Piece | None:
        """What an event makes certain.

        Raises:
            ApiError: If it ends the request.
        """
        if isinstance(event, Exception):
            raise self._lost(event)
        choice = self._choices[index]
        state = choice.state
        if state.finish_reason is not None:
            return None
        if event.finish_reason in ("error", "abort"):
            raise self._failed(event, has_begun=state.has_begun)
        now = time.monotonic()
        if not state.has_begun:
            self._place.started(len(self._job.prompt_of(index).tokens))
            if self._unfinished == len(self._choices):
                self._call.notes.setdefault("ttft_s", round(now - self._call.arrived_s, 6))
        before = state.num_tokens
        piece = choice.push(event)
        self._clocks[index].output(event, state.num_tokens - before, now)
        if state.finish_reason is not None:
            self._unfinished -= 1
            last = event if event.finish_reason is not None else None
            self._clocks[index].finished(state.finish_reason, state.num_tokens, last, now)
            flow.end(index)
        return piece

    def _lost(self, error: Exception) -> ApiError:
        if isinstance(error, EngineGoneError):
            return self._front.unavailable(
                "engine_gone", "The engine ended before the answer was done."
            )
        log().error("answer_failed", request_id=self._call.request_id, exc_info=error)
        return ApiError(500, "The request failed inside the server.", code="internal_error")

    def _failed(self, output: SequenceOutput, *, has_begun: bool) -> ApiError:
        if output.finish_reason == "abort":
            return self._front.unavailable("aborted", "The engine gave the request up.")
        message = output.error or "The engine could not answer."
        if not has_begun:
            if message.startswith(_GRAMMAR):
                param = self._job.form_field or "structured_outputs"
                # The engine's words may be one name of its grammar compiler, such as of a limit.
                reason = message.partition(": ")[2] or message
                return invalid(
                    f"{param}: this form of the answer cannot be compiled, or no answer has it"
                    f" ({reason}).",
                    param,
                    "invalid_grammar",
                )
            if message.startswith(_NO_MEMORY):
                words = message[:1].upper() + message[1:] + "."
                return invalid(words, "prompt", "context_length_exceeded")
        return ApiError(500, f"The engine failed: {message}", code="engine_error")

    def _count_unfinished(self, reason: str, now: float) -> None:
        for choice, clock in zip(self._choices, self._clocks, strict=True):
            if choice.state.finish_reason is None:
                choice.state.finish_reason = reason
                clock.finished(reason, choice.state.num_tokens, None, now)
                self._unfinished -= 1

    def _note(self) -> None:
        usage = usage_of(self._job, self._choices)
        reasons = dict.fromkeys(choice.state.finish_reason for choice in self._choices)
        self._call.notes |= {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "finish_reason": ",".join(str(reason) for reason in reasons),
        }
        if self._front.settings.log_prompts:
            decode = self._front.tokenizing.tokenizer
            self._call.notes["prompt"] = [
                prompt.text or (decode.decode(prompt.tokens) if decode else list(prompt.tokens))
                for prompt in self._job.prompts
            ]
            self._call.notes["answer"] = self._answer_text
