"""A run as a value: composed, planned, launched, executed, recorded."""
