"""`tgis top`: a running service, seen from a terminal. Reads nothing but `/metrics`."""
