"""Numbers one could work out on paper: slot loads, seconds, optimal ratios, scenarios.

Pure functions over numpy arrays; no clock, no simulated time, no choice.
"""
