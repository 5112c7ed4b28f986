"""Running a decoder-only language model step by step: specifications, weights, paged attention.

Tensors, pages and sequences by number live here; requests, clocks and choices do not.
"""
