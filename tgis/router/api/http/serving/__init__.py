"""Ports of APIs over HTTP: authentication, routing, accounts of answers, metrics."""
