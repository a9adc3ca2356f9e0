"""What makes other formats of a model's files; nothing here touches the network."""
