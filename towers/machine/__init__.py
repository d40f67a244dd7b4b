"""What this machine has: the CPUs and memory that a process may use, and its GPUs."""
