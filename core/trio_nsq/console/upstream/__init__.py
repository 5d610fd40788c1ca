"""Requests to brokers and discovery services."""
