"""Reading topics from copies of data folders and from archives of segments, without a broker.

`log.SegmentLog` reads one topic's segments as `trio_nsq.log.inspection.log`: it returns what the broker would return
for the same files. Nothing is written.
"""
