"""What the world asks for, and what a run leaves behind.

Requests, the readers and generators that make them, their statistics, and the records of a run.
Nothing here chooses, computes a latency, makes time pass or draws.
"""
