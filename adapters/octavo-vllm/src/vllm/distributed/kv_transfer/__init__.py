"""What connectors import of vLLM's transfers."""
