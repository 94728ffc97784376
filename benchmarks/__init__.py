"""Speed, as ratios measured in one run: ``make bench``, or ``python -m benchmarks NAME …`` for a part.

A benchmark is a module here with a function ``rows()`` that measures and yields a dict a row. They are
not tests: a shared machine is noisy, and a ratio is read by a person.
"""
