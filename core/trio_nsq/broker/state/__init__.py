"""The pure, synchronous state: topics, channels, what is in flight, deferred or given up. No IO, no clock."""
