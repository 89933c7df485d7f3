"""ServeState: what every route needs: the engine, the settings, the keys, the names, the figures.

Owns the model's names, whether the engine makes progress, and the comments that keep idle streams open. Knows no field
of any request. Invariant: all of it is used on one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time

import msgspec

import octavo
from octavo.config.settings import ConfigError
from octavo.config.speculative import read_speculative
from octavo.request.sampling_params import SamplingParams
from octavo.serve.api.budget import LogprobBudget
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.refusals import EngineHaltedError
from octavo.serve.errors import ApiError, not_ready, queue_full
from octavo.serve.http.auth import HostNames, Keys
from octavo.serve.http.exchange import Exchange
from octavo.serve.metrics import ServerMetrics
from octavo.serve.parsers.output import ParserChoice
from octavo.serve.sandbox.grammar import GrammarSandbox, SandboxBusyError
from octavo.serve.sandbox.texts import Texts
from octavo.serve.settings import ServeConfig, read_keys, split
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.thinking import ThinkingRule
from octavo.text.tokenizer import Tokenizer

HEALTH_HEARTBEAT_SECONDS = 2.0
HEALTH_STEP_SECONDS = 10.0  # for one step; the watchdog, which is sure after 30, ends the engine
_LOG = logging.getLogger(__name__)
# what the renderer itself gives a template, or what would choose another one
_TEMPLATES_OWN = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "raise_exception",
        "strftime_now",
        "tokenize",
        "namespace",
    }
)


class ServeState:
    """Shared by the handlers of one server."""

    def __init__(self, engine: AsyncEngine, config: ServeConfig) -> None:
        """Raises ConfigError for keys or a template that cannot be read."""
        self.engine, self.config = engine, config
        self.keys = Keys(read_keys(config, "api_key"), read_keys(config, "admin_key"))
        self.host_names = HostNames(split(config.allowed_hosts), is_open=not config.checks_hosts)
        self.model_names = split(config.served_model_name) or [engine.model_name]
        allowed = config.allowed_template_kwargs
        self._template_kwargs = None if allowed == "auto" else frozenset(split(allowed))
        self.metrics = ServerMetrics(
            self.model_names[0],
            max_model_len=engine.limits.max_model_len,
            num_drafts=read_speculative(engine.config.speculative_config).num_speculative_tokens,
        )
        self.metrics.watch(engine)
        self.created = int(time.time())
        self.logprobs = LogprobBudget(config.max_request_logprobs, config.max_open_logprobs)
        self.num_open = 0  # exchanges that generate
        self.runs: dict[str, tuple[str, ...]] = {}  # what an open run's requests are called -> its names for clients
        self.weights_snapshot: dict[str, str] = {}  # checksums that a client compares with
        self._idle_streams: set[Exchange] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._sandbox: GrammarSandbox | None = None  # made when first needed
        if config.chat_template is not None:
            if isinstance(engine.tokenizer, NoTokenizer):
                raise ConfigError("chat_template", config.chat_template, engine.tokenizer.reason, "drop one of them")
            self.tokenizer.use_chat_template(config.chat_template)
        self.parsers, self.thinking = _choose_parsers(engine, config)
        self.texts = Texts(engine.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ParameterError if it has none."""
        tokenizer = self.engine.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            raise tokenizer.refusal("tokenizer", "only token ids can be completed, without text")
        return tokenizer

    def may_set(self, name: str) -> bool:
        """Whether a request may set this variable of the chat template."""
        if self._template_kwargs is not None:
            return name in self._template_kwargs
        return name.isidentifier() and name not in _TEMPLATES_OWN and not name.endswith("_token")

    def takes(self, name: str) -> bool:
        """Whether the chat template speaks of a variable that requests may set."""
        return self.may_set(name) and any(name in source for source in self.tokenizer.template.sources.values())

    @property
    def fingerprint(self) -> str:
        """Changes where the model, or what its bits depend on, changes."""
        contract = self.engine.info.numerics_contract if self.engine.info else {}
        facts = {**contract, "model": self.engine.model_name, "octavo": octavo.__version__}
        return f"fp_{hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]}"

    def check_model(self, name: str | None) -> str:
        """The name that the reply gives: the first one, if none is asked for. Raises ApiError, 404."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            shown = f"`{name}`" if len(name) <= 128 and name.isprintable() else "of that name"
            raise ApiError(404, "model_not_found", f"The model {shown} does not exist.", "model")
        return name

    def check_ready(self) -> None:
        """Raise ApiError, 503, unless the engine takes requests."""
        if self.engine.state != "ready":
            raise not_ready(self.engine.state)

    def check_weights(self, *, whole: bool) -> None:
        """Raise ApiError, 503, where weights went away with their engine: nothing is generated until others come.

        whole: also where the engine that is there has discarded them, or half overwritten, as a trainer's loop may.
        """
        weights = self.engine.weights
        try:
            (weights.check if whole else weights.check_lost)()
        except EngineHaltedError as error:
            raise ApiError(503, error.code, str(error)) from None

    async def weight_version(self) -> str:
        """Of the weights that serve."""
        return await self.engine.get_weight_version()

    async def abort_runs(self, names: list[str] | None) -> int:
        """End what the engine does for runs whose names begin so, None: for all; how many requests were ended."""
        if names is None:
            return len(await self.engine.abort_all())
        wanted = tuple(name for name in names if name)
        keys = [key for key, own in self.runs.items() if any(each.startswith(wanted) for each in own)]
        return sum([len(await self.engine.abort_all(f"{key}-")) for key in keys])

    async def check_structured(self, exchange: Exchange, params: SamplingParams) -> SamplingParams:
        """`params` with the form of the output as the engine takes it.

        Raises ParameterError if it cannot be compiled, ApiError, 503, if that cannot be told now, ClientLeftError if
        nobody waits for it any more.
        """
        if params.structured_outputs is None:
            return params
        if self._sandbox is None:
            engine = self.engine
            self._sandbox = GrammarSandbox(engine.tokenizer, engine.limits.vocab_size, engine.arch.eos_token_ids)
        try:
            async with exchange.watching():
                structured = await self._sandbox.check_structured(params.structured_outputs)
        except SandboxBusyError as error:
            raise queue_full(str(error), error.retry_after) from None
        return msgspec.structs.replace(params, structured_outputs=structured)

    @property
    def healthy(self) -> bool:
        """Whether the engine lives: it is heard, and steps follow each other while there is work."""
        engine = self.engine
        if engine.state not in ("ready", "draining") or engine.last_heartbeat_age > HEALTH_HEARTBEAT_SECONDS:
            return False
        return engine.step_age <= HEALTH_STEP_SECONDS

    def open(self, exchange: Exchange, *, streams: bool) -> None:
        """Count an exchange that generates; one that streams gets comments while it has nothing to say."""
        self.num_open += 1
        if streams:
            self._idle_streams.add(exchange)
            if self._ticker is None:
                self._ticker = asyncio.create_task(self._tick())

    def end(self, exchange: Exchange) -> None:
        """Count it no longer."""
        self.num_open -= 1
        self._idle_streams.discard(exchange)

    async def _tick(self) -> None:
        interval = self.config.keep_alive_interval
        comments: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(min(interval / 4, 1.0))
            now = time.monotonic()
            for exchange in self._idle_streams:
                if now - exchange.last_sent >= interval:
                    exchange.last_sent = now
                    task = asyncio.create_task(exchange.send_comment())
                    comments.add(task)
                    task.add_done_callback(comments.discard)

    async def close(self) -> None:
        """Stop what runs beside the exchanges."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._sandbox is not None:
            await self._sandbox.close()
        self.texts.close()


def _choose_parsers(engine: AsyncEngine, config: ServeConfig) -> tuple[ParserChoice, ThinkingRule]:
    tokenizer, name = engine.tokenizer, engine.config.reasoning_parser
    template, special, takes_tools = "", [], False
    if isinstance(tokenizer, Tokenizer):
        template = "\n".join(tokenizer.template.sources.values())  # there may be one for tools beside the default
        takes_tools = tokenizer.template.takes_tools()
        special = [tokenizer.decode([token_id], False) for token_id in tokenizer.special_token_ids]
    thinking = ThinkingRule.of(tokenizer, engine.config)
    try:
        parsers = ParserChoice.of(template, config.tool_call_parser, name, special)
    except ValueError as error:
        raise ConfigError("tool_call_parser", config.tool_call_parser, str(error)) from None
    if parsers.tools is not None and config.tool_call_parser != "auto" and not takes_tools:
        _LOG.warning("the chat template shows the model no tools: requests' tools are left out (--chat-template)")
    if parsers.tools is None and config.tool_call_parser == "auto" and takes_tools:
        _LOG.warning(
            "the chat template takes tools, and no parser knows the calls that it shows: they come as text; "
            "name a --tool-call-parser, or none"
        )
    return parsers, thinking
