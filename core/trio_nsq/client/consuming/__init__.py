"""The consumer: subscriptions, flow control (RDY and backoff), and the messages handed out."""
