"""The trainer's side of the contract: where hidden-state batches come from.

One step through it: ``delivery`` (in the trainer) submits micro-batches in plan order and owns the ring; ``receiver``
(a process of its own, because receiving holds the interpreter's lock) keeps one ``session`` per replica, sends every
request to the least-loaded one and copies what arrives into the ring's slots after ``assembly`` has checked it;
``delivery`` hands the slots over in plan order and frees them when the trainer has consumed them. ``discovery`` knows
who serves, ``head`` fetches the target's embedding and head.

This file imports nothing: the receiver must start fast and without torch.
"""
