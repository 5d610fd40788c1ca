"""What all commands are built from: click extensions, options and values, errors and exit codes, output, signals."""
