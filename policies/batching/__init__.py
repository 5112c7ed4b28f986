"""Which sequences an engine runs, and how many tokens of each it computes in a step.

The policy keeps accounts of tokens and pages; its driver owns the bytes and the clock.
"""
