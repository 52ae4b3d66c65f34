"""The HTML report: its data (`data`), its figures (`figures`) and its page (`render`)."""
