"""For annotations of connectors."""


class KVCacheBlocks:
    """Of a request."""
