"""Grammars: the forms that users ask of outputs, compiled with llguidance for one vocabulary.

Owns the limits of compilation, the cache of compiled forms, and Matcher, which follows one
output and tells what may come next. To compile a form takes 0.5 to 2 ms, at the limits some 100 ms. Knows neither
tensors nor requests; the library is imported by the first form. Invariants: foreign text leads to a working matcher or
a ParameterError that repeats none of it; a form is compiled once, however many outputs follow it, and a form that
cannot be compiled is not tried again; what a matcher allows is a function of its form and of the tokens it was given,
also where matchers share a compiled form.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.grammar.structural_tag import special_tokens, tag_grammar, with_forms
from octavo.grammar.text import (
    FIELD,
    MET_A_LIMIT,
    as_lark,
    grammar_text,
    in_safe_words,
    name_of,
    no_text,
    other_words,
    refusal,
)
from octavo.request.outputs import TOO_COMPLEX
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.request.thinking import ClosingMark, Thinking
from octavo.request.validation import ParameterError

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 256  # compiled forms; a small one takes 50 KB, one at the limits some MB
MAX_LEXER_STATES = 50_000  # 1 to 2 KB each, made as a text leads to them
MAX_GRAMMAR_SIZE = 200_000  # symbols
MASK_FUEL = 2_000_000  # of the lexer for one mask, some 0.1 s: a mask that takes long holds up its own row only
MASK_ITEMS = 200_000  # of the parser for one mask
NUM_TRIALS, TRIAL_TOKENS = 4, 32  # texts that are begun before a form is accepted, and how far
TRIAL_SECONDS = 0.5  # of processor time after which they end
SLOW_SECONDS = 0.005  # of processor time for one mask; a usual one takes 0.05 ms
_MAX_RENEWALS = 2  # of a form that others wore out, for one output
_REPLAY_TOKENS = 256  # that a matcher takes at once: the library holds the interpreter's lock meanwhile
_ENDS = (b'"', b"}", b"]", b",", b")", b"\n")
_NO_BYTES = np.empty(0, np.uint8)
_Made = TypeVar("_Made")


class TokenTexts(Protocol):
    """What a tokenizer must tell."""

    @property
    def special_token_ids(self) -> Collection[int]:
        """Tokens that stand for no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; b"" for an id without a token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model as plain data, for a process that has no tokenizer. It is a TokenTexts."""

    tokens: list[bytes]  # as many as the logits have
    special_token_ids: list[int]
    eos_token_ids: list[int]

    @staticmethod
    def of(texts: TokenTexts, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
        """Ask for every token once."""
        tokens = [texts.token_bytes(token_id) for token_id in range(vocab_size)]
        special = sorted(token_id for token_id in texts.special_token_ids if token_id < vocab_size)
        return Vocabulary(tokens, special, sorted(eos_token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text."""
        return self.tokens[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Nothing: what stands for the text is found by its bytes."""
        return []


class Grammars:
    """Compiles forms for one model, and keeps them. May be used by several threads."""

    def __init__(self, load: Callable[[], TokenTexts], vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`load` gives the tokenizer; it is called once, by the first form. `vocab_size`: the logits' width."""
        self._load, self._vocab_size = load, vocab_size
        self._eos_token_ids = [token_id for token_id in sorted(eos_token_ids) if token_id < vocab_size]
        # 32-bit words of a mask; without EOS the vocabulary gets one more token, see _Texts
        self.num_words = -(-(vocab_size + (not self._eos_token_ids)) // 32)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._texts: _Texts | None = None
        self._special = dict[str, int]()  # tokens by their texts, once the tokenizer is loaded
        self._marks: dict[str, ClosingMark] = {}  # as many as a model has ways to end its reasoning
        self._cache: collections.OrderedDict[bytes, CompiledForm] = collections.OrderedDict()
        self._lock, self._loading, self._marking = threading.Lock(), threading.Lock(), threading.Lock()
        self._ending_tokens = np.empty(0, np.int64)  # that begin with what ends a string, a value or a list

    def check(self, structured: StructuredOutputsParams | None) -> None:
        """Compile a form, try it out, and keep it for `matcher`. Raises ParameterError. None is no form."""
        if structured is not None:
            self._form(structured).get(tried=True)

    def prepare(self, thinking: Thinking) -> None:
        """Make the end of reasoning, silently: without tokens there is none."""
        with contextlib.suppress(ParameterError):
            self.closing_mark(thinking.closing)

    def made_mark(self, closing: str) -> ClosingMark | None:
        """What `closing_mark` would give, if it is made already."""
        return self._marks.get(closing)

    def closing_mark(self, closing: str) -> ClosingMark:
        """The end of reasoning in this vocabulary, compiled once per text. Raises ParameterError without tokens."""
        with self._marking:  # one makes it, the others wait for it
            found = self._marks.get(closing)
            if found is None:
                if self._texts is None:
                    self._load_tokenizer()
                assert self._texts is not None, "a loaded tokenizer keeps its texts"
                found = ClosingMark(closing, self._texts.tokens, self._eos_token_ids, self.num_words)
                self._marks[closing] = found
            return found

    def matcher(self, structured: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of an output. Compiles nothing: the matcher's first mask does, if need be."""
        return Matcher(self._form(structured))

    def try_out(self, structured: StructuredOutputsParams, compiled: llguidance.LLMatcher | None = None) -> None:
        """Begin some texts, so that a form that would meet a limit within them is refused. Raises ParameterError.

        Which texts is a function of the form; where masks are slow they are fewer. `compiled`: the form's, if it is
        there. Nothing is kept.
        """
        compiled, until = compiled or self.build(structured), time.thread_time() + TRIAL_SECONDS
        for number in range(NUM_TRIALS):
            matcher, draw = compiled.deep_copy(), random.Random(number)
            for _ in range(TRIAL_TOKENS):
                if time.thread_time() > until:
                    return
                mask = np.frombuffer(matcher.compute_bitmask(), np.uint8) if not matcher.is_error() else _NO_BYTES
                tokens = np.unpackbits(mask, bitorder="little").nonzero()[0]
                tokens = tokens[~np.isin(tokens, self._eos_token_ids)]
                if not len(tokens) or not matcher.consume_token(self._pick(tokens, draw, number)):
                    break
            said = matcher.get_error() if matcher.is_error() else ""
            if MET_A_LIMIT.search(said):
                raise ParameterError(name_of(structured), "is too complex: it meets a limit within a text", TOO_COMPLEX)

    def _pick(self, tokens: NDArray[np.int64], draw: random.Random, number: int) -> int:
        """Some token; in every other trial one that ends what is open, if there is one: so more of a form is seen."""
        if number % 2:
            ending = tokens[np.isin(tokens, self._ending_tokens)]
            tokens = ending if len(ending) else tokens
        return int(tokens[draw.randrange(len(tokens))])

    def build(self, structured: StructuredOutputsParams) -> llguidance.LLMatcher:
        """Compile a form, whatever is kept. Raises ParameterError."""
        return self.spell(structured)[1]

    def spell(self, structured: StructuredOutputsParams) -> tuple[StructuredOutputsParams, llguidance.LLMatcher]:
        """A form in words that the library knows, and what it compiles to. Nothing is kept. Raises ParameterError.

        To compile those words again leaves the interpreter's lock alone, which to find them may hold for seconds.
        """
        if structured.form == "grammar":
            structured = as_lark(structured)
        elif structured.form == "structural_tag":
            structured = with_forms(structured, lambda inner: self.spell(inner)[0])
        try:
            return structured, self._build(structured)
        except ParameterError as error:
            if error.code != "unsupported" or structured.form != "json":
                raise
            others = other_words(structured)
            if others is None:
                raise
            first = error
        try:
            return others, self._build(others)
        except ParameterError as error:  # what can be said of it may be nothing: then the keyword is what is wrong
            raise first if error.code == "schema_invalid" else error from None

    def _build(self, structured: StructuredOutputsParams) -> llguidance.LLMatcher:
        tokenizer, is_tag = self._tokenizer or self._load_tokenizer(), structured.form == "structural_tag"
        structured = with_forms(structured, in_safe_words) if is_tag else in_safe_words(structured)
        import llguidance

        limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            step_lexer_fuel=MASK_FUEL,
            step_max_items=MASK_ITEMS,
            verbose_errors=False,
        )
        try:
            text = tag_grammar(structured, self._special) if is_tag else grammar_text(structured)
            found = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
            mask = found.compute_bitmask() if not found.is_error() else b""
            error = found.get_error() if found.is_error() else ""
            ended = found.is_accepting()
        except ParameterError:  # what cannot be said to the library
            raise
        except Exception as failure:  # what the library refuses while it reads
            raise refusal(structured, str(failure)) from None
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt | SystemExit):
                raise
            raise refusal(structured, "too complex") from None  # a panic of the library
        if not mask:
            raise refusal(structured, error)
        words = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        words[self._eos_token_ids] = 0
        if error or not (ended or words.any()):
            raise no_text(structured)
        return found

    def _form(self, structured: StructuredOutputsParams) -> CompiledForm:
        key = structured.key
        with self._lock:
            found = self._cache.get(key)
            if found is None:
                found = self._cache[key] = CompiledForm(self, structured)
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
            else:
                self._cache.move_to_end(key)
        return found

    def _load_tokenizer(self) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance wants it: 0.3 s and 70 MB for 150,000 tokens."""
        try:
            import llguidance
        except ImportError:
            message = "needs the package llguidance, which is not installed"
            raise ParameterError(FIELD, message, "unsupported_parameter") from None
        with self._loading:
            if self._tokenizer is None:
                texts = self._texts = _Texts(self._load(), self._vocab_size, self._eos_token_ids)
                ending = [token for token, text in enumerate(texts.tokens) if text[:1] in _ENDS and text]
                self._ending_tokens = np.array(ending, np.int64)
                self._special = special_tokens(texts.tokens, texts.special_token_ids)
                self._tokenizer = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(texts), n_vocab=len(texts.tokens), eos_token=texts.eos_token_ids
                )
        return self._tokenizer


class CompiledForm:
    """A form and what it was compiled to, once somebody asked. May be used by several threads."""

    def __init__(self, grammars: Grammars, structured: StructuredOutputsParams) -> None:
        """`Grammars.matcher` makes it."""
        self._grammars, self.structured = grammars, structured
        self._lock = threading.Lock()
        self._matcher: llguidance.LLMatcher | None = None
        self._refusal: tuple[str, str, str] | None = None  # what to raise anew: field, message, code
        self._tried = False
        self._spelled = structured
        self._seconds = 0.0  # of the last masks, the slow ones remembered for longer

    def get(self, worn: llguidance.LLMatcher | None = None, *, tried: bool = False) -> llguidance.LLMatcher:
        """What all outputs of the form share; another one than `worn`. Raises ParameterError.

        tried: it is to be tried out first, unless it has been.
        """
        with self._lock:  # one compiles, the others wait for it
            if self._refusal is not None:
                field, message, code = self._refusal
                raise ParameterError(field, message, code)
            if self._matcher is None:
                self._spelled, self._matcher = self._refusing(self._grammars.spell)
            elif self._matcher is worn:
                self._matcher = self._grammars.build(self._spelled)
            if tried and not self._tried:
                matcher = self._matcher
                self._refusing(lambda structured: self._grammars.try_out(structured, matcher))
                self._tried = True
            return self._matcher

    def _refusing(self, make: Callable[[StructuredOutputsParams], _Made]) -> _Made:
        """What is refused once stays refused."""
        try:
            return make(self.structured)
        except ParameterError as error:
            self._refusal = error.field, str(error).removeprefix(f"{error.field}: "), error.code
            raise

    @property
    def is_compiled(self) -> bool:
        """Whether it is known what it compiles to, if to anything."""
        return self._matcher is not None or self._refusal is not None

    @property
    def is_slow(self) -> bool:
        """Whether the next mask is expected to take long, as the last ones did."""
        return self._seconds > SLOW_SECONDS

    def note(self, seconds: float) -> None:
        """Take note of how long a mask took."""
        self._seconds = max(seconds, self._seconds * 0.98)


class Matcher:
    """Follows one output. `fill` may be called for any output of the request, in any order, by one thread at a time."""

    def __init__(self, form: CompiledForm) -> None:
        """At the beginning; `Grammars.matcher` makes it."""
        self.form = form
        self.met_limit = False  # of the library, by the last `fill`: not the output is wrong, the form is too complex
        self._consumed = np.empty(0, np.int32)
        self._shared: llguidance.LLMatcher | None = None  # what `_matcher` was copied from
        self._matcher: llguidance.LLMatcher | None = None
        self._num_renewals = 0

    def fill(self, output: NDArray[np.int32], bits: NDArray[np.int32]) -> bool:
        """Set the bits of the tokens that may follow `output`, in a row of `Grammars.num_words` words.

        None is set, and the result is False, if the output has left the grammar or the grammar met a limit; the latter
        sets `met_limit`. May compile the form, which takes its time.
        """
        self.met_limit = False
        try:
            while not self._try_fill(output, bits):
                if not self._renew():
                    bits[:] = 0
                    return False
        except ParameterError as error:  # the form cannot be compiled, or not again
            self.met_limit = error.code == TOO_COMPLEX
            bits[:] = 0
            return False
        return True

    @property
    def is_compiled(self) -> bool:
        """Whether `prepare` has nothing to do."""
        return self.form.is_compiled

    @property
    def is_slow(self) -> bool:
        """Whether the next mask is expected to take long."""
        return self.form.is_slow

    def prepare(self) -> None:
        """Compile the form; that of an output that nothing may follow, if it cannot be compiled."""
        with contextlib.suppress(ParameterError):
            self.form.get()

    def note(self, seconds: float) -> None:
        """Take note of how long a mask took."""
        self.form.note(seconds)

    def _renew(self) -> bool:
        """Begin anew on a fresh copy of the form, if what failed may be due to what others did with the shared one."""
        matcher, self._matcher = self._matcher, None
        assert matcher is not None, "what failed was there"
        said = matcher.get_error() if matcher.is_error() else ""
        self.met_limit = MET_A_LIMIT.search(said) is not None
        self._consumed = self._consumed[:0]
        if not self.met_limit or not said.startswith("lexer error") or self._num_renewals >= _MAX_RENEWALS:
            return False
        self._num_renewals += 1
        self._shared = self.form.get(worn=self._shared)
        return True

    def _try_fill(self, output: NDArray[np.int32], bits: NDArray[np.int32]) -> bool:
        if self._shared is None:
            self._shared = self.form.get()
        if self._matcher is None:
            self._matcher = self._shared.deep_copy()
        matcher = self._matcher
        try:
            if not self._advance(matcher, output):
                return False
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        except ValueError:
            return False
        return not matcher.is_error()

    def _advance(self, matcher: llguidance.LLMatcher, output: NDArray[np.int32]) -> bool:
        """Bring the matcher behind `output`. Returns whether the grammar allows all of it."""
        consumed = self._consumed
        num_both = min(len(consumed), len(output))
        differ = np.flatnonzero(consumed[:num_both] != output[:num_both])
        num_kept = int(differ[0]) if len(differ) else num_both
        if num_kept < len(consumed) and not matcher.rollback(len(consumed) - num_kept):
            matcher.reset()
            num_kept = 0
        num_taken = num_kept
        while num_taken < len(output):
            rest: list[int] = output[num_taken : num_taken + _REPLAY_TOKENS].tolist()
            num_more = matcher.try_consume_tokens(rest)
            num_taken += num_more
            if num_more < len(rest):
                break
        self._consumed = output[:num_taken].copy()
        return num_taken == len(output)


class _Texts:
    """A TokenTexts as llguidance's TokenizerWrapper wants it. Called with bytes, it gives tokens for them."""

    bos_token_id: int | None = None

    def __init__(self, texts: TokenTexts, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._encode = texts.encode
        self.tokens = [texts.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({*eos_token_ids, *(i for i in texts.special_token_ids if i < vocab_size)})
        self.eos_token_ids = list(eos_token_ids)
        if not self.eos_token_ids:  # one that no logits row has: an output then ends by failing, or by its length
            self.eos_token_ids = [vocab_size]
            self.special_token_ids.append(vocab_size)
            self.tokens.append(b"<end>")
        self.eos_token_id = self.eos_token_ids[0]
        self._special = frozenset(self.special_token_ids)
        self._ids = {text: i for i, text in enumerate(self.tokens) if text and i not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """The model's own tokens for a forced text; by longest matches where they would say something else."""
        try:
            ids = self._encode(data.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            ids = []
        if self._special.isdisjoint(ids) and b"".join(self.tokens[token_id] for token_id in ids) == data:
            return ids
        return self._longest_matches(data)

    def _longest_matches(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            for end in range(min(at + self._longest, len(data)), at, -1):
                found = self._ids.get(data[at:end])
                if found is not None:
                    ids.append(found)
                    break
            else:  # no token for this byte: what follows cannot be forced
                break
            at = end
        return ids


def _no_texts() -> TokenTexts:
    raise ParameterError(FIELD, "this engine has no tokenizer", "unsupported_parameter")


NO_GRAMMARS = Grammars(_no_texts, 0, ())
