"""For annotations of connectors."""
