"""For annotations of connectors."""


class Request:
    """Of a scheduler."""
