"""Fields of requests, and settings of the server.

What the protocols' requests are made of: texts that are text, and models that are strict or
lenient about fields they do not know.

What one may set about a server, and the limits that keep one request from harming the others.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is NUL, which is not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is half of a surrogate pair, which is not text"
        ) from None
    return text


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, Field(max_length=200)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stops = (
    Annotated[Text, Field(min_length=1, max_length=200)]
    | list[Annotated[Text, Field(min_length=1, max_length=200)]]
)


class Strict(BaseModel):
    """A field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """Clients of other servers send fields that mean nothing here: they are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def listed(stops: str | list[str] | None) -> tuple[str, ...]:
    return () if stops is None else (stops,) if isinstance(stops, str) else tuple(stops)


LONGEST = 10**9  # seconds; clocks overflow not far beyond


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for.

    What exceeds them is refused with a message that names the limit.
    """

    body: int = 2**20  # bytes
    blanks: int = 64
    n: int = 16  # alternatives
    best_of: int = 32
    prompts: int = 64  # of one completions request
    blank_tokens: int = 128  # the longest blank of unknown length
    length_draws: int = 32
    top: int = 20  # candidates of each token
    beam: int = 32  # width of a search
    nodes: int = 2000  # budget of a search
    stops: int = 4  # strings that end a text
    steps: int = 1024  # of a reverse process


@dataclass(frozen=True)
class Settings:
    """`rows`: sequences that step together, and requests that run at once.

    `queue`: requests that may wait for their turn.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    origins: tuple[str, ...] = ()  # of pages elsewhere that may call; "*" for all
    aliases: tuple[str, ...] = ()  # further names that the model answers to; "*" for any
    rows: int = 64
    queue: int = 64
    timeout: float = 60.0  # seconds a request may take, its waiting included
    body_timeout: float = 20.0  # seconds that a client may take to send its body
    drain: float = 30.0  # seconds that running requests have left after SIGTERM
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name in ("timeout", "body_timeout", "drain"):
            if not 0 < getattr(self, name) <= LONGEST:  # nan is not either
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be more than 0 seconds, and at most "
                    f"{LONGEST}"
                )
        if self.rows <= 0:
            raise ValueError(f"rows is {self.rows}; it must be more than 0")
        if self.queue < 0:
            raise ValueError(f"queue is {self.queue}; it must be 0 or more")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; it must lie in 0..65535 (0: any that is free)")
        if self.api_key == "":
            raise ValueError("the API key is empty; leave it out for a server without one")
