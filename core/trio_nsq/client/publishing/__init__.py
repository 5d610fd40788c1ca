"""The producer: choice of the broker, batching into MPUBs, and tracking of acknowledgements."""
