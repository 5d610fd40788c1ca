"""Reading a topic by sequence or time, over the HTTP interface of a broker (docs/how-to/read-and-replay.md)."""
