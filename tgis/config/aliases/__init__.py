"""Declares the option names of TGIS that the commands also accept, and what such a name is."""
