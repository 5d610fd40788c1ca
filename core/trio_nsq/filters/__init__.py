"""Select messages by their bodies, and select fields of JSON bodies. No IO."""
