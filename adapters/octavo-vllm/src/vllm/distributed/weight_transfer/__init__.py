"""A trainer's end of an update, with vLLM's names."""
