"""Offline, two-stage toolkit for DFlash drafters: extract hidden states once, train over them."""

__version__ = "0.1.0"
