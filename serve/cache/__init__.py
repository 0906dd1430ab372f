"""All models in memory, within a budget: leases, single-flight loads, eviction."""
