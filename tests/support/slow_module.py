"""Module whose import takes longer than any time limit."""

import time

time.sleep(600)
