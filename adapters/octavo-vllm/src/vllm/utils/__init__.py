"""vLLM's helpers that trainers import."""
