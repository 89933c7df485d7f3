"""For annotations of connectors."""


class KVCacheConfig:
    """Of an engine."""
