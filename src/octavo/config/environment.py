"""Environment variables that stand for settings.

Owns their names. Invariant: each stands for one field, so none is without a flag.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from octavo.config.settings import did_you_mean

ENVIRONMENT = {
    "OCTAVO_MODEL": "model",
    "OCTAVO_NUM_THREADS": "num_threads",
    "OCTAVO_NATIVE": "native",
    "OCTAVO_LOG_LEVEL": "log_level",
    "OCTAVO_PREFIX_CACHE_SECRET_FILE": "prefix_cache_secret_file",
}
SERVER_ENVIRONMENT = {"OCTAVO_API_KEY": "api_key", "OCTAVO_ADMIN_KEY": "admin_key"}  # fields of ServeConfig


def read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Fields that environment variables say. An unknown name that begins as ours is logged as a warning."""
    values = {}
    for variable, value in environ.items():
        if variable in ENVIRONMENT:
            values[ENVIRONMENT[variable]] = value
        elif variable.startswith("OCTAVO_") and variable not in SERVER_ENVIRONMENT:
            known = (*ENVIRONMENT, *SERVER_ENVIRONMENT)  # that all begin alike brings no two nearer
            near = did_you_mean(variable.removeprefix("OCTAVO_"), (name.removeprefix("OCTAVO_") for name in known))
            hint = near.replace("mean ", "mean OCTAVO_") or f"known are {', '.join(known)}"
            logging.getLogger("octavo").warning("environment: unknown setting %s is ignored; %s", variable, hint)
    return values
