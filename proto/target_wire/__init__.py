"""The contract between target-server and drafter-trainer: everything that both must agree on."""
