"""Memory of a process: its return to the system, and huge pages."""
