"""For annotations of connectors."""


class VllmConfig:
    """Of an engine. Octavo shows connectors a namespace of these names."""
