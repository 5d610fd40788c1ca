"""Reads, searches and renders messages."""
