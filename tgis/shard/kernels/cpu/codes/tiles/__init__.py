"""Products with codes on AMX tiles, with bfloat16 arithmetic or activations rounded to 8 bits."""
