"""Runs cases on a GPU, each in a process of its own, and brings home what each has shown."""
