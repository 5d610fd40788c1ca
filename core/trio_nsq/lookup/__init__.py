"""Discovery: which brokers have which topics and channels (nsqlookupd in NSQ).

For brokers: `announcements` computes the commands for a service, without IO; `registration` sends them. For consumers:
`query`. `service/` is the discovery service itself, and `protocol` its wire protocol.
"""
