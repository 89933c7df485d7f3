"""Tool calls in the formats that model families write: one parser a file."""
