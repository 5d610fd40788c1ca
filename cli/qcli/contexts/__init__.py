"""Contexts: named sets of addresses and connection options, in a file of the user."""
