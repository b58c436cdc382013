"""Measurements: `make bench`, or `python -m bench --rows batch,single --repeat 5`."""
