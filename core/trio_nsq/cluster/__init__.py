"""A broker as a member of a cluster: it follows a leader, or leads."""
