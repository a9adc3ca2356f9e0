"""APIs and engine in separate processes: both halves of a handle, and the messages between them."""
