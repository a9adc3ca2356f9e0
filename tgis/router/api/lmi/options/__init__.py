"""Options of DJL's LMI containers that the launcher reads with `--compat lmi`."""
