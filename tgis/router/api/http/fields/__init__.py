"""Fields that several APIs over HTTP share, and the errors about fields."""
