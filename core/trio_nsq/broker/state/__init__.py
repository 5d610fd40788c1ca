"""The broker's synchronous state: topics, channels, and messages in flight, deferred or withdrawn. No clock."""
