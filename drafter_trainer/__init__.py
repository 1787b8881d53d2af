"""The trainer: decides what is read and when, pulls features from the target, trains and measures the drafter."""
