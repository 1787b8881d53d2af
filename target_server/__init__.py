"""Serves the hidden states of a frozen target: one front process, one process per copy of the model."""
