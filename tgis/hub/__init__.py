"""The local cache of a model hub: finds and reads a model's files, and downloads them."""
