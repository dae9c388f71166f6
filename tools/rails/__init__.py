"""What tests and benchmarks run on: real ranks, TRL's own environments, snapshots, bare wheels."""
