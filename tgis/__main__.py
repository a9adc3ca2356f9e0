"""Runs the `tgis` command for `python -m tgis`."""

from tgis.cli.main import main

if __name__ == "__main__":
    main()
