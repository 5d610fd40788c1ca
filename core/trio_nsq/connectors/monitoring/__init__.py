"""`/healthz`, `/metrics` and `/stats` of jobs that run permanently: exports and connectors."""
