"""The project's numbers, measured: `make bench`."""
