"""What trainers import of vLLM's distributed part."""
