"""Forms of prompts."""

from octavo import TextPrompt, TokensPrompt

__all__ = ["TextPrompt", "TokensPrompt"]
