"""Connections between engines beside those of fetches: who is heard, and who is told that nothing will be fetched."""
