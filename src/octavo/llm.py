"""LLM: offline generation, with vLLM's names.

Owns the reading of prompts (text, token ids, chat messages), the order of results, and the life of the engine behind
it. Knows nothing of steps, rows or threads. Invariant: `generate` gives one finished RequestOutput per prompt, in
order; if it raises, whatever it had queued is gone. Ctrl-C waits for a step's end, as SIGALRM and SIGTERM do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import numbers
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import force_setattr

from octavo.config.engine_config import load_config
from octavo.config.settings import ConfigError, python_names
from octavo.frontend.absent import Absent
from octavo.frontend.engine import Engine
from octavo.frontend.frontend import Checked
from octavo.frontend.frontend import Prompt as EnginePrompt
from octavo.frontend.shared_control import Control
from octavo.frontend.sharing import Call, SharedEngine
from octavo.frontend.weights import WeightMethods
from octavo.observe import Phases, progress
from octavo.request import transfer_params
from octavo.request.outputs import FlatLogprobs, RequestOutput
from octavo.request.prompts import for_each, refuse_several
from octavo.request.sampling_params import (
    GREEDY_BELOW,
    MAX_TEMPERATURE,
    ParameterError,
    RequestOutputKind,
    SamplingParams,
    check_text,
    check_token_ids,
    num_kept,
    text_limits,
)
from octavo.request.scores import refuse_texts, scored_alone
from octavo.request.validation import as_float, listed, shown
from octavo.rl.session import WeightConflictError, check_version
from octavo.startup import gc_control
from octavo.startup.probe import numerics_id
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.sandbox import TextSandbox
from octavo.text.template import read_template
from octavo.text.thinking import ThinkingRule
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.metrics import Metric

_LOG = logging.getLogger(__name__)
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None

MAX_PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


class LLM(WeightMethods, Absent):
    """A model that generates. Use it as a context manager, or call `close`, to release it early.

    Any number of threads may use one LLM. Their requests run in one batch, so together they are as fast as one call
    with all prompts, and each is answered as if it were alone. An error, Ctrl-C or a stream that is dropped ends the
    requests of its own call only. `close` ends all: who waits then gets RuntimeError. An iterator of `stream` is for
    one thread at a time, as any iterator is. `LLM.engine` itself is not for several threads.

    A forked process may use it on a CPU, if no request ran at the fork; else it gets RuntimeError, and needs its own.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config_file: str | None = None,
        chat_template: str | None = None,
        phases: Phases | None = None,
        **fields: Any,
    ) -> None:
        """`fields` are those of EngineConfig. `chat_template`: a file with another one than the model's, or its text.

        Raises ValueError, in one line, for a bad setting or model.
        """
        if model is not None:
            fields["model"] = model
        try:
            self.config, self.config_origins = load_config(python_kwargs=fields, yaml_path=config_file)
            self.engine = Engine(self.config, phases)
        except ConfigError as error:  # whoever calls from Python is told of arguments, not of flags
            named = (python_names(error.limit), python_names(error.change), error.origin)
            raise ConfigError(error.field, error.value, *named) from None
        try:
            if chat_template is not None:
                self._text("chat_template").use_chat_template(chat_template)
            self._thinking = ThinkingRule.of(self.engine.tokenizer, self.config)
        except ValueError:
            self.engine.close()
            raise
        self._sandbox = TextSandbox(self.engine.tokenizer)
        self._ids = itertools.count()
        self._shared = SharedEngine(self.engine)
        self._control = Control(self._shared)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}.

        `sampling_params`: one for all, or one per prompt; None takes the checkpoint's defaults. `use_tqdm`: a progress
        bar on stderr; None shows it on a terminal. Arguments that may be None only are vLLM's for what Octavo has not.
        Raises ParameterError naming the field before anything runs.
        """
        _refuse_given(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )
        many = _as_list(prompts)
        params = self._params_per_prompt(sampling_params, len(many))
        self._shared.check_process()
        with gc_control.relaxed():
            return self._run(for_each("prompts", self._ready, many, params), params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, rendered by the model's chat template.

        `chat_template`: another template than the model's, a file or its text. `chat_template_content_format`: "string"
        joins the parts of a content, "openai" makes a list of each text, "auto" looks at the template.
        `chat_template_kwargs`: variables of the template, as `{"enable_thinking": False}`. A log line tells of `tools`
        that the template does not show. Arguments that may be None only are vLLM's for what Octavo has not.

        A template is a program of whoever made the model: it runs in a child process with limits of time and memory,
        which is started by the first call.
        """
        _refuse_given(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )
        if chat_template is not None:
            chat_template = read_template(chat_template)
        if tools and not self._text("messages").template.takes_tools(chat_template):
            _LOG.warning("tools are left out of the prompt: the chat template does not show them to the model")
        many = isinstance(messages, Sequence) and bool(messages) and not isinstance(messages[0], str | Mapping)
        conversations: Any = messages if many else [messages]
        params = self._params_per_prompt(sampling_params, len(conversations))
        self._shared.check_process()
        with gc_control.relaxed():
            read = functools.partial(
                self._ready_chat,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
                content_format=chat_template_content_format,
            )
            ready = for_each("messages", read, conversations, params)
            return self._run(ready, params, use_tqdm, None, "chat")

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield what is new of one prompt as it comes. Closing the iterator aborts the request.

        Each output is a RequestOutput of kind DELTA, whatever `output_kind` says: `output.outputs[0].text` is the text
        since the last one.
        """
        refuse_several(prompt)
        params = self._params_per_prompt(sampling_params, 1)[0]
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            ready = self._ready_chat(prompt, params)
        else:
            ready = self._ready(prompt, params)  # type: ignore[arg-type]
        request = self._check(ready, _with_kind(params, RequestOutputKind.DELTA), 0, "stream")
        call = Call([[(str(next(self._ids)), request)]])
        try:
            self._shared.submit(call)
            while True:
                for output in self._shared.wait(call):
                    yield output
                    if output.finished:
                        return
        finally:
            self._shared.forget(call)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json asks for, where it says something: a copy, to be changed."""
        return self.engine.default_sampling.clone()

    def get_tokenizer(self) -> Any:
        """The tokenizer, with Hugging Face's names: `encode`, `decode`, a call, `apply_chat_template`, the special ids.

        Raises ValueError where there is none.
        """
        return self._text("tokenizer")

    def score(
        self, prompts: Sequence[Sequence[int]], temperature: float = 1.0, start: int = 0, *, use_tqdm: bool = False
    ) -> list[list[float]]:
        """Log-probabilities of each sequence's tokens from index `start` on, given those before them: float32.

        The first token of a sequence has none: with `start` 0 the list begins at the second. They are `logits /
        temperature` without truncation, in the bits of the same tokens' when they are sampled; no cache is read.
        A sequence has at most max_model_len tokens. Raises ParameterError before anything runs.
        """
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise ParameterError("start", f"must be an index, at least 0, got {shown(start)}", "invalid_value")
        refuse_texts(prompts)
        divisor = as_float("temperature", temperature, GREEDY_BELOW, MAX_TEMPERATURE)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            prompt_logprobs_temperature=divisor,
            detokenize=False,
            flat_logprobs=True,
        )
        ready = scored_alone(prompts, params, self.engine.limits)
        self._shared.check_process()
        with gc_control.relaxed():
            outputs = self._run([EnginePrompt(ids) for ids, _ in ready], [p for _, p in ready], use_tqdm, None, "score")
        found = []
        for output in outputs:
            scores = output.prompt_logprobs
            assert isinstance(scores, FlatLogprobs), "what was asked for flat is flat"
            found.append(scores[max(start, 1) :].logprobs.tolist())
        return found

    def pause_generation(self, mode: str = "abort", clear_cache: bool | None = None) -> None:
        """Stop planning steps, until `resume_generation`; who asks meanwhile waits.

        mode: "keep" freezes requests as they stand, "wait" lets them end first, "abort" ends them with what they have
        and finish_reason "abort". When it returns no step runs. clear_cache: forget cached prefixes too; what is kept
        is computed again. No update of weights needs that. Raises WrongStateError where "wait" was undone meanwhile.
        """
        self._control.pause(mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Undo `pause_generation`, any number of times. Raises WrongStateError while the engine sleeps."""
        self._control.resume()

    def is_paused(self) -> bool:
        """Whether `pause_generation` is in force."""
        return self._control.standing.paused

    def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> None:
        """Stop, and give memory back: level 0 none, 1 the cache's, 2 the weights' too, whose values are lost.

        On a GPU it goes with `enable_sleep_mode` alone; at level 1 weights then go too, and come back from the host's
        memory. mode: as `pause_generation` has it. tags: of "weights" and "kv_cache" those that alone go; None: both.
        After level 2 nothing is generated before a whole set of weights was sent. Raises WrongStateError for a lighter
        level than the engine sleeps at, and where the host has no room; ValueError for levels 1 and 2 of an engine on a
        GPU that was started without that.
        """
        self._control.sleep(level, mode, tags)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take memory again: "weights", "kv_cache", "scheduling", None: all. Whether everything is awake.

        Raises WrongStateError where a GPU has no room by now: these tags sleep on.
        """
        return self._control.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether some memory, or scheduling, sleeps."""
        return bool(self._control.standing.asleep)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix. False while requests run; with `reset_running_requests` they are computed again.

        reset_connector: the connector forgets what it keeps for this engine alone; what others share, as files, is
        named by version of the weights, and need not be reset.
        """
        return self._control.reset_prefix_cache(
            reset_running_requests=reset_running_requests, reset_connector=reset_connector
        )

    @contextlib.contextmanager
    def weights(
        self, version: str | None = None, on_running: str = "recompute", *, partial: bool = False
    ) -> Generator[Callable[[str, Any], None], None, None]:
        """New weights in a `with` block: `load(name, tensor)` for each, with the checkpoint's names, on any device.

        An exception in it leaves the old ones. A DTensor is gathered by all of its ranks. See `start_weight_update`.
        """
        check_version(version)
        session = self.start_weight_update(partial=partial, on_running=on_running)
        try:
            yield functools.partial(self._load_weight, session=session)
            self.finish_weight_update(version, session=session)
        except BaseException:
            with contextlib.suppress(WeightConflictError):  # it is over if a tensor was refused
                self.abort_weight_update(session=session)
            raise

    def _load_weight(self, name: str, tensor: Any, session: str | None = None) -> None:
        from octavo.rl.transport.local import Handed

        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        with Handed({name: whole}) as update_info:
            self.update_weights({"update_info": update_info, "session": session})

    def _ask_core(self, name: str, payload: bytes = b"") -> bytes:
        with gc_control.relaxed():
            return self._shared.call(name, payload)

    def get_metrics(self) -> list[Metric]:
        """The engine's counts and gauges of this moment, by the names and in the forms that vLLM's `get_metrics` has.

        Those of the core: requests, cache, preemptions, drafts, connectors, weights; and those of this LLM's requests:
        tokens, ends, and histograms of sizes and times. A request is counted when it is told of: those of `generate`
        at their end, so that the times between two tokens are those of `stream` alone.
        """
        from octavo.frontend.metrics import metrics_of, metrics_of_requests

        labels = {"model_name": str(self.config.model), "engine": "0"}
        return metrics_of(self.engine.stats, labels) + metrics_of_requests(self._shared.log.counts, labels)

    @property
    def numerics_id(self) -> str:
        """Equality of bits is promised between runs with the same id."""
        return numerics_id(self.engine.numerics_contract)

    def close(self) -> None:
        """Release the engine, at the end of a step that runs."""
        self._sandbox.close()
        self._shared.close()

    def __enter__(self) -> Self:
        """The LLM itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the engine."""
        self.close()

    def _text(self, field: str) -> Tokenizer:
        """The tokenizer. Raises ParameterError where there is none."""
        tokenizer = self.engine.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            raise tokenizer.refusal(field, "pass token ids")
        return tokenizer

    def _ready(self, prompt: Prompt, params: SamplingParams) -> EnginePrompt:
        text: Any = prompt
        token_ids: Any = None
        cache_salt: Any = ""
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in MAX_PROMPT_KEYS:
                    known = ", ".join(sorted(MAX_PROMPT_KEYS))
                    raise ParameterError("prompt", f"unknown key {str(key)[:64]!r}: known are {known}", "unknown_field")
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            cache_salt = prompt.get("cache_salt", "")
        elif not isinstance(prompt, str):
            text, token_ids = None, prompt
        limits = self.engine.limits
        kept = num_kept(params, limits)
        if token_ids is not None:
            beside = text if isinstance(text, str) else None
            return EnginePrompt(check_token_ids(token_ids, limits, kept), beside, cache_salt)
        text = check_text(text, text_limits(limits, kept))
        return EnginePrompt(self.engine.tokenizer.encode(text)[-(kept or 0) :], text, cache_salt)

    def _ready_chat(self, messages: Any, params: SamplingParams, **options: Any) -> EnginePrompt:
        limits = self.engine.limits
        kept = num_kept(params, limits)
        text, token_ids = self._sandbox.render_chat(messages, text_limits(limits, kept), **options)
        is_chat = options.get("add_generation_prompt", True)
        return EnginePrompt(check_token_ids(token_ids, limits, kept), text, is_chat=is_chat)

    def _check(self, prompt: EnginePrompt, params: SamplingParams, priority: int, asked: str) -> Checked:
        # An answer's text is not taken apart here: with a parser by name reasoning is expected; else only what the
        # prompt has begun may come before a form.
        self._control.check_awake(asked)
        may_open = prompt.is_chat and self.config.reasoning_parser != "auto"
        params = self._thinking.apply(params, prompt.text, prompt.token_ids, may_open=may_open)
        return self.engine.check(prompt, params, priority=priority)

    def _run(
        self,
        ready: list[EnginePrompt],
        params: list[SamplingParams],
        use_tqdm: bool | None,
        priority: Sequence[int] | None,
        asked: str = "generate",
    ) -> list[RequestOutput]:
        """asked: the method that a refusal names."""
        priorities = [0] * len(ready) if priority is None else _priorities(priority, len(ready))
        final = [_with_kind(own, RequestOutputKind.FINAL_ONLY) for own in params]
        named = "messages" if asked == "chat" else "prompts"
        requests = for_each(named, functools.partial(self._check, asked=asked), ready, final, priorities)
        parts = [[(str(next(self._ids)), request) for request in part] for part in self._parts(requests)]
        outputs: dict[str, RequestOutput] = {}
        call = Call(parts)
        try:
            self._shared.submit(call)
            with progress(len(ready), wanted=use_tqdm) as bar:
                while len(outputs) < len(requests):
                    for output in self._shared.wait(call):
                        outputs[output.request_id] = output
                        num_output = sum(len(completion.token_ids) for completion in output.outputs)
                        bar.add(1, len(output.prompt_token_ids or ()), num_output)
            return [outputs[request_id] for part in parts for request_id, _ in part]
        finally:
            self._shared.forget(call)

    def _parts(self, requests: list[Checked]) -> list[list[Checked]]:
        """What is queued before each of the first steps: all, or prompts for half a step, and the rest.

        The rest is queued while a device computes the half. Priorities count among all, so these go at once.
        """
        resolved = self.engine.resolved
        if not resolved.async_scheduling or any(request.priority != requests[0].priority for request in requests):
            return [requests]
        lengths = itertools.accumulate(len(request.prompt.token_ids) for request in requests)
        half = resolved.max_num_batched_tokens // 2
        count = next((index for index, length in enumerate(lengths, 1) if length >= half), len(requests))
        return [requests[:count], requests[count:]]

    def _params_per_prompt(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):  # a clone: these may be changed while requests run
            own, said = params.clone(), (params.extra_args or {}).get(transfer_params.NAME)
            if count == 1 or not isinstance(said, Mapping):
                return [own] * count
            return [transfer_params.with_own(own, each) for each in transfer_params.split(said, count)]
        given = listed("sampling_params", params, "SamplingParams, or a list of them")
        if len(given) != count:
            raise ParameterError("sampling_params", f"{len(given)} given for {count} prompts: give one, or one each")
        for index, entry in enumerate(given):
            if not isinstance(entry, SamplingParams):
                message = f"must be SamplingParams, got {type(entry).__name__}"
                raise ParameterError(f"sampling_params[{index}]", message, "invalid_type")
        clones = {id(entry): entry.clone() for entry in given}
        return [clones[id(entry)] for entry in given]


def _with_kind(params: SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    """The same parameters for another kind of output. They were checked when they were made."""
    params = copy.copy(params)
    force_setattr(params, "output_kind", kind)
    return params


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one. A list of ints, also numpy's, is one prompt, whatever else it holds."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = listed("prompts", prompts, "text, token ids, an object, or a list of these")
    if any(isinstance(entry, numbers.Real) for entry in many):
        return [many]
    return many


def _refuse_given(**arguments: object) -> None:
    """Raise ParameterError for an argument of vLLM's that Octavo has nothing for."""
    for name, value in arguments.items():
        if value:
            raise ParameterError(name, "is not supported: leave it out, or give None", "unsupported_parameter")


def _priorities(priority: Sequence[int], count: int) -> list[int]:
    """One per prompt; each is checked with its request."""
    given = listed("priority", priority, "a list of integers")
    if len(given) != count:
        raise ParameterError("priority", f"{len(given)} values for {count} prompts")
    return given
