"""The demo: a newcomer's one command from nothing to a trained, measured drafter.

Not installed; run from a checkout as `python -m demo` or `python -m demo --tiny`. It uses the two programs by their
command lines and the trainer's public evaluation functions, nothing else of theirs.
"""
