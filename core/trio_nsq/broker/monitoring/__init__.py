"""What the broker tells of itself: /stats, Prometheus metrics, statsd."""
