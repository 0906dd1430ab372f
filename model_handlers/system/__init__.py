"""The machine: processors, memory, GPUs, disks, threads and their priorities."""
