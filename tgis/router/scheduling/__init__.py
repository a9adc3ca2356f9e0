"""Scheduler: decides what the next step computes, and in which rows and cache blocks."""
