"""A broker as a member of a cluster: it follows the leader, or leads.

`member` runs it, from its start to its end, with `following` and `leading` in turn; `membership` is what its data
folder says about it; `options` are its settings. `front` serves the clients of a follower. Which member leads is
decided in `trio_nsq.coordination`, and folders are copied by `trio_nsq.replication`.
"""
