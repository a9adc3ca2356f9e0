"""JSON schemas as the grammar library can keep them: what it gets wrong is put another way or refused."""
