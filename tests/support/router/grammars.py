"""Grammars that take long to compile or are nested too deeply."""

# Takes 2 s and 256 MiB to compile.
SLOW = {"type": "integer", "minimum": -(10**17), "maximum": 10**17 + 3, "multipleOf": 999983}
DEEP_RULES = "start: a0\n" + "\n".join(f'a{i}: "x{i}" a{i + 1}' for i in range(3000)) + '\na3000: "x"'
