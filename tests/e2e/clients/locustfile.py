"""Many users that read streams, some of whom leave early.

`MODEL=tiny locust -f locustfile.py --headless -u 6 -r 6 -t 30s -H URL --only-summary`. Exit code 1
if a request failed. Times of POST end with the answer's header, those of SSE with the first event
and with the last one.
"""

from __future__ import annotations

import json
import os
import time

from locust import HttpUser, constant, task

MODEL = os.environ.get("MODEL", "tiny")
HEADERS = {"Authorization": f"Bearer {os.environ.get('KEY', 'none')}"}
ANSWER_TOKENS = 16


class Reader(HttpUser):
    """Reads streams to their end; one in five leaves after the first chunk."""

    wait_time = constant(0.1)

    @task(4)
    def read(self) -> None:
        self._stream(leaves=False)

    @task(1)
    def leave(self) -> None:
        self._stream(leaves=True)

    def _stream(self, *, leaves: bool) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "say hello"}],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = time.perf_counter()
        first_s: float | None = None
        usage = None
        is_done = False
        with self.client.post(
            "/v1/chat/completions",
            json=body,
            headers=HEADERS,
            stream=True,
            catch_response=True,
            name="left early" if leaves else "read to the end",
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"status {answer.status_code}: {answer.text[:200]}")
                return
            for line in answer.iter_lines():
                if not line.startswith(b"data: "):
                    continue
                if first_s is None:
                    first_s = time.perf_counter() - began_s
                    if leaves:
                        answer.close()
                        answer.success()
                        break
                if line == b"data: [DONE]":
                    is_done = True
                    break
                usage = json.loads(line[6:]).get("usage") or usage
            if not leaves and not is_done:
                answer.failure("the stream ended without [DONE]")
            elif not leaves and (usage or {}).get("completion_tokens") != ANSWER_TOKENS:
                answer.failure(f"usage is {usage}")
            else:
                answer.success()
        if first_s is not None:
            self._tell("first token", first_s)
        if is_done:
            self._tell("whole answer", time.perf_counter() - began_s)

    def _tell(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=seconds * 1000,
            response_length=0,
            exception=None,
            context={},
        )
