"""What a client is told when something is wrong: one exception, written in the shape of the protocol that was spoken."""

from collections.abc import Iterable, Mapping
from typing import Any

INVALID, AUTHENTICATION, NOT_FOUND = "invalid_request_error", "authentication_error", "not_found_error"
TIMEOUT, BUSY, UNAVAILABLE, SERVER = "timeout_error", "rate_limit_error", "unavailable_error", "server_error"


class ApiError(Exception):
    """An answer other than the wanted one. `param` names the field that is wrong, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.message = message.encode("utf-8", "replace").decode()  # half a surrogate pair may be quoted in it
        self.headers = dict(headers or {})
        self.details = [dict(detail) for detail in details]


def busy(message: str, retry_after: int) -> ApiError:
    return ApiError(429, message, BUSY, code="queue_full", headers={"Retry-After": str(retry_after)})


def late(seconds: float) -> ApiError:
    return ApiError(408, f"the request was not done within {seconds:g} seconds; ask for less, or for more time", TIMEOUT, code="timeout")


def invalid(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """From pydantic's list of complaints; what the client sent is not repeated."""
    details = [
        {
            "loc": [_printable(part) for part in error["loc"] if "[" not in str(part)],  # pydantic's names of alternatives are not fields
            "msg": _printable(error["msg"]).removeprefix("Value error, "),
            "type": error["type"],
        }
        for error in errors
    ]
    first = details[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    return ApiError(400, message[:500], param=where[:100] or None, code=str(first["type"]), details=details[:20])


def body_of(problem: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer, in the shape of the protocol that lives at this path."""
    if path == "/infill":
        return problem.status, {"error": {"code": problem.status, "message": problem.message, "type": problem.kind}}
    if path == "/v1/fim/completions":
        return _mistral(problem)
    error = {"message": problem.message, "type": problem.kind, "param": problem.param, "code": problem.code}
    return problem.status, {"error": error}


def _mistral(problem: ApiError) -> tuple[int, dict[str, Any]]:
    if problem.details:  # what does not fit the schema
        return 422, {"detail": problem.details}
    told = {"object": "error", "message": problem.message, "type": problem.kind, "param": problem.param, "code": problem.code}
    return problem.status, told


def _printable(part: Any) -> Any:
    return part.encode("utf-8", "replace").decode() if isinstance(part, str) else part
