"""Blocking clients of a broker's HTTP API. They use only the standard library, like all code for Spark's workers."""
