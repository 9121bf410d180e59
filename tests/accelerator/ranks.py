"""How many ranks a test takes: SIM_DEVICES=4 gives four devices, and four ranks where it can."""

import os

RANKS = int(os.environ.get("SIM_DEVICES", "2"))
