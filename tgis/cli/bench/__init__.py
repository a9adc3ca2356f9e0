"""Defines `tgis bench`: its options, and what it shows in the terminal."""
