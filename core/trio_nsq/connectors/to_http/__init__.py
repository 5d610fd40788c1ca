"""Send the messages of channels to HTTP receivers, at least once."""
