"""The HTTP APIs of brokers and discovery services for clients: requests as data, and typed answers. No IO."""
