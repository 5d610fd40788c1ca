"""What is done with many brokers, for commands and the console alike: which addresses are one broker or one log, their
state, changes on all of them.

The work on one broker is a procedure of requests (`trio_nsq.api.request`), for any transport.
"""
