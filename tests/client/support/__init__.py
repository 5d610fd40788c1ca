"""What the client's tests share.

fake_broker: a broker over TCP that follows the script of a test, and `bounded`, the time limit of a test.
consumers, producers: a consumer or a producer opened on a fake broker.
lookupds: a discovery service with given answers.
scripted_http: a broker over HTTP with given answers.
"""
