"""Copy messages to topics of other brokers: once each between brokers of this project, else at least once."""
