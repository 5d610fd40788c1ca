"""What several commands share: actions on topics and channels, settings, and the engines of bulk commands."""
