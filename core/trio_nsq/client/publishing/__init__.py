"""The producer: which broker gets a publish, what is joined into one MPUB, and what waits for an acknowledgement."""
