"""How the commands read their options: ours, and the names of other servers."""
