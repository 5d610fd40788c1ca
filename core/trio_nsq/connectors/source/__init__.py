"""Read topics from brokers: the log of a broker of this project by position, or a channel as any NSQ consumer.

`run_sources` follows topics and brokers. It opens a `Source` for each and calls the connector's function with it.
"""
