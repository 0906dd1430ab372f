"""Instances in processes of their own: any handler, behind the same interface, where its failure harms no other.

Nothing is imported here: what runs inside (`main`, `events`, `wire`, `memory`) may do so in an environment of the
model's own, which need not have what the others need.
"""
