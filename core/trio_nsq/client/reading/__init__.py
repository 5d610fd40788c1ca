"""Read a topic by sequence or time, over the HTTP API of a broker (docs/how-to/read-and-replay.md)."""
