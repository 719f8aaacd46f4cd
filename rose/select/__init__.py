"""Choosing the fastest way by measurement: attention backends, products, padding and budgets, by shape and device.

What is found is a profile (rose/config/profile.py), which the engine reads; those that ship lie in `profiles/`. Knows
engines and clocks; knows nothing of serving.
"""
