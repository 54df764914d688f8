"""Specs: what to capture and where to intervene, and the file that holds one."""
