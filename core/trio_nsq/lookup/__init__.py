"""Discovery: which brokers have which topics and channels (nsqlookupd in NSQ).

The broker's side: `announcements` (the commands for a service) is pure, `registration` is the IO around it. `query`
is how consumers ask. `service/` is the discovery service itself, `protocol` the bytes between it and a broker.
"""
