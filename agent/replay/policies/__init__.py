"""Policies of the field, each written from its paper, and ours: what `simulate` compares."""
