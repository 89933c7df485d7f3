"""What a frontend is made of, without a device: folder, architecture, tokenizer, sampling defaults, forms, limits.

Owns the order in which they are found, for a core in this process (`build`) and for a front end whose core is in
another process (`serve`). Imports no torch. Invariant: both sides read the same folder and come to the same limits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.checkpoint.generation_config import default_sampling
from octavo.checkpoint.hub import find_model
from octavo.config.engine_config import EngineConfig
from octavo.grammar.compiler import Grammars, TokenTexts
from octavo.request.fields import FieldSpec
from octavo.request.sampling_params import Limits, SamplingParams
from octavo.text.converted import FILES, tokenizer_file
from octavo.text.no_tokenizer import NoTokenizer
from octavo.text.tokenizer import Tokenizer, load_tokenizer

_GRAMMARS: weakref.WeakValueDictionary[tuple[object, ...], Grammars] = weakref.WeakValueDictionary()


class FrontendParts(msgspec.Struct, frozen=True, kw_only=True):
    """What `octavo.frontend.frontend.Frontend` is made of beside a core."""

    folder: Path
    arch: Arch
    tokenizer: Tokenizer | NoTokenizer
    default_sampling: SamplingParams
    grammars: Grammars  # for its checks


def find_and_read(config: EngineConfig) -> tuple[Path, Arch]:
    """The model's folder, downloaded if need be, and its architecture. Raises ValueError, in one line."""
    folder = find_model(config.model, config.revision, config.download_dir)
    return folder, read_arch(folder, config.model_packages, config.hf_overrides)


def load_text(config: EngineConfig, folder: Path, arch: Arch) -> Tokenizer | NoTokenizer:
    """The tokenizer, if one is wanted. Dummy weights may come without one; anything else needs one."""
    if config.skip_tokenizer_init:
        return NoTokenizer(skipped=True)
    if config.tokenizer:
        folder = find_model(config.tokenizer, None, config.download_dir)
    if config.load_format == "dummy" and tokenizer_file(folder) is None:
        return NoTokenizer()
    try:
        return load_tokenizer(folder, arch)
    except ValueError as error:
        if tokenizer_file(folder) is not None:
            raise
        raise ValueError(f"{error}; set --tokenizer, or --skip-tokenizer-init for token ids alone") from None


def grammars_of(
    config: EngineConfig, folder: Path, arch: Arch, tokenizer: Tokenizer | NoTokenizer | None = None
) -> Grammars:
    """What compiles forms for a model's vocabulary. In one process those of equal files are one, and compile once.

    A front end checks with it, a worker masks with its own: it is the same where both are here, and nothing but time
    depends on that. tokenizer: that of the folder, if it is there; else the first form loads it.
    """

    def load() -> TokenTexts:
        return load_text(config, folder, arch) if tokenizer is None else tokenizer

    files = _tokenizer_files(find_model(config.tokenizer, None, config.download_dir) if config.tokenizer else folder)
    if config.skip_tokenizer_init or not files:
        return Grammars(load, arch.vocab_size, arch.eos_token_ids)
    key = files, arch.vocab_size, tuple(arch.eos_token_ids)
    found = _GRAMMARS.get(key)
    if found is None:
        found = _GRAMMARS[key] = Grammars(load, arch.vocab_size, arch.eos_token_ids)
    return found


def _tokenizer_files(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What a folder's tokenizer is read from: path, size, time of change and inode of each file, if there is any."""
    if tokenizer_file(folder) is None:
        return ()
    names = sorted(entry.name for entry in folder.iterdir() if "token" in entry.name or entry.name in FILES)
    facts = [((folder / name).resolve(), (folder / name).stat()) for name in names]
    return tuple((str(path), info.st_size, info.st_mtime_ns, info.st_ino) for path, info in facts)


def load_frontend(config: EngineConfig, folder: Path, arch: Arch, *, text: bool = True) -> FrontendParts:
    """Everything beside the engine. Without `text` no tokenizer. Raises ValueError, in one line."""
    tokenizer = load_text(config, folder, arch) if text else NoTokenizer()
    return FrontendParts(
        folder=folder,
        arch=arch,
        tokenizer=tokenizer,
        default_sampling=default_sampling(folder, config),
        grammars=grammars_of(config, folder, arch, tokenizer if text else None),
    )


def make_limits(
    tokenizer: Tokenizer | NoTokenizer,
    *,
    vocab_size: int,
    max_model_len: int,
    max_logprobs: int,
    config: EngineConfig,
    request_fields: Sequence[FieldSpec] = (),
    experts: tuple[int, int] = (0, 0),
) -> Limits:
    """What requests are checked against: the engine's numbers and the tokenizer's."""
    return Limits(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_token_ids=tokenizer.num_token_ids,
        max_token_bytes=tokenizer.max_token_bytes,
        max_logprobs=max_logprobs,
        max_n=config.max_n,
        max_total_tokens=config.max_total_tokens,
        experts=experts,
        request_fields=tuple(request_fields),
    )
