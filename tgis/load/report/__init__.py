"""Writes the report of a measurement as JSON, Markdown, CSV and HTML, and compares reports."""
