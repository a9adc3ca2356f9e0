"""Module that takes longer to import than anybody waits."""

import time

time.sleep(600)
