"""Every choice, as pure Python that both engines import unchanged.

A policy is told what happened and what time it is, and answers with orders. It never reads a
clock, draws from a global generator or touches a device.
"""
