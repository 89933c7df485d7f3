"""ServeConfig: every option of the server, once.

Owns the fields (CLI flags and YAML keys are these same fields), the reading of key files, and what may be bound without
a key. Knows neither HTTP nor the engine. Invariant: a ServeConfig that was made may be served as it is: whatever else
could be wrong with it depends on the machine. Keys are shown by no `repr`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config.engine_config import SETTINGS, EngineConfig, load_config
from octavo.config.environment import SERVER_ENVIRONMENT
from octavo.config.settings import ConfigError, did_you_mean, fill, read_value, read_yaml, setting, settings_of
from octavo.config.vllm_options import translate
from octavo.text.template import CONTENT_FORMATS

MIN_KEY_CHARS = 16
_MAX_KEY_FILE_BYTES = 1 << 16
_SECRETS = ("api_key", "admin_key")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """What a user asks of the server. Raises ConfigError."""

    host: str = setting("127.0.0.1", "address to listen on; any other than loopback needs a key", "str")
    port: int = setting(8000, "port to listen on; 0: the system chooses", "int", low=0, high=65535)
    uds: str | None = setting(None, "listen on this Unix socket instead", "str")
    served_model_name: str | None = setting(
        None, "names that requests use, the first one in replies (default: the model's)", "str", several=True
    )
    root_path: str | None = setting(None, "prefix of every path, where a proxy leaves it: /api", "str")
    ssl_keyfile: str | None = setting(None, "file of the TLS certificate's private key: the server speaks HTTPS", "str")
    ssl_certfile: str | None = setting(None, "file of the TLS certificate", "str")
    ssl_ca_certs: str | None = setting(None, "file of the authorities that clients' certificates come from", "str")
    ssl_cert_reqs: int = setting(0, "clients' certificates: 0 none, 1 optional, 2 required", "int", low=0, high=2)
    chat_template: str | None = setting(None, "a file with another chat template", "str")
    chat_template_content_format: str = setting(
        "auto",
        "contents that a template gets: string joins parts, openai makes lists (auto: as the template asks)",
        "str",
        choices=CONTENT_FORMATS,
    )
    default_chat_template_kwargs: dict[str, Any] = setting(
        {}, "variables of the template where a request does not set them", "dict"
    )
    allowed_template_kwargs: str | None = setting(
        "auto", "variables of the template that requests may set, with commas; auto: its own", "str"
    )
    tool_call_parser: str = setting("auto", "how tool calls are read from the output; none: not at all", "str")
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "do not show the model tools that tool_choice none forbids it to call", "bool"
    )
    return_tokens_as_token_ids: bool = setting(False, "write tokens as token_id:5 in every answer", "bool")
    enable_force_include_usage: bool = setting(False, "end every stream with its counts", "bool")
    stream_interval: int = setting(1, "tokens between two events of a stream", "int", low=1, high=1 << 20)
    strict: bool = setting(False, "refuse unknown fields of a request instead of reporting them", "bool")
    disable_page: bool = setting(False, "serve no chat page at /", "bool")

    api_key: str | None = dataclasses.field(
        default=None,
        repr=False,
        metadata=setting(
            None, "keys that may use the API, with commas (better: --api-key-file)", "str", several=True
        ).metadata,
    )
    api_key_file: str | None = setting(None, "a file with such keys, one per line, readable by its owner only", "str")
    admin_key: str | None = dataclasses.field(
        default=None,
        repr=False,
        metadata=setting(None, "key that may administrate (better: --admin-key-file)", "str").metadata,
    )
    admin_key_file: str | None = setting(None, "a file with such keys, as above", "str")
    insecure_no_auth: bool = setting(False, "listen beyond loopback although there is no key", "bool")
    allowed_hosts: str | None = setting(
        None,
        "names that requests may give as Host, with commas; *: any (default: without a key on the loopback, "
        "localhost and addresses; else any)",
        "str",
        several=True,
    )
    cors_origins: str | None = setting(
        None, "web origins that may call from a browser, with commas", "str", several=True
    )

    max_num_queued_reqs: int = setting(1024, "most requests that wait for the engine", "int", low=1, high=1 << 20)
    max_num_queued_tokens: int | None = setting(
        None, "most prompt tokens that wait for the engine", "length", low=1, high=1 << 40
    )
    max_connections: int = setting(16384, "most open connections", "int", low=1, high=1 << 20)
    max_body_bytes: int = setting(8 << 20, "longest body of a request", "bytes", low=1024, high=1 << 30)
    max_items: int = setting(500_000, "most values in a request's JSON", "int", low=1000, high=100_000_000)
    max_prompts: int = setting(1024, "most prompts of one request", "int", low=1, high=1 << 16)
    max_request_logprobs: int = setting(
        1 << 24, "most log-probabilities of one request: tokens times those at each", "int", low=1, high=1 << 40
    )
    max_open_logprobs: int = setting(
        1 << 26, "most log-probabilities of the prompts of all open requests", "int", low=1, high=1 << 40
    )
    max_tools: int = setting(128, "most tools of one request", "int", low=1, high=1 << 16)
    header_timeout: float = setting(10.0, "seconds for a request's head to arrive", "float", above=0.0, high=3600.0)
    body_timeout: float = setting(30.0, "longest pause within a request's body", "float", above=0.0, high=3600.0)
    send_timeout: float = setting(60.0, "longest wait for a client to take bytes", "float", above=0.0, high=3600.0)
    idle_timeout: float = setting(75.0, "seconds that an idle connection stays open", "float", above=0.0, high=3600.0)
    request_timeout: float = setting(1800.0, "longest life of a request", "float", above=0.0, high=86400.0)
    keep_alive_interval: float = setting(
        15.0, "seconds without a token before a stream shows life", "float", above=0.0, high=3600.0
    )
    drain_seconds: float = setting(30.0, "seconds for requests to end after SIGTERM", "float", above=0.0, high=86400.0)

    access_log: bool = setting(True, "log every request (from --log-level info on)", "bool")
    disable_access_log_for_endpoints: str | None = setting(
        None, "paths whose requests are not logged: /health,/metrics", "str", several=True
    )
    log_format: str = setting("text", "text, or a JSON object per line", "str", choices=("text", "json"))

    def __post_init__(self) -> None:
        """Check each field by itself, and that what is open to others has a key."""
        for name, fact in SERVE_SETTINGS.items():
            read_value(name, fact, getattr(self, name))
        for name in _SECRETS:
            for key in split(getattr(self, name)):
                check_key(name, key, public=self.is_public)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given = "ssl_keyfile" if self.ssl_certfile is None else "ssl_certfile"
            raise ConfigError(
                given,
                getattr(self, given),
                "HTTPS needs a certificate and its key",
                "give both --ssl-certfile and --ssl-keyfile",
            )
        if self.root_path is not None and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise ConfigError("root_path", self.root_path, "must begin with a slash and end without one, as /api")
        if self.is_public and not self.insecure_no_auth and not self.has_key:
            raise ConfigError(
                "host",
                self.host,
                "others can reach it and there is no key",
                "set --api-key-file, or --insecure-no-auth if that is meant",
            )

    @property
    def checks_hosts(self) -> bool:
        """Whether requests must name this server as Host.

        Where the loopback is all that guards a server, a web page must not get in by a name that it owns and lets
        point to 127.0.0.1. A key guards against that as well.
        """
        if self.allowed_hosts is not None:
            return "*" not in split(self.allowed_hosts)
        return self.uds is None and is_loopback(self.host) and not self.has_key

    @property
    def is_public(self) -> bool:
        """Whether others than this machine can reach the server."""
        return self.uds is None and not is_loopback(self.host)

    @property
    def has_key(self) -> bool:
        """Whether some key is needed."""
        return bool(self.api_key or self.api_key_file)


SERVE_SETTINGS = settings_of(ServeConfig)


def load_both(
    engine_values: Mapping[str, Any],
    serve_values: Mapping[str, Any],
    yaml_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[EngineConfig, ServeConfig]:
    """Both configs; a YAML file may hold settings of either. Raises ConfigError.

    `engine_values` and the file may hold options of other engines, see `octavo.config.vllm_options`.
    """
    environ = os.environ if environ is None else environ
    layers: list[tuple[str, Mapping[str, Any]]] = []
    for_engine: dict[str, Any] = {}
    known = {*SETTINGS, *SERVE_SETTINGS}
    engine_values = translate(engine_values, known, origin="command line", server=True)
    serve_values = {
        **{name: engine_values.pop(name) for name in [*engine_values] if name in SERVE_SETTINGS},
        **serve_values,
    }
    if yaml_path is not None:
        values = translate(read_yaml(yaml_path), known, origin=f"file {yaml_path}", server=True)
        for name, value in values.items():
            if name not in SERVE_SETTINGS and name not in SETTINGS:
                hint = did_you_mean(name, [*SERVE_SETTINGS, *SETTINGS]) or "see `octavo serve --help`"
                raise ConfigError(name, value, "unknown setting", hint, f"file {yaml_path}")
        for_engine = {name: value for name, value in values.items() if name in SETTINGS}
        layers.append((f"file {yaml_path}", {name: values[name] for name in values if name in SERVE_SETTINGS}))
    given = {name: environ[variable] for variable, name in SERVER_ENVIRONMENT.items() if variable in environ}
    layers += [("environment", given), ("command line", serve_values)]
    if "VLLM_API_KEY" in environ:
        logging.getLogger("octavo").warning("environment: VLLM_API_KEY is not read; OCTAVO_API_KEY is")
    for name in _SECRETS:
        if name in serve_values:
            flag = name.replace("_", "-")
            logging.getLogger("octavo").warning("--%s can be read by others in `ps`; better: --%s-file", flag, flag)
    config, _ = load_config(engine_values, None, yaml_path, environ, yaml_values=for_engine)
    return config, _hiding_keys(layers)


def _hiding_keys(layers: list[tuple[str, Mapping[str, Any]]]) -> ServeConfig:
    try:
        return fill(ServeConfig, layers)[0]
    except ConfigError as error:
        if error.field in _SECRETS:
            raise ConfigError(error.field, "(hidden)", error.limit, error.change, error.origin) from None
        raise


def split(text: str | None) -> list[str]:
    """The entries of a text with commas."""
    return [entry.strip() for entry in (text or "").split(",") if entry.strip()]


def check_key(field: str, key: str, *, public: bool) -> None:
    """Raise ConfigError, without the key, if it could not stand in a header, or is short and `public` can try it."""
    if len(key) < MIN_KEY_CHARS and public:
        limit = f"a key has {len(key)} characters; where others can reach the server it needs {MIN_KEY_CHARS}"
        raise ConfigError(field, "(hidden)", limit, "give a longer one, or listen on 127.0.0.1 (--host)")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(field, "(hidden)", "a key may hold printable ASCII without spaces only")


def read_keys(config: ServeConfig, name: str) -> list[str]:
    """The keys of `name` ("api_key" or "admin_key") and of its file. Raises ConfigError."""
    keys = split(getattr(config, name))
    path = getattr(config, f"{name}_file")
    if path is None:
        return _warn_of_short(name, keys)
    field = f"{name}_file"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(field, path, f"cannot be read ({error.strerror})") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(field, path, "others can read or change it", f"run `chmod 600 {path}`")
    if len(data) > _MAX_KEY_FILE_BYTES:
        raise ConfigError(field, path, f"is larger than {_MAX_KEY_FILE_BYTES} bytes")
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(field, path, "holds no key")
    for key in found:
        check_key(field, key, public=config.is_public)
    return _warn_of_short(name, keys + found)


def _warn_of_short(name: str, keys: list[str]) -> list[str]:
    """The keys, after a word in the log on those that could be guessed."""
    if any(len(key) < MIN_KEY_CHARS for key in keys):
        flag = f"--{name.replace('_', '-')}"
        logging.getLogger("octavo").warning("%s: a key has fewer than %d characters", flag, MIN_KEY_CHARS)
    return keys


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
