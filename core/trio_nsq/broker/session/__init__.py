"""TCP clients: one session each."""
