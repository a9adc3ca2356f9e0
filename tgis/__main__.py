"""`python -m tgis` is the `tgis` command."""

from tgis.cli.main import main

if __name__ == "__main__":
    main()
