"""Code that several commands share: actions on topics and channels, settings, and engines of bulk commands."""
