"""One model in memory: its queue and lanes, what executes, and what it has beside its file."""
