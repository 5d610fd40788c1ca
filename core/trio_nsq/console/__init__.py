"""The web console: shows a fleet of brokers, and changes it. It replaces nsqadmin.

Its packages are the extra `admin`. `server.serve` runs it.
"""
