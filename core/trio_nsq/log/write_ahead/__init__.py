"""The write-ahead log of a node: unsynced parts of many topics' segments in one file, so that one sync serves all."""
