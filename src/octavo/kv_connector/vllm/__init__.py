"""Connectors that were written for vLLM: a subclass of KVConnectorBase_V1 runs as it is."""
