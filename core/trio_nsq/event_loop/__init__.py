"""The event loop of sockets beside trio's, its limits of time, and pauses between attempts."""
