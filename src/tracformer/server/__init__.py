"""An HTTP server for one model.

It has its own protocol and those of OpenAI, llama.cpp and Mistral, and has a web page. This
module holds the settings of a server, which the command line is derived from; it imports none
of the server's libraries.
"""

import ipaddress
from dataclasses import dataclass

from tracformer.options import check_options, option


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for; what exceeds a limit is refused."""

    body: int = 2**20  # bytes
    values: int = 2**15  # strings, members and elements in the JSON of a body
    depth: int = 32  # of its nesting
    blanks: int = 64
    n: int = 16  # samples
    best_of: int = 32
    prompts: int = 64  # of one completions request
    samples: int = 256  # of all its prompts together
    blank_tokens: int = 128  # longest blank of unknown length
    length_draws: int = 32
    draws: int = 256  # of an estimated score
    top: int = 20  # candidates of each token
    beam: int = 32  # width of a search
    nodes: int = 2000  # budget of a search
    stops: int = 4  # stop strings
    steps: int = 1024  # of a reverse process


LONGEST = 10**9  # seconds; clocks overflow not far beyond


@dataclass(frozen=True)
class Settings:
    """Settings of a server."""

    host: str = option("127.0.0.1", "address to listen on (default: 127.0.0.1, this machine only)")
    port: int = option(8000, "port to listen on; 0 takes any free port", low=0, high=2**16 - 1)
    api_key: str | None = option(None, "key that clients must send", metavar="KEY")
    origins: tuple[str, ...] = option(
        (), "origins of web pages that may call this server, or * for all"
    )
    hosts: tuple[str, ...] = option(
        (), "further names in the Host header by which this server may be called, or * for all"
    )
    no_key: bool = option(False, "listen to other machines although there is no API key")
    aliases: tuple[str, ...] = option((), "further names of the model, or * for any name")
    rows: int = option(
        64, "sequences in one batch, and requests that run at a time", low=1, metavar="N"
    )
    queue: int = option(64, "requests that may wait; more are refused", low=0, metavar="N")
    timeout: float = option(
        60.0,
        "time limit of a request, with its time in the queue",
        above=0,
        high=LONGEST,
        metavar="SECONDS",
    )
    connections: int = option(
        512, "open connections; idle ones are closed for new ones", low=1, metavar="N"
    )
    header_timeout: float = option(
        10.0,
        "time limit for a client to send its headers",
        above=0,
        high=LONGEST,
        metavar="SECONDS",
    )
    body_timeout: float = option(
        20.0,
        "time limit for a client to send its body, or to read more of its answer",
        above=0,
        high=LONGEST,
        metavar="SECONDS",
    )
    drain: float = option(
        30.0,
        "time for running requests to finish after SIGTERM",
        above=0,
        high=LONGEST,
        metavar="SECONDS",
    )
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        check_options(self)
        if not self.host:
            raise ValueError("host is empty; give an address, such as 127.0.0.1 or 0.0.0.0")
        if self.api_key is not None and self.api_key.strip() != self.api_key:
            raise ValueError("the API key begins or ends with white space; leave that out")
        if self.api_key == "":
            raise ValueError("the API key is empty; leave it out for a server without a key")
        if self.api_key is None and not self.no_key and not is_loopback(self.host):
            raise ValueError(
                f"host is {self.host!r}, which other machines can reach, and there is no API key; "
                "set one in TRACFORMER_API_KEY, or add --no-key to let everyone call this server"
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
