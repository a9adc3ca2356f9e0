"""Names of other servers' options that are read too."""
