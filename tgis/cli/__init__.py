"""The commands, from arguments and environment to a configuration."""
