"""For annotations of connectors."""


class AttentionMetadata:
    """Of a step."""
