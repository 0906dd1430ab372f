"""`mme config`: what configurations say, what is wrong with them, and what becomes of each of their fields."""
