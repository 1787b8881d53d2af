"""Everything that tests import from each other lies in `tests.support`."""
