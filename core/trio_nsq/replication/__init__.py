"""Copies of a broker's data folder on other machines, kept by repeating its file operations there.

`RecordingFiles` gives the broker's file operations numbers, `OperationStream` keeps the newest for the members that
follow, and a `Replica` repeats them in its own folder, whose `Journal` survives a power cut. The replica knows nothing
of topics or channels: a broker that opens the folder finds what it would find after a kill of the leader.
"""
