"""Declares the metadata key for the priority of a call, which messages of gRPC APIs lack."""

import re

PRIORITY_KEY = "tgis-priority"
PRIORITY = re.compile("-?[0-9]{1,10}")
ALLOWED_PRIORITY = "a whole number, such as 10"
