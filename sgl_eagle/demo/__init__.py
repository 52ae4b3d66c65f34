"""The demo: record, profile, calibrate, tune, run for real, and report, in one command."""
