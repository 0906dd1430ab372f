"""Instances in processes of their own: any handler, behind the same interface, where its failure hurts nobody else.

From the outside in: `handler` and `requests_handler` are what the engine sees, `process` one life of one child, `hosts`
children that several models share, `fork_client` and `fork_server` start and end them, `child` and `events` are what
runs inside, `segments` and `framing` are how tensors and messages of batches cross, `channel` and `listener` what is
said beside them.

Nothing is imported here: what runs inside may do so in an environment of the model's own, which need not have what the
others need.
"""
