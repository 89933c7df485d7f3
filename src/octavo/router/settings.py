"""RouterConfig: every option of the router that is a number or a name, once.

Owns the fields (the CLI's flags are these same fields). Invariant: a RouterConfig that was made may be used as it is.
"""

from __future__ import annotations

import dataclasses

from octavo.config.settings import read_value, setting, settings_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How the router listens, how long it waits, in seconds, and how often it tries. Raises ConfigError."""

    host: str = setting("127.0.0.1", "address to listen on", "str")
    port: int = setting(8000, "port to listen on; 0: the system chooses", "int", low=0, high=65535)
    connect_timeout: float = setting(5.0, "seconds to reach a server", "float", above=0.0, high=3600.0)
    timeout: float = setting(
        600.0,
        "seconds that a server which is well may say nothing of a request; an answer that is no stream is not heard "
        "of before its end",
        "float",
        above=0.0,
        high=86400.0,
    )
    health_interval: float = setting(1.0, "seconds between two looks at a server", "float", above=0.0, high=3600.0)
    health_timeout: float = setting(
        5.0, "seconds after which a server that does not answer a look is down", "float", above=0.0, high=3600.0
    )
    retries: int = setting(2, "tries after the first, on other servers, of each phase", "int", low=0, high=100)
    drain_seconds: float = setting(30.0, "seconds for requests to end after SIGTERM", "float", above=0.0, high=86400.0)
    max_restarts: int = setting(
        5, "times within ten minutes that a server of --start-pair is started again", "int", low=0, high=1000
    )

    pass_kv_transfer_params: bool = setting(
        False,
        "pass a client's own kv_transfer_params on, with the addresses that they name: for clients that are routers",
        "bool",
    )

    def __post_init__(self) -> None:
        """Check each field by itself."""
        for name, fact in ROUTER_SETTINGS.items():
            object.__setattr__(self, name, read_value(name, fact, getattr(self, name)))


ROUTER_SETTINGS = settings_of(RouterConfig)
