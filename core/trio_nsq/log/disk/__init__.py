"""The log on disk: a folder of segments, and the messages carried forward from discarded ones."""
