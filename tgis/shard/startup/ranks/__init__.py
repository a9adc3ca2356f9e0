"""What several ranks find out together before the first step."""
