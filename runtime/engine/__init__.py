"""The engine: carries out what the policies order, one step after the other.

Requests become sequences, sequences get pages and tokens, sampled tokens go back. Nothing here
knows HTTP or text.
"""
