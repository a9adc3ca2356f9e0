"""Parts of answers that completions and chats share."""
