"""For annotations of connectors."""


class SchedulerOutput:
    """Of a step."""


class NewRequestData:
    """Of a step."""


class CachedRequestData:
    """Of a step."""
