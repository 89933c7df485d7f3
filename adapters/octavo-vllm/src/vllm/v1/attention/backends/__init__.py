"""What trainers import of vLLM's engine."""
