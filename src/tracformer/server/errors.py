"""What a client is told when something is wrong: one exception, written in the shape of the
protocol that was spoken.
"""

from collections import Counter
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
# what pydantic calls them
NO_JSON, NO_OBJECT = "json_invalid", ("missing", "model_type", "model_attributes_type")


class ApiError(Exception):
    """An answer other than the wanted one.

    `param` names the field that is wrong, `code` is for programs.
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
        # half a surrogate pair may be quoted in it
        self.message = message.encode("utf-8", "replace").decode()
        self.headers = dict(headers or {})
        self.details = [dict(detail) for detail in details]


def busy(message: str, retry_after: int) -> ApiError:
    return ApiError(
        429, message, BUSY, code="queue_full", headers={"Retry-After": str(retry_after)}
    )


def late(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"the request was not done within {seconds:g} seconds; ask for less, or for more time",
        TIMEOUT,
        code="timeout",
    )


def invalid(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """From pydantic's list of complaints; what the client sent is not repeated."""
    errors = list(errors)
    details = [
        {"loc": _place(error), "msg": _complaint(error), "type": error["type"]} for error in errors
    ]
    told = _clearest(details, [_alternative(error) for error in errors])
    where = (
        ".".join(str(part) for part in told["loc"] if part != "body")
        if told["type"] != NO_JSON
        else ""
    )
    message = f"{where}: {told['msg']}" if where else str(told["msg"])
    return ApiError(
        400, message[:500], param=where[:100] or None, code=str(told["type"]), details=details[:20]
    )


def _place(error: Mapping[str, Any]) -> list[Any]:
    """The field's path.

    pydantic names the alternatives of a field in it (`Blank`, `list[int]`, `constrained-int`),
    which are no fields.
    """
    loc, named = _named(error)
    return [_printable(part) for part in (*filter(_is_field, loc), *named)]


def _alternative(error: Mapping[str, Any]) -> tuple[Any, ...]:
    """As what the field was read when it failed."""
    return tuple(part for part in _named(error)[0] if not _is_field(part))


def _named(error: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """pydantic's path, and apart from it what the client named, in whatever way."""
    loc = list(error["loc"])
    return (loc[:-1], loc[-1:]) if error["type"] == "extra_forbidden" else (loc, [])


def _is_field(part: Any) -> bool:
    return not isinstance(part, str) or (part.isidentifier() and not part[0].isupper())


def _complaint(error: Mapping[str, Any]) -> str:
    if error["type"] == NO_JSON:
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
    if tuple(error["loc"]) == ("body",) and error["type"] in NO_OBJECT:
        return "the body must be a JSON object, sent with `Content-Type: application/json`"
    return str(_printable(error["msg"])).removeprefix("Value error, ")


def _clearest(details: list[dict[str, Any]], alternatives: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Of a field that may be several things, what is wrong with the one that was meant: the
    alternative that fits furthest.

    That is the one that fails deepest inside; of those, with the fewest complaints; of those, whose
    first comes last in a list.
    """
    same = [
        each
        for each in zip(details, alternatives, strict=True)
        if each[0]["loc"][:2] == details[0]["loc"][:2]
    ]
    depth = max(len(detail["loc"]) for detail, _ in same)
    complaints = Counter(alternative for _, alternative in same)
    deepest = [each for each in same if len(each[0]["loc"]) == depth]
    fewest = min(complaints[alternative] for _, alternative in deepest)
    best = [each for each in deepest if complaints[each[1]] == fewest]
    firsts: dict[tuple[Any, ...], list[Any]] = {}
    for detail, alternative in best:
        firsts.setdefault(alternative, detail["loc"])
    place = max(firsts.values(), key=lambda loc: [part for part in loc if isinstance(part, int)])
    here = [detail for detail, _ in best if detail["loc"] == place]
    # the right type, a wrong value
    here = [each for each in here if not each["type"].endswith("_type")] or here
    return {**here[0], "msg": "; or: ".join(dict.fromkeys(each["msg"] for each in here))}


def body_of(problem: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer, in the shape of the protocol that lives at this path."""
    if path == "/infill":
        return problem.status, {
            "error": {"code": problem.status, "message": problem.message, "type": problem.kind}
        }
    if path == "/v1/fim/completions":
        return _mistral(problem)
    error = {
        "message": problem.message,
        "type": problem.kind,
        "param": problem.param,
        "code": problem.code,
    }
    return problem.status, {"error": error}


def _mistral(problem: ApiError) -> tuple[int, dict[str, Any]]:
    if problem.details:  # what does not fit the schema
        return 422, {"detail": problem.details}
    told = {
        "object": "error",
        "message": problem.message,
        "type": problem.kind,
        "param": problem.param,
        "code": problem.code,
    }
    return problem.status, told


def _printable(part: Any) -> Any:
    return part.encode("utf-8", "replace").decode() if isinstance(part, str) else part
