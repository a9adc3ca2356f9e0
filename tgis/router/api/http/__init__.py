"""Parts that APIs over HTTP share, and the ports that serve them."""
