"""Error answers: one exception, written in the shape of the protocol that the client speaks."""

from collections.abc import Iterable, Mapping
from typing import Any

INVALID, AUTHENTICATION, NOT_FOUND = (
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
)
TIMEOUT, BUSY, UNAVAILABLE, SERVER = (
    "timeout_error",
    "rate_limit_error",
    "unavailable_error",
    "server_error",
)
# pydantic's names for errors of the body as a whole
NO_JSON, NO_OBJECT = "json_invalid", ("missing", "model_type", "model_attributes_type")
TAG = "as "  # opens the tags of unions in the schema, which are no part of a field's path


class ApiError(Exception):
    """An error answer.

    Args:
        status: HTTP status.
        message: What is wrong, what is allowed, what to do.
        kind: One of the error types above.
        param: Name of the field that is wrong.
        code: Short name of the error for programs.
        headers: Further headers of the answer.
        details: All complaints about the fields of the request, as pydantic lists them.
    """

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
        self.message = _encodable(message)
        self.headers = dict(headers or {})
        self.details = [dict(detail) for detail in details]


def busy(message: str, retry_after: int) -> ApiError:
    """Return the error of a full queue."""
    return ApiError(
        429, message, BUSY, code="queue_full", headers={"Retry-After": str(retry_after)}
    )


def late(seconds: float) -> ApiError:
    """Return the error of a request that exceeded its time limit."""
    return ApiError(
        408,
        f"the request was not done within {seconds:g} seconds; ask for fewer tokens or samples, "
        "or allow more time",
        TIMEOUT,
        code="timeout",
    )


def invalid(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """Return the error of a request that does not fit its schema.

    The message is the first complaint; it never repeats the values that the client sent.

    Args:
        errors: pydantic's list of complaints.
    """
    details = [
        {"loc": _path_of(error), "msg": _complaint(error), "type": error["type"]}
        for error in errors
    ]
    first = details[0]
    where = ""
    if first["type"] != NO_JSON:
        where = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    return ApiError(
        400, message[:500], param=where[:100] or None, code=str(first["type"]), details=details[:20]
    )


def _path_of(error: Mapping[str, Any]) -> list[Any]:
    """Return the path of a field, without the tags of unions that pydantic puts into it."""
    return [
        _encodable(part)
        for part in error["loc"]
        if not (isinstance(part, str) and part.startswith(TAG))
    ]


def _complaint(error: Mapping[str, Any]) -> str:
    if error["type"] == NO_JSON:
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
    if tuple(error["loc"]) == ("body",) and error["type"] in NO_OBJECT:
        return "the body must be a JSON object, sent with `Content-Type: application/json`"
    return str(_encodable(error["msg"])).removeprefix("Value error, ")


def body_of(problem: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of an error, in the shape of the protocol at this path."""
    if path == "/infill":
        return problem.status, {
            "error": {"code": problem.status, "message": problem.message, "type": problem.kind}
        }
    error = {
        "message": problem.message,
        "type": problem.kind,
        "param": problem.param,
        "code": problem.code,
    }
    if path != "/v1/fim/completions":
        return problem.status, {"error": error}
    if problem.details:  # Mistral's clients expect schema errors as 422
        return 422, {"detail": problem.details}
    return problem.status, {"object": "error", **error}


def _encodable(part: Any) -> Any:
    """Return a string with half surrogate pairs replaced, so that it can be encoded."""
    return part.encode("utf-8", "replace").decode() if isinstance(part, str) else part
