"""From a model's name to a folder on this machine.

Owns the three kinds of names (bundled, a folder, a repository of the Hugging Face hub) and what to say when
none of them works out. Does not read the folder. huggingface_hub is imported only when a hub name is asked
for. Invariant: the result is an existing folder.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path

from octavo.config.settings import did_you_mean

BUNDLED = ("octavo-tiny", "octavo-tiny-hybrid", "octavo-tiny-eagle3", "octavo-tiny-mtp")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_MAX_NAME = 4096
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "tiktoken.model"]
_UNWANTED = ["*/*", "consolidated*"]
_OFFLINE_WAYS = "give a model folder, or download it where there is a network and set HF_HOME to that cache"


def find_model(name: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The folder of a model: a bundled name, an existing folder, or a repository of the hub.

    A hub repository is taken at `revision` (branch, tag or commit; None: main) and downloaded unless it is cached.
    `download_dir`: the folder of the cache, else HF_HOME says it. HF_HOME, HF_HUB_OFFLINE and HF_TOKEN work as in
    huggingface_hub. Raises ValueError, one line, with what to do.
    """
    if len(name) > _MAX_NAME:
        raise ValueError(f"model {name[:40]!r}...: {len(name)} characters, a name has at most {_MAX_NAME}")
    if name in BUNDLED:
        return Path(str(importlib.resources.files("octavo") / "assets" / name))
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise ValueError(f"model {name!r} is a file: give the folder that holds config.json and *.safetensors")
    looks_local = name.startswith((".", "/", "~")) or os.sep in name.rstrip("/").partition("/")[2]
    if looks_local or not _HUB_NAME.fullmatch(name):
        raise ValueError(f"model {name!r}: no such folder (a hub name has the form 'organisation/name')")
    if "/" not in name and (hint := did_you_mean(name, BUNDLED)):
        raise ValueError(f"model {name!r}: no such folder; {hint} (a hub name has the form 'organisation/name')")
    return _download(name, revision, download_dir)


def _download(name: str, revision: str | None, download_dir: str | None) -> Path:
    """A snapshot of a hub repository: weights, configuration, tokenizer and template, nothing that could run."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ValueError(f"model {name!r} is no folder here, and huggingface_hub is not installed") from None
    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=download_dir, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
        return Path(found)
    except errors.GatedRepoError:
        raise ValueError(f"model {name!r} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"model {name!r} has no revision {revision!r} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"model {name!r} is no folder here and not on the hub (if private: set HF_TOKEN)") from None
    except Exception as error:  # the hub's client raises whatever its transport raises
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ValueError(
            f"model {name!r} is no folder here and cannot be fetched from the hub: {_OFFLINE_WAYS} ({reason})"
        ) from error
