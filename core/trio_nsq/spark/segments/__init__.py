"""Reading topics from copies of data folders and from archives of segments, without a broker.

`log.SegmentLog` reads one topic's segments with the readers of `trio_nsq.log.inspection`, and returns what the broker
would return for the same files. Nothing is written.
"""
