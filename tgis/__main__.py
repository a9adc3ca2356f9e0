"""Runs the `tgis` command for `python -m tgis`."""

from tgis.cli.main import main
from tgis.process.child import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    main()
