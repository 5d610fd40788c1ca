"""Helpers for the tests of the client.

fake_broker: a broker over TCP that follows the script of a test, and `bounded`, the time limit of a test.
consumers, producers: a consumer or a producer that is connected to a fake broker.
lookupds: a discovery service with given answers.
scripted_http: a broker over HTTP with given answers.
"""
