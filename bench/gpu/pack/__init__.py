"""What a machine with a GPU and without a network needs beside its own packages."""
