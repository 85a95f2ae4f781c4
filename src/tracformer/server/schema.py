"""Types of request fields, and error answers in the shape of each protocol.

`Strict` and `Lenient` are the base classes of requests: one refuses unknown fields, the other
ignores them. `with_options` adds the options of `InfillOptions` or `ScoreOptions` to a request, so
that their defaults, bounds and descriptions are written once.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from tracformer.generation.request_options import FlatOption, flat_options
from tracformer.options import Bounds, simple_type

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


class ClientGoneError(Exception):
    """The client closed the connection; there is no reader for the answer."""


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


LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 100.0
MOST_FIELDS = 100  # of a request or an object in it
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
# A list whose first wrong element ends its validation: an error for each of thousands of elements
# takes seconds. `Several` are few enough for checks in Python.
Many = Annotated[list[T], Field(fail_fast=True)]
Several = Annotated[list[T], Field(fail_fast=True, max_length=4096)]


def _check_text(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is NUL, which is not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is half of a surrogate pair, which is not text"
        ) from None
    return text


def tagged(name: str) -> Tag:
    """Return the tag of one alternative of a union; error paths leave it out."""
    return Tag(TAG + name)


def choose_by(kind: Callable[[Any], str | None], otherwise: str | None = None) -> Discriminator:
    """Return a discriminator of tagged alternatives, so that errors concern the one that was meant.

    Args:
        kind: Returns the tag of the alternative for a value, or None if there is none.
        otherwise: Error message for a value that has no alternative.
    """

    def choose(value: Any) -> str | None:
        name = kind(value)
        return None if name is None else TAG + name

    return Discriminator(
        choose,
        custom_error_type=None if otherwise is None else "wrong_type",
        custom_error_message=otherwise,
    )


Text = Annotated[str, AfterValidator(_check_text)]
ShortText = Annotated[str, Field(max_length=200)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
NotNegative = Annotated[int, Field(ge=0, le=LARGEST_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_text)]
StopStrings = Annotated[
    Annotated[StopString, tagged("text")] | Annotated[Several[StopString], tagged("list")],
    choose_by(lambda value: "list" if isinstance(value, list) else "text"),
]


def as_tuple(stops: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    return () if stops is None else (stops,) if isinstance(stops, str) else tuple(stops)


class Strict(BaseModel):
    """A request in which an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Refuse a flood of unknown fields before an error is made for each."""
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"{len(value)} fields; at most {MOST_FIELDS} are allowed")
        return value


class Lenient(BaseModel):
    """A request whose unknown fields are ignored: clients of other servers send many."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def with_options(kind: type[Any], skip: Collection[str] = ()) -> Callable[[type[M]], type[M]]:
    """Return a class decorator that adds the options of a class to the fields of a request.

    Defaults, bounds and descriptions are those of the options.

    Args:
        kind: A class of options, such as `InfillOptions`.
        skip: Options that a client cannot set, or that the request declares itself.
    """
    fields: dict[str, Any] = {
        name: _field_of(option) for name, option in flat_options(kind).items() if name not in skip
    }

    def add_fields(request: type[M]) -> type[M]:
        return create_model(request.__name__, __base__=request, __doc__=request.__doc__, **fields)

    return add_fields


def _field_of(option: FlatOption) -> tuple[Any, Any]:
    """Return the type and the field of an option, as pydantic's `create_model` takes them."""
    default, bounds = option.default, option.info.bounds or Bounds()
    kind = simple_type(option.type)
    hint: Any = kind
    limits: dict[str, Any] = {}
    if kind is None:  # a list of token ids
        hint, default = Many[NotNegative], list(default)
    elif kind is str:
        names = bounds.names()
        hint = Literal[names] if names else ShortText
    elif kind in (int, float):
        low, high, above, below, _ = bounds
        below = None if below is None or math.isinf(below) else below  # JSON has no infinity
        if low is not None and default is not None:
            low = min(low, default)  # a default such as 0 for "off" can be sent too
        if (low, above) != (None, None) and (high, below) == (None, None):
            high = LARGEST_INT if kind is int else LARGEST_FLOAT
        limits = {"ge": low, "le": high, "gt": above, "lt": below}
    if default is None:
        hint = hint | None
    description = option.info.help
    if default is True:  # the help text of a flag says what the flag switches off
        description = f"false: {description}"
    return hint, Field(
        default,
        description=description,
        **{name: limit for name, limit in limits.items() if limit is not None},
    )
