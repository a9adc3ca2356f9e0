"""`python -m tgis` is the `tgis` command."""

from tgis.cli import main

if __name__ == "__main__":
    main()
