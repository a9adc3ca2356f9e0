"""Products with codes and bfloat16 arithmetic on AMX tiles."""
