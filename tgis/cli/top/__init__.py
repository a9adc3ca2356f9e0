"""Implements `tgis top`, which shows a running service on a terminal. It reads only `/metrics`."""
