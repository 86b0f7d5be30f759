"""Errors as clients get them: a status and one message."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclasses.dataclass
class ApiError(Exception):
    """An answer other than success."""

    status: int
    message: str
    code: str | None = None  # a word for programs
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Returns the type, in the words of OpenAI and Anthropic."""
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        return _TYPES.get(self.status, fallback)

    def body(self, path: str) -> dict[str, Any]:
        """Returns the JSON of the answer to a request for `path`."""
        if path.startswith("/v1/messages"):
            shown = {"type": self.kind, "message": self.message}
            return {"type": "error", "error": shown}
        details = {"type": self.kind, "param": None, "code": self.code}
        return {"error": {"message": self.message, **details}}


def bad_request(message: str, code: str | None = None) -> ApiError:
    """Returns the answer to a request that is wrong."""
    return ApiError(400, message, code)


def busy(message: str, status: int = 429) -> ApiError:
    """Returns the answer to a request that may come again later."""
    return ApiError(status, message, headers={"Retry-After": "1"})
