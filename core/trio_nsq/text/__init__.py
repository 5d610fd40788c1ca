"""Values as people write and read them: durations, sizes, counts, settings."""
