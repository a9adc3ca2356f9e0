"""Options of TGI that the launcher reads with `--compat tgi`."""
