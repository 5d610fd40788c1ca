"""The consumer: subscriptions, flow control (RDY and backoff), discovery of brokers, and the messages handed out."""
