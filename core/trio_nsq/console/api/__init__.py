"""nsqadmin's JSON API."""
