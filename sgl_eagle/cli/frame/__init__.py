"""What all commands share: dispatch and exit codes, arguments, results, progress, output paths."""
