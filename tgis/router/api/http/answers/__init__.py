"""Forms and encoders of answers that APIs over HTTP share."""
