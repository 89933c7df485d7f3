"""vLLM's loggers."""

import logging


def init_logger(name: str) -> logging.Logger:
    """Python's own."""
    return logging.getLogger(name)
