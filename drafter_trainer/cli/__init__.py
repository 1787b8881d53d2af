"""The verbs of drafter-trainer, one module each. They read options, call the rooms below, and print; nothing else."""
