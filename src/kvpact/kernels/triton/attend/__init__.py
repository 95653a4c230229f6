"""Attention over everything: launches, the general kernel, and the merge of parts."""
