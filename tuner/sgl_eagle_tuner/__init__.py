"""Offline tuner: replay recorded confidence traces, simulate, search, report."""
