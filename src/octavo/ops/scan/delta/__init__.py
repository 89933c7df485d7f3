"""The gated delta rule on a GPU: prompts, runs of few tokens, and rows that decode."""
