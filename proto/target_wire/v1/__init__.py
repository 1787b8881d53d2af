"""Generated from `target.proto` by `make proto`; never edited."""
