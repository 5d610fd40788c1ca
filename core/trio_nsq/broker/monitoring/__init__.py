"""Monitoring of the broker: /stats, Prometheus metrics, statsd."""
