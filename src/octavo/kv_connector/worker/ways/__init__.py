"""How the bytes of blocks come from one engine to another, one way a module. See `worker.pair.Way`."""
