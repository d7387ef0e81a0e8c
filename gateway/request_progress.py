"""How far one request is, for the comments on its stream and for /v1/status."""

import math
import time
from dataclasses import dataclass
from typing import Any

from gateway.admission import Admission, Place
from gateway.generation import Generation


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """A view of a request that waits, whose prompt is read, or whose answer is generated."""

    admission: Admission
    place: Place
    generation: Generation
    arrived_at: float

    def sentence(self) -> str:
        """For people, and for scripts that read comments; one line."""
        prompt = self.generation.prompt
        match self._state():
            case "waiting" if self.place.granted.done():
                return "waiting for the workers to be ready"
            case "waiting":
                ahead = _counted(self.admission.num_ahead(self.place), "request")
                return f"{ahead} ahead, {self.admission.num_running} running"
            case "reading":
                rest_s = prompt.rest_s(time.monotonic())
                estimate = f", {math.ceil(rest_s)} s to go" if rest_s is not None else ""
                return f"prompt {prompt.num_read}/{prompt.num_tokens} tokens read{estimate}"
            case _:
                return f"{_counted(self.generation.num_output_tokens, 'token')} generated"

    def fields(self) -> dict[str, Any]:
        """The same for programs."""
        prompt, now = self.generation.prompt, time.monotonic()
        rest_s = prompt.rest_s(now) if self._state() == "reading" else None
        return {
            "state": self._state(),
            "age_s": round(now - self.arrived_at, 3),
            "num_ahead": self.admission.num_ahead(self.place),
            "prompt_tokens": prompt.num_tokens,
            "prompt_tokens_read": prompt.num_read,
            "prompt_rest_s": round(rest_s, 3) if rest_s is not None else None,
            "completion_tokens": self.generation.num_output_tokens,
        }

    def _state(self) -> str:
        if not self.generation.has_begun:
            return "waiting"
        return "generating" if self.generation.num_output_tokens else "reading"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
