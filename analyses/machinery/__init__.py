"""What computations run on: compiled loops, threads, worker processes, files."""
