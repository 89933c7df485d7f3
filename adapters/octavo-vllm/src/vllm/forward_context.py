"""For annotations of connectors."""


class ForwardContext:
    """Of a step."""
